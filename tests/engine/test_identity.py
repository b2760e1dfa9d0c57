# SPDX-License-Identifier: Apache-2.0
"""Greedy output is the target's own, token by token, whatever the engine goes through.

One engine per way of speculating runs all scenarios; every scenario is then compared on its own.
"""

from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, slem
from scenarios import ROOMY, TIGHT, Outputs

from vllm_hetero_spec.engine.stats import read_stats

pytestmark = pytest.mark.engine

TIGHT_LIMITS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_model_len": 320,
    "num_gpu_blocks_override": 40,
    "block_size": 32,
    "max_num_seqs": 16,
}
# How each way speculates, and the least share of proposed tokens that must be accepted where the
# drafter is the target.
WAYS = {"pair": 0.0, "identity": 0.995, "forced text": 0.97}


@pytest.fixture(scope="module")
def spec(demo_pair: Path) -> dict[str, dict[str, Any] | None]:
    target = demo_pair / "target"
    return {
        "alone": None,
        "pair": slem(demo_pair / "drafter"),
        "identity": slem(target),
        "forced text": slem(target, translation="text"),
    }


@pytest.fixture(scope="module")
def runs(demo_pair: Path, prompts: list[str], spec: dict) -> dict[tuple[str, str], tuple]:
    """(way, scenario) -> token ids, and what the counters gained meanwhile."""
    found = {}
    for way, config in spec.items():
        for scenarios, limits in ((ROOMY, {}), (TIGHT, TIGHT_LIMITS)):
            with engine(demo_pair / "target", config, **limits) as llm:
                for name, scenario in scenarios.items():
                    before = metrics_of(llm)
                    ids: Outputs = scenario(llm, prompts)
                    gained = {k: v - before.get(k, 0) for k, v in metrics_of(llm).items()}
                    if config is not None:
                        gained["skipped"] = read_stats(llm)["skipped"]
                    found[way, name] = (ids, gained)
    return found


@pytest.mark.parametrize("scenario", [*ROOMY, *TIGHT])
@pytest.mark.parametrize("way", WAYS)
def test_same_tokens_as_the_target_alone(runs: dict, way: str, scenario: str) -> None:
    alone, _ = runs["alone", scenario]
    found, gained = runs[way, scenario]
    assert found == alone
    assert gained["num_drafts"] > 0
    assert gained["num_accepted_tokens"] > 0
    assert gained["num_draft_tokens"] <= 4 * gained["num_drafts"]
    assert "drafter_error" not in gained["skipped"]


@pytest.mark.parametrize("scenario", [*ROOMY, *TIGHT])
@pytest.mark.parametrize("way", ["identity", "forced text"])
def test_drafter_equal_to_the_target_is_accepted(runs: dict, way: str, scenario: str) -> None:
    _, gained = runs[way, scenario]
    share = gained["num_accepted_tokens"] / gained["num_draft_tokens"]
    assert share >= WAYS[way], f"{share:.4f} of {gained['num_draft_tokens']}"


def test_preemption_was_forced(runs: dict) -> None:
    assert runs["pair", "preemption"][1]["num_preemptions"] > 0
    assert runs["alone", "preemption"][1]["num_preemptions"] > 0
