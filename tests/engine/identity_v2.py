# SPDX-License-Identifier: Apache-2.0
"""Greedy identity on Model Runner V2. `test_fast_children.py` runs these tests in a child."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from scenarios import Run
from v2_runs import SOME, run_way

from vllm_hetero_spec.engine.seam import async_scheduling

FEW = {
    name: SOME[name] for name in ("batch 8", "mixed parameters", "structured output", "preemption")
}


@pytest.fixture(scope="module")
def runs(demo_pair: Path, code_prompts: list[str]) -> Iterator[dict[str, Run]]:
    """Runs of the target alone, and with a drafter and asynchronous scheduling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_scheduling, "platform_can", lambda: True)  # `run_way` sets it too
        yield {
            way: run_way(way, demo_pair, code_prompts[:8], FEW) for way in ("alone", "pair, ahead")
        }


@pytest.mark.parametrize("scenario", FEW)
def test_same_tokens_as_the_target_alone(runs: dict[str, Run], scenario: str) -> None:
    alone, _ = runs["alone"][scenario]
    found, gained = runs["pair, ahead"][scenario]
    assert found == alone
    assert gained["num_accepted_tokens"] > 0
    assert "drafter_error" not in gained["skipped"]
    if scenario == "preemption":
        assert gained["num_preemptions"] > 0
