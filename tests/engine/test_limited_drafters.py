# SPDX-License-Identifier: Apache-2.0
"""A drafter with little memory or a short context has fewer drafts; all outputs are right."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, proposer_of, slem, warnings
from scenarios import Outputs, generate, greedy
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_hetero_spec import read_stats

pytestmark = pytest.mark.engine


def test_pool_too_small(demo_pair: Path, texts: list, alone: Outputs, caplog) -> None:
    """The pool holds one short sequence. Most requests have no drafts; all outputs are right."""
    spec = slem(demo_pair / "drafter", kv_cache_memory_bytes=1)
    with (
        pytest.raises(Exception, match="less than two KV blocks"),
        engine(demo_pair / "target", spec),
    ):
        pass
    block = _block_bytes(demo_pair)
    spec["kv_cache_memory_bytes"] = 6 * block
    with engine(demo_pair / "target", spec) as llm:
        assert read_stats(llm)["kv_blocks"] == 5
        assert generate(llm, texts, greedy()) == alone
        assert read_stats(llm)["skipped"]["no_blocks"] > 0
        assert metrics_of(llm)["num_accepted_tokens"] > 0
    assert len(warnings(caplog, "no_blocks")) == 1
    assert "kv_cache_memory_bytes" in warnings(caplog, "no_blocks")[0]


@pytest.mark.full
def test_blocks_of_a_size_of_its_own(
    demo_pair: Path, texts: list, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's own attention backends determine its block size."""
    settle = current_platform.update_block_size_for_backend

    def settled(config: VllmConfig) -> None:
        settle(config)
        if config.model_config.model == str(demo_pair / "drafter"):
            config.cache_config.block_size = 32

    monkeypatch.setattr(current_platform, "update_block_size_for_backend", settled)
    spec = slem(demo_pair / "drafter", kv_cache_memory_bytes=6 * _block_bytes(demo_pair))
    with engine(demo_pair / "target", spec) as llm:
        assert read_stats(llm)["kv_blocks"] == 6 * 128 // 32 - 1
        assert llm.llm_engine.vllm_config.cache_config.block_size != 32
        assert generate(llm, texts, greedy()) == alone
        assert metrics_of(llm)["num_accepted_tokens"] > 0


def _block_bytes(demo_pair: Path) -> int:
    config = json.loads((demo_pair / "drafter" / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4 * 128


@pytest.mark.full
@pytest.mark.parametrize(("drafter", "method"), [("drafter", "slem"), ("target", "hetero")])
def test_a_text_outgrows_the_drafters_context(
    demo_pair: Path, texts: list, code_prompts: list, alone: Outputs, drafter: str, method: str
) -> None:
    """The drafter reads the last part of the text, also if both tokenizers are equal."""
    bound = 96
    long = code_prompts[0][:1200]
    params = [greedy(max_tokens=200, ignore_eos=True), greedy(max_tokens=60, presence_penalty=0.5)]
    with engine(demo_pair / "target") as llm:
        written = [generate(llm, [long] * 2 + texts[:2], given) for given in params]
    spec = slem(demo_pair / drafter, method=method, context=bound)
    with engine(demo_pair / "target", spec) as llm:
        assert generate(llm, texts, greedy()) == alone
        lengths: list[int] = []
        requests = proposer_of(llm).drafting.requests
        read = requests.read

        def noted(*args: Any) -> Any:
            found = read(*args)
            lengths.extend(len(state.context.ids) for _, state in found)
            return found

        requests.read = noted
        before = read_stats(llm)
        assert [generate(llm, [long] * 2 + texts[:2], given) for given in params] == written
        stats = read_stats(llm)
        assert max(lengths) < bound
        tokens = stats["catch_up_tokens"] - before["catch_up_tokens"]
        assert tokens < 4 * (4 * 200 + 4 * 60)  # each token is read about twice
        assert "drafter_length" not in stats["skipped"]
        gained = metrics_of(llm)
        length = 1 + gained["num_accepted_tokens"] / gained["num_drafts"]
        assert length > 1.3
