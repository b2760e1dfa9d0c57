# SPDX-License-Identifier: Apache-2.0
"""KV transfer between instances: they transfer the target's KV, never the drafter's."""

from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec import read_stats

LENGTHS = (200, 170, 140, 230)


def sharing(folder: Path, role: str = "kv_both") -> dict[str, Any]:
    """Arguments of an engine that stores or loads its prompts' KV, layer by layer."""
    return {
        "block_size": 32,
        "enable_prefix_caching": False,
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


@pytest.fixture(scope="module")
def requests(demo_pair: Path, prompts: list[str]) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair / "target")
    ids = tokenizer.encode("\n".join(prompts), add_special_tokens=False)
    return [{"prompt_token_ids": ids[i * 300 : i * 300 + n]} for i, n in enumerate(LENGTHS)]


def one_by_one(llm: Any, requests: list[dict[str, Any]]) -> Outputs:
    """Return the outputs. A request starts every four steps, while earlier ones have drafts."""
    engine, found, waiting = llm.llm_engine, {}, list(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            index, request = waiting.pop(0)
            engine.add_request(str(index), request, greedy())
        for _ in range(4):
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
    return found


@pytest.mark.full
@pytest.mark.engine
def test_transferred_kv_is_the_targets(
    demo_pair: Path, requests: list[dict[str, Any]], tmp_path: Path
) -> None:
    # Of this prompt only the last token is not cached. vLLM pads its first step with drafts of -1.
    cached = [{"prompt_token_ids": requests[0]["prompt_token_ids"][: 6 * 32 + 1]}]
    with engine(demo_pair / "target") as llm:
        alone, cached_alone = (generate(llm, asked, greedy()) for asked in (requests, cached))
    spec = slem(demo_pair / "drafter")
    with engine(demo_pair / "target", spec, **sharing(tmp_path)) as llm:
        # As on a GPU: drafting begins while the connector still stores the KV of the step.
        proposer_of(llm).drafting.source.drafter.waits = True
        assert one_by_one(llm, requests) == alone
        assert metrics_of(llm)["num_accepted_tokens"] > 0
    assert len(list(tmp_path.iterdir())) == len(requests)
    consumer = sharing(tmp_path, "kv_consumer") | {"enable_prefix_caching": True}
    with engine(demo_pair / "target", spec, **consumer) as llm:
        assert generate(llm, requests, greedy()) == alone
        assert metrics_of(llm)["num_accepted_tokens"] > 0
        drafts = metrics_of(llm)["num_drafts"] - read_stats(llm)["drafts"]
        assert generate(llm, cached, greedy()) == cached_alone
        filled = metrics_of(llm)["num_drafts"] - read_stats(llm)["drafts"] - drafts
        assert filled == 1
        figures = {metric.name: metric for metric in llm.get_metrics()}
    read = sum((length - 1) // 32 * 32 for length in LENGTHS)
    assert figures["vllm:external_prefix_cache_hits"].value == read
