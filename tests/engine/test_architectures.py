# SPDX-License-Identifier: Apache-2.0
"""Drafters of several decoder architectures: small models with random weights.

Each model drafts for itself, so every draft token must be accepted. A difference in positions,
experts, attention sinks or sliding windows would be visible in the first draft.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, slem
from scenarios import Outputs, generate, greedy
from small_models import save_model
from transformers import (
    BloomConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from vllm_hetero_spec import read_stats

pytestmark = pytest.mark.engine

_GROUPED = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 2,
}
_KINDS: dict[str, Callable[..., PretrainedConfig]] = {
    "learned positions": lambda **ids: GPT2Config(n_embd=128, n_layer=2, n_head=2, **ids),
    "distances": lambda **ids: BloomConfig(hidden_size=128, n_layer=2, n_head=2, **ids),
    "experts": lambda **ids: Qwen3MoeConfig(
        **_GROUPED, num_experts=4, moe_intermediate_size=128, decoder_sparse_step=1, **ids
    ),
    "sinks, windows, experts": lambda **ids: GptOssConfig(
        **_GROUPED,
        num_local_experts=4,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        **ids,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", _KINDS)
def test_a_model_drafts_for_itself(
    kind: str, demo_pair: Path, texts: list[Any], tmp_path: Path
) -> None:
    save_model(_KINDS[kind], demo_pair, tmp_path)
    with engine(tmp_path, slem(tmp_path)) as llm:
        generate(llm, texts, greedy())
        metrics = metrics_of(llm)
        assert "drafter_error" not in read_stats(llm)["skipped"]
    assert metrics["num_accepted_tokens"] == metrics["num_draft_tokens"] > 100


@pytest.mark.full
def test_a_mixture_of_experts_drafts_for_a_target_without(
    demo_pair: Path, texts: list[Any], alone: Outputs, tmp_path: Path
) -> None:
    """vLLM creates an expert-parallel group only if the target has experts."""
    save_model(_KINDS["experts"], demo_pair, tmp_path)
    with engine(demo_pair / "target", slem(tmp_path)) as llm:
        assert generate(llm, texts, greedy()) == alone
        assert "drafter_error" not in read_stats(llm)["skipped"]
        assert metrics_of(llm)["num_draft_tokens"] > 0


def test_one_that_attention_has_no_kernel_for_is_refused(demo_pair: Path, tmp_path: Path) -> None:
    """vLLM refuses such a target, too. Without a refusal every round of drafting would fail."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    kind = lambda **ids: LlamaConfig(**sizes, num_attention_heads=4, **ids)  # noqa: E731
    save_model(kind, demo_pair, tmp_path)
    with (
        pytest.raises(Exception, match=r"^the drafter '.*' cannot run on this cpu \(.*\); give"),
        engine(demo_pair / "target", slem(tmp_path)),
    ):
        pass


def test_weights_that_git_has_not_fetched_are_named(demo_pair: Path, tmp_path: Path) -> None:
    """The reader of the weights raises a MemoryError without a message."""
    drafter = shutil.copytree(demo_pair / "drafter", tmp_path / "drafter")
    (weights,) = drafter.glob("*.safetensors")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with (
        pytest.raises(Exception, match=r"^the drafter '.*' cannot be loaded: .* `git lfs pull`\.$"),
        engine(demo_pair / "target", slem(drafter)),
    ):
        pass
