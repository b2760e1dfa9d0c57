# SPDX-License-Identifier: Apache-2.0
"""Every figure of a cell, against numbers worked out by hand."""

import pytest
from bench_fakes import sample

from vllm_hetero_spec.bench.figures import (
    figures_of,
    identical,
    pairs_with,
    quantiles,
    speedup,
    spread,
)
from vllm_hetero_spec.bench.load import Sample, Trace
from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement
from vllm_hetero_spec.bench.results import Recorded


def at_speed(tokens_per_second: float) -> Sample:
    return sample([[1] * 10], 10 / tokens_per_second)


def recorded(speeds: list[float], wave: int = 0, session: int = 0) -> list[Recorded]:
    cell = Cell(EngineId("t", "alone"), "d", 1, 0.0)
    return [
        Recorded(Measurement(cell, wave, i), session, at_speed(speed))
        for i, speed in enumerate(speeds)
    ]


def test_quantiles_are_interpolated() -> None:
    found = quantiles([0.5, 0.1, 0.3, 0.4, 0.2])
    assert (found.median, found.p90, found.p99) == pytest.approx((0.3, 0.46, 0.496))
    assert quantiles([]) is None


def test_spread_of_rounds() -> None:
    found = spread([4.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.rounds) == (2.0, 1.0, 4.0, 3)
    assert (found.quartile1, found.quartile3) == (1.5, 3.0)


def test_latencies_are_pooled_over_requests() -> None:
    first = Trace([0] * 6, "", 0.5, [1.0, 1.5, 2.5], [2, 1, 3])
    second = Trace([0, 0], "", 0.0, [0.25, 1.25], [1, 1])
    at_once = Trace([0, 0], "", 2.0, [2.125], [2])
    found = figures_of([Sample([first, second], 3.0), Sample([at_once], 1.0)])
    assert found.ttft.median == pytest.approx(0.25)  # of 0.5, 0.25, 0.125
    assert found.tpot.median == pytest.approx((0.375 + 1.0) / 2)  # the third has none
    assert found.itl.median == pytest.approx(1.0)  # of 0.5, 1.0, 1.0
    assert (found.requests, found.tokens) == (3, 10)
    assert found.tokens_per_second.median == pytest.approx((8 / 3 + 2 / 1) / 2)


def test_a_request_without_output_has_no_latency() -> None:
    found = figures_of([Sample([Trace([], "", 0.0, [], [])], 1.0)])
    assert (found.ttft, found.tpot, found.itl) == (None, None, None)
    assert (found.requests, found.tokens) == (1, 0)


def test_acceptance_is_pooled_not_averaged() -> None:
    first = sample(
        [[1]], 1.0, drafts=4, draft_tokens=7, accepted_tokens=6,
        accepted_per_position=[4, 2],
    )  # fmt: skip
    second = sample(
        [[1]], 1.0, drafts=6, draft_tokens=11, accepted_tokens=4,
        accepted_per_position=[2, 1, 1],
    )  # fmt: skip
    found = figures_of([first, second])
    assert found.acceptance_length == pytest.approx(1 + (6 + 4) / (4 + 6))
    assert found.acceptance_per_position == pytest.approx([6 / 10, 3 / 10, 1 / 10])
    assert sum(found.acceptance_per_position) == pytest.approx(found.acceptance_length - 1)
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (10, 18, 10)


def test_the_error_of_acceptance_is_over_prompts() -> None:
    def prompt(*counts: int) -> Trace:
        return Trace([0] * sum(counts), "", 0.0, list(map(float, range(len(counts)))), [*counts])

    # After the first arrival each prompt has 2 drafts: 4 tokens accepted of the first, none of the
    # other.
    first, second = prompt(1, 3, 3), prompt(1, 1, 1)
    run = Sample([first, second], 1.0, drafts=4, accepted_tokens=4)
    found = figures_of([run])
    assert found.acceptance_length == pytest.approx(2.0)
    assert found.acceptance_error == pytest.approx((2 * (2**2 + 2**2)) ** 0.5 / 4)
    # An equal second round does not reduce the error; another prompt would.
    assert figures_of([run, run]).acceptance_error == pytest.approx(found.acceptance_error)
    alike = figures_of([Sample([first, first], 1.0, drafts=4, accepted_tokens=8)])
    assert alike.acceptance_error == pytest.approx(0.0)
    single = figures_of([Sample([first], 1.0, drafts=2, accepted_tokens=4)])
    assert single.acceptance_error is None


def test_counters_are_summed_and_absent_ones_are_none() -> None:
    worker = {"drafter_tokens": 5, "verify_seconds": 0.25, "skipped": {"no_blocks": 2, "x": 0}}
    counted = sample([[1]], 1.0, worker=worker, peak_memory_bytes=7)
    found = figures_of([counted, counted, sample([[1]], 1.0, peak_memory_bytes=9)])
    assert (found.drafter_tokens, found.verify_seconds) == (10, 0.5)
    assert found.translate_seconds is None
    assert found.skipped == {"no_blocks": 4}
    assert found.peak_memory_bytes == 9
    assert found.acceptance_length is None
    assert found.acceptance_per_position == []


def test_a_speedup_is_the_median_of_ratios_of_the_same_round() -> None:
    runs, alone = recorded([10.0, 30.0, 80.0]), recorded([5.0, 10.0, 40.0])
    found = speedup(pairs_with(runs, alone))
    # The ratio of the medians would be 3.
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 3.0))
    assert speedup([]) is None


def test_rounds_without_a_reference_are_left_out() -> None:
    found = speedup(pairs_with(recorded([10.0, 30.0]), recorded([5.0])))
    assert (found.median, found.rounds) == (pytest.approx(2.0), 1)


def test_references_of_the_same_wave_and_session_come_first() -> None:
    runs = recorded([10.0], wave=1, session=1)
    alone = (
        recorded([1.0], wave=1, session=0)
        + recorded([5.0], wave=1, session=1)
        + recorded([2.0], wave=0, session=1)
    )
    assert speedup(pairs_with(runs, alone)).median == pytest.approx(2.0)
    elsewhere = recorded([4.0], wave=0, session=1)
    assert speedup(pairs_with(runs, elsewhere)).median == pytest.approx(2.5)


def test_identical_counts_prompts_that_agree_in_every_round() -> None:
    alone = sample([[1, 2], [3], [4]], 1.0)
    once = sample([[1, 2], [3], [5]], 1.0)
    again = sample([[1, 2], [3, 3], [4]], 1.0)
    assert identical([(alone, alone)]) == (3, 3)
    assert identical([(once, alone), (again, alone)]) == (1, 3)
    assert identical([]) is None
