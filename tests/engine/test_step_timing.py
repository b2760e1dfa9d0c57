# SPDX-License-Identifier: Apache-2.0
"""Timing the two models at start-up: which sizes, when it ends, and what is kept on disk."""

from pathlib import Path
from typing import Any

import pytest

from vllm_hetero_spec.engine import step_timing as costing
from vllm_hetero_spec.engine.step_timing import CostFile, sizes, time_steps
from vllm_hetero_spec.lookahead.costs import CostModel


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


def test_costs_are_kept_by_what_they_depend_on(tmp_path: Path) -> None:
    costs = CostModel([(1, 0.1), (8, 0.2)], [(1, 0.01)])
    CostFile(tmp_path / "costs", "pair", 32).write(costs)
    again = CostFile(tmp_path / "costs", "pair", 32).read()
    assert again is not None
    assert again.target(1, 1) == pytest.approx(costs.target(1, 1))
    assert CostFile(tmp_path / "costs", "pair", 64).read() is None
    assert CostFile(None, "pair", 32).read() is None


@pytest.mark.parametrize("text", ["", "{}", '{"target": 3}', "[1"])
def test_a_spoilt_file_is_measured_anew(tmp_path: Path, text: str, caplog: Any) -> None:
    CostFile(tmp_path, "pair").write(CostModel([(1, 0.1)], [(1, 0.01)]))
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert CostFile(tmp_path, "pair").read() is None
    assert any("measured anew" in message for message in caplog.messages)


def test_a_folder_that_cannot_be_written_to_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CostFile(tmp_path / "file" / "costs", "pair").write(CostModel([(1, 0.1)], [(1, 0.01)]))
