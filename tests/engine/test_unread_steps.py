# SPDX-License-Identifier: Apache-2.0
"""While speculation is disabled, few steps are read besides those of new requests and batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import engine, proposer_of, slem
from scenarios import Outputs, generate, greedy, joining_and_aborting

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine import drafting_rank
from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG
from vllm_hetero_spec.lookahead.controllers import Fixed
from vllm_hetero_spec.lookahead.prober import UnreadSteps


def test_some_of_many_steps_without_drafts_are_looked_at() -> None:
    unread = UnreadSteps()
    first = [step for step in range(140) if not unread.skips(step > 0, 4)]
    assert first == [0, 1, 2, 64, 65, 128, 129]
    assert not unread.skips(False, 4)
    assert [unread.skips(True, 4) for _ in range(4)] == [False, False, True, True]
    # 7 requests instead of 4 count as the same batch; 8 requests count as another one.
    assert [unread.skips(True, 7), unread.skips(True, 8)] == [True, False]
    assert [unread.skips(True, 8) for _ in range(4)] == [False, False, True, True]


# ---- engines -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(demo_pair: Path, alone: Outputs) -> Iterator[Any]:
    with engine(demo_pair / "target", slem(demo_pair / "drafter", 4)) as llm:
        yield llm


@pytest.fixture
def looked_at(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The requests of each step that was read. The time limit for unread steps is off."""
    proposer = proposer_of(llm)
    seen: list[list[str]] = []
    after_step, controller = proposer.after_step, proposer.drafting.control.controller

    def look(view: Any, num_requests: int) -> Any:
        step = view()
        seen.append([request.req_id for request in step.requests])
        return after_step(lambda: step, num_requests)

    monkeypatch.setattr(proposer, "after_step", look)
    monkeypatch.setattr(drafting_rank, "_UNSEEN", float("inf"))
    yield seen
    proposer.drafting.control.controller = controller


def steps_of(llm: Any) -> int:
    return int(read_stats(llm)["steps"])


@pytest.mark.full
@pytest.mark.engine
def test_a_drafter_at_rest_is_hardly_asked(
    llm: Any, looked_at: list[list[str]], texts: list[str], alone: Outputs
) -> None:
    """Every step is counted. When the controller drafts again, every step is read."""
    proposer = proposer_of(llm)
    proposer.drafting.control.controller = Fixed(0)
    before = read_stats(llm)
    assert generate(llm, texts, greedy()) == alone
    after = read_stats(llm)
    steps = after["steps"] - before["steps"]
    assert len(looked_at) < steps
    assert after["off_steps"] - before["off_steps"] == steps
    assert after["drafts"] == before["drafts"]
    left_alone = [stats["skipped"].get("not_worth_it", 0) for stats in (before, after)]
    assert left_alone[1] - left_alone[0] >= 0.9 * sum(map(len, alone.values())) - len(texts)
    proposer.drafting.control.controller = Fixed(4)
    looked_at.clear()
    assert generate(llm, texts, greedy()) == alone
    assert len(looked_at) == steps_of(llm) - after["steps"]
    assert read_stats(llm)["drafts"] > after["drafts"]


@pytest.mark.full
@pytest.mark.engine
def test_a_drafter_at_rest_sees_who_comes(
    llm: Any, looked_at: list[list[str]], texts: list[str], alone: Outputs
) -> None:
    """A request with its own draft length has drafts at once. Until it ends, every step is read."""
    proposer_of(llm).drafting.control.controller = Fixed(0)
    driver, found, steps = llm.llm_engine, dict[str, list[int]](), 0
    driver.add_request("0", texts[0], greedy(max_tokens=200, ignore_eos=True))
    count = 0
    while driver.has_unfinished_requests():
        count += 1
        if count == 30:
            before, looks = read_stats(llm), len(looked_at)
            driver.add_request("1", texts[1], greedy(extra_args={LOOKAHEAD_ARG: 3}))
        steps += count >= 30 and len(driver.output_processor.request_states) == 2
        for output in driver.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    assert looks < 16
    assert found["1"] == alone["1"]
    assert found["0"][: len(alone["0"])] == alone["0"]
    assert read_stats(llm)["drafts"] > before["drafts"]
    with_it = [step for step in looked_at if any(name.startswith("1") for name in step)]
    assert len(with_it) == steps > 0
    assert len(looked_at) < 0.4 * count


@pytest.mark.full
@pytest.mark.engine
def test_requests_come_and_go_while_the_drafter_rests(
    llm: Any, looked_at: list[list[str]], code_prompts: list[str]
) -> None:
    """Steps with a new request or batch are read, and few others. Ended requests leave no state."""
    proposer = proposer_of(llm)
    proposer.drafting.control.controller = Fixed(4)
    drafted = joining_and_aborting(llm, code_prompts)
    proposer.drafting.control.controller = Fixed(0)
    looked_at.clear()
    before = steps_of(llm)
    assert joining_and_aborting(llm, code_prompts) == drafted
    steps = steps_of(llm) - before
    assert len(looked_at) < steps
    assert len({name for step in looked_at for name in step}) == len(code_prompts[:24])
    generate(llm, code_prompts[:1], greedy(max_tokens=40, ignore_eos=True))
    assert read_stats(llm)["requests_held"] <= 1


@pytest.mark.full
@pytest.mark.engine
def test_a_slow_step_is_looked_at(
    llm: Any, looked_at: list[list[str]], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_rank, "_UNSEEN", 0.0)
    proposer_of(llm).drafting.control.controller = Fixed(0)
    before = steps_of(llm)
    generate(llm, texts[:1], greedy(max_tokens=40, ignore_eos=True))
    assert len(looked_at) == steps_of(llm) - before
