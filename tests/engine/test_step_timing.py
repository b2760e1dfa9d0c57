# SPDX-License-Identifier: Apache-2.0
"""Timing the two models at start-up: which sizes, and when it ends."""

import pytest

from vllm_hetero_spec.engine import step_timing as costing
from vllm_hetero_spec.engine.step_timing import sizes, time_steps


def test_sizes_grow_and_end_with_the_largest() -> None:
    assert list(sizes(1)) == [1]
    assert list(sizes(13)) == [1, 2, 3, 4, 6, 8, 12, 13]
    assert list(sizes(4096))[-1] == 4096
    assert len(list(sizes(4096))) < 30


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only steps move."""
    now = [0.0]
    monkeypatch.setattr(costing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(costing.torch.accelerator, "synchronize", lambda: None)
    return now


def test_each_size_is_the_quickest_of_some_and_long_ones_are_left_out(clock: list[float]) -> None:
    ran: list[int] = []

    def step(size: int) -> None:
        ran.append(size)
        late = 5.0 if ran.count(size) == 2 and size == 1 else 0.0  # one of three is disturbed
        clock[0] += 0.01 * size + late

    points = dict(time_steps(step, 64))
    assert points[1] == pytest.approx(0.01)
    assert set(points) == {1}  # the disturbance has spent the budget

    ran.clear()
    points = dict(time_steps(lambda size: clock.__setitem__(0, clock[0] + 0.02 * size), 64))
    assert points[8] == pytest.approx(0.16)
    assert 64 not in points


def test_what_a_context_token_costs(clock: list[float]) -> None:
    ran: list[int] = []

    def read(tokens: int) -> None:
        ran.append(tokens)
        clock[0] += 0.01 + 0.002 * tokens + (9.0 if len(ran) == 3 else 0.0)

    assert costing.time_catch_up(read, 128, 0.01) == pytest.approx(0.002)
    assert set(ran) == {128}
    assert costing.time_catch_up(lambda tokens: None, 128, 0.01) == 0.0  # never below nothing


def test_ranks_stop_together(clock: list[float]) -> None:
    asked: list[bool] = []

    def agree(said: bool) -> bool:
        asked.append(said)
        return len(asked) == 3  # another rank's word

    assert len(time_steps(lambda size: None, 64, agree)) == 3
    assert asked == [False] * 3
