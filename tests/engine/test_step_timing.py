# SPDX-License-Identifier: Apache-2.0
"""Tests of start-up timing of both models: sizes and budget."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hetero_spec.engine import step_timing as costing
from vllm_hetero_spec.engine.pair_file import PairFile
from vllm_hetero_spec.engine.step_timing import known_of_pair, sizes, time_steps
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.options import HeteroOptions


def test_sizes_grow_and_end_with_the_largest() -> None:
    assert list(sizes(1)) == [1]
    assert list(sizes(13)) == [1, 2, 3, 4, 6, 8, 12, 13]
    assert list(sizes(4096))[-1] == 4096
    assert len(list(sizes(4096))) < 30


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Current time in seconds, in a list. Only the test advances it."""
    now = [0.0]
    monkeypatch.setattr(costing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(costing.torch.accelerator, "synchronize", lambda: None)
    return now


def test_each_size_is_the_quickest_of_some_and_long_ones_are_left_out(clock: list[float]) -> None:
    """Each size has the time of its fastest run. No size is added after the budget is spent."""
    ran: list[int] = []

    def step(size: int) -> None:
        ran.append(size)
        late = 5.0 if ran.count(size) == 2 and size == 1 else 0.0  # one of three is disturbed
        clock[0] += 0.01 * size + late

    points = dict(time_steps(step, 64))
    assert points[1] == pytest.approx(0.01)
    assert set(points) == {1}  # the disturbance has spent the budget
    assert ran == [1] * 4  # the first run is not timed

    ran.clear()
    points = dict(time_steps(lambda size: clock.__setitem__(0, clock[0] + 0.02 * size), 64))
    assert points[8] == pytest.approx(0.16)
    assert max(points) == 12  # half of the budget is spent


def test_what_a_context_token_costs(clock: list[float]) -> None:
    ran: list[int] = []

    def read(tokens: int) -> None:
        ran.append(tokens)
        clock[0] += 0.01 + 0.002 * tokens + (9.0 if len(ran) == 3 else 0.0)

    assert costing.time_catch_up(read, 128, 0.01) == pytest.approx(0.002)
    assert set(ran) == {128}
    assert costing.time_catch_up(lambda tokens: None, 128, 0.01) == 0.0  # never negative


def test_ranks_stop_together(clock: list[float]) -> None:
    """Timing stops when the first rank's value is True, on every rank."""
    asked: list[bool] = []

    def agree(said: bool) -> bool:
        asked.append(said)
        return len(asked) == 3  # the first rank's value

    assert len(time_steps(lambda size: None, 64, agree)) == 3
    assert asked == [False] * 3


@pytest.mark.parametrize("experts", [True, False])
def test_engines_that_wait_for_each_other_take_as_many_steps(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experts: bool
) -> None:
    """Only engine 0 has a file of estimates. With experts, engine 1 runs no step either."""
    group = SimpleNamespace(is_first_rank=True, broadcast_object=lambda said, src: said)
    monkeypatch.setattr(costing, "get_tp_group", lambda: group)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(is_moe=experts),
        parallel_config=SimpleNamespace(
            data_parallel_size=2 if experts else 1, pipeline_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    options = HeteroOptions("slem", "drafter", 4)
    files = [PairFile(tmp_path, rank) for rank in range(2)]
    files[0].write(Estimates.of(CostModel([(1, 0.1)], [(1, 0.01)]), 4))
    steps = [0, 0]
    for rank, file in enumerate(files):

        def target_forward(rows: int, rank: int = rank) -> None:
            steps[rank] += 1
            clock[0] += 0.1

        seam: Any = SimpleNamespace(target_forward=target_forward, max_num_tokens=64)
        source: Any = SimpleNamespace(
            step=lambda batch: None, read=lambda tokens: None, max_length=64
        )
        drafting: Any = SimpleNamespace(
            source=source, parts=None, unknown=lambda costs: Estimates.of(costs, 4)
        )
        known = known_of_pair(file, seam, drafting, config, options)
        assert known is not None  # live timings update these estimates, and they are saved
        assert known.costs.knows_target != (experts and rank == 1)
    assert steps[0] == 0
    assert (steps[1] == 0) == experts


@pytest.mark.parametrize("error", [PermissionError("closed"), RuntimeError("recursion"), KeyError])
def test_other_ranks_are_told_whatever_reading_comes_to(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """The other ranks wait for the first rank's broadcast, and time steps together with it."""
    told: list[bool] = []

    def broadcast(said: bool, src: int) -> bool:
        told.append(said)
        return said

    def read(positions: int) -> None:
        raise error

    group = SimpleNamespace(is_first_rank=True, broadcast_object=broadcast)
    monkeypatch.setattr(costing, "get_tp_group", lambda: group)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(is_moe=False),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    file: Any = SimpleNamespace(read=read)
    seam: Any = SimpleNamespace(target_forward=lambda rows: None, max_num_tokens=64)
    assert known_of_pair(file, seam, None, config, HeteroOptions("slem", "drafter", 4)) is None
    assert told[0] is False
    assert len(told) > 1  # the first rank then times steps like the others
