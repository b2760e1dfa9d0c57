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
# The least share of proposed tokens that must be accepted where the drafter is the target. Through
# text the target has to write what it means canonically, which a trained model does where it
# continues code it understands, and not quite where a grammar makes it write JSON.
IDENTITY = 0.995
THROUGH_TEXT, THROUGH_TEXT_EACH = 0.97, 0.85


@pytest.fixture(scope="module")
def runs(demo_pair: Path, prompts: list[str], code_prompts: list[str]) -> dict[str, dict]:
    """way -> scenario -> token ids, and what the counters gained meanwhile."""
    target = demo_pair / "target"
    text = slem(target, translation="text")
    return {
        "alone": _run_all(target, None, prompts),
        "alone on code": _run_all(target, None, code_prompts),
        "pair": _run_all(target, slem(demo_pair / "drafter"), prompts),
        "identity": _run_all(target, slem(target), prompts),
        "forced text": _run_all(target, text, code_prompts),
    }


def _run_all(target: Path, spec: dict[str, Any] | None, prompts: list[str]) -> dict[str, tuple]:
    found = {}
    for scenarios, limits in ((ROOMY, {}), (TIGHT, TIGHT_LIMITS)):
        with engine(target, spec, **limits) as llm:
            for name, scenario in scenarios.items():
                before = metrics_of(llm)
                ids: Outputs = scenario(llm, prompts)
                gained = {k: v - before.get(k, 0) for k, v in metrics_of(llm).items()}
                if spec is not None:
                    gained["skipped"] = read_stats(llm)["skipped"]
                found[name] = (ids, gained)
    return found


@pytest.mark.parametrize("scenario", [*ROOMY, *TIGHT])
@pytest.mark.parametrize("way", ["pair", "identity", "forced text"])
def test_same_tokens_as_the_target_alone(runs: dict, way: str, scenario: str) -> None:
    alone, _ = runs["alone on code" if way == "forced text" else "alone"][scenario]
    found, gained = runs[way][scenario]
    assert found == alone
    assert gained["num_drafts"] > 0
    assert gained["num_accepted_tokens"] > 0
    assert gained["num_draft_tokens"] <= 4 * gained["num_drafts"]
    assert "drafter_error" not in gained["skipped"]


@pytest.mark.parametrize("scenario", [*ROOMY, *TIGHT])
def test_drafter_equal_to_the_target_is_accepted(runs: dict, scenario: str) -> None:
    assert _accepted(runs["identity"][scenario]) >= IDENTITY


@pytest.mark.parametrize("scenario", [*ROOMY, *TIGHT])
def test_the_same_through_text(runs: dict, scenario: str) -> None:
    assert _accepted(runs["forced text"][scenario]) >= THROUGH_TEXT_EACH


def test_through_text_in_all(runs: dict) -> None:
    gained = [gained for _, gained in runs["forced text"].values()]
    accepted, proposed = (
        sum(g[name] for g in gained) for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    assert accepted / proposed >= THROUGH_TEXT


def _accepted(run: tuple) -> float:
    _, gained = run
    return gained["num_accepted_tokens"] / gained["num_draft_tokens"]


def test_preemption_was_forced(runs: dict) -> None:
    assert runs["pair"]["preemption"][1]["num_preemptions"] > 0
    assert runs["alone"]["preemption"][1]["num_preemptions"] > 0
