# SPDX-License-Identifier: Apache-2.0
"""Estimates of costs: exact if calibrated, never falling, robust to outliers, quick to adapt."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hetero_spec.lookahead.costs import CostModel, CostTable

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def ridge(rows: float) -> float:
    return max(0.030, rows * 0.001)


def affine(rows: float) -> float:
    return 0.02 + 0.005 * rows


def points(cost: Callable[[float], float]) -> list[tuple[float, float]]:
    return [(rows, cost(rows)) for rows in ROWS]


def test_calibrated_points_are_met_and_lines_between_them_straight() -> None:
    curve = CostTable(points(affine))
    for rows in (*ROWS, 3, 5, 12, 20, 28, 48, 100):
        assert curve.seconds(rows) == pytest.approx(affine(rows), rel=1e-6)


def test_extrapolation_is_linear() -> None:
    curve = CostTable([(8, affine(8)), (16, affine(16))])
    for rows in (32, 64, 256, 1024, 1792, 4000):
        assert curve.seconds(rows) == pytest.approx(affine(rows), rel=1e-6)
    assert 0.4 * curve.seconds(8) < curve.seconds(1) < curve.seconds(8)


samples = st.lists(
    st.tuples(st.integers(1, 2000), st.floats(1e-6, 10.0), st.integers(0, 1)), max_size=40
)


@given(calibration=samples, live=samples)
def test_costs_never_fall_with_rows_or_batch(calibration: list, live: list) -> None:
    model = CostModel(
        target=[(size, seconds) for size, seconds, kind in calibration if kind == 0],
        verify=[(size, seconds) for size, seconds, kind in calibration if kind == 1],
    )
    for size, seconds, kind in live:
        model.observe_target(size if kind == 0 else max(1, size // 3), size, seconds)
    if not model.knows_target:
        return
    for batch in (1, 3, 32):
        rows = [model.target(batch, batch + more) for more in range(0, 400, 7)]
        assert np.isfinite(rows).all()
        assert min(rows) > 0
        assert (np.diff(rows) >= -1e-12).all()
    assert (np.diff([model.target(batch, batch) for batch in range(1, 200)]) >= -1e-12).all()
    assert min(model.row(rows, 1, 300) for rows in range(1, 300, 11)) >= 0


def test_learns_a_curve_without_calibration() -> None:
    """The curve is accurate at measured sizes, and plausible at others."""
    generator = np.random.default_rng(0)
    model = CostModel()
    assert not model.knows_target
    for _ in range(150):
        rows = int(generator.choice((8, 12, 16, 24, 32)))
        model.observe_target(4, rows, affine(rows) * np.exp(0.05 * generator.standard_normal()))
        model.observe_target(4, 4, affine(4) * np.exp(0.05 * generator.standard_normal()))
    assert model.knows_target
    for rows in (4, 8, 12, 16, 24, 32):
        assert model.target(4, rows) == pytest.approx(affine(rows), rel=0.05)
    assert model.target(4, 64) == pytest.approx(affine(64), rel=0.35)
    assert affine(1) * 0.5 < model.target(1, 1) < affine(4)


def test_one_measurement_gives_everything_a_scale() -> None:
    model = CostModel()
    model.observe_target(4, 4, 0.05)
    assert model.target(4, 4) == pytest.approx(0.05, rel=0.01)
    for rows in (5, 8, 32):
        assert 0.05 <= model.target(4, rows) < 0.15


def test_a_pause_changes_little() -> None:
    """One step takes 20 times the usual time, as for a prefill."""
    curve = CostTable(points(ridge))
    for _ in range(20):
        curve.observe(8, ridge(8))
    curve.observe(8, 20 * ridge(8))
    assert curve.seconds(8) < 1.1 * ridge(8)
    for _ in range(3):
        curve.observe(8, ridge(8))
    curve.observe(8, 20 * ridge(8))
    curve.observe(8, ridge(8))
    assert curve.seconds(8) < 1.1 * ridge(8)


@pytest.mark.parametrize("factor", [0.4, 0.8, 1.25, 3.0])
def test_a_lasting_change_is_followed_within_ten_measurements(factor: float) -> None:
    curve = CostTable(points(ridge))
    for _ in range(60):
        curve.observe(8, ridge(8))
    for _ in range(10):
        curve.observe(8, factor * ridge(8))
    assert curve.seconds(8) == pytest.approx(factor * ridge(8), rel=0.12)


def test_a_slow_first_step_is_ignored() -> None:
    """It counts only if nothing else is known, or if it was fast."""
    costs = CostModel(target=points(affine))
    costs.observe_target(1, 3, 3 * affine(3))
    assert costs.target(1, 3) == pytest.approx(affine(3), rel=1e-6)
    costs.observe_target(1, 3, 3 * affine(3))
    assert costs.target(1, 3) > 1.2 * affine(3)
    before = costs.target(1, 5)
    costs.observe_target(1, 5, before / 2)
    assert costs.target(1, 5) < 0.8 * before
    unknown = CostModel()
    unknown.observe_target(1, 1, 0.5)
    assert unknown.knows_target


def test_calibrated_neighbours_are_scaled() -> None:
    """If a measured size is slower than in the calibration, the other sizes are scaled, too."""
    model = CostModel(target=points(affine))
    for _ in range(30):
        model.observe_target(4, 16, 1.5 * affine(16))
    assert model.target(4, 16) == pytest.approx(1.5 * affine(16), rel=0.03)
    for rows in (8, 32):
        assert model.target(4, rows) == pytest.approx(1.5 * affine(rows), rel=0.15)


def test_plain_and_verifying_steps_have_their_own_costs() -> None:
    """With the same number of rows, a step that verifies drafts costs 30 % more."""
    model = CostModel(target=points(affine))
    for _ in range(40):
        model.observe_target(8, 8, affine(8))
        model.observe_target(2, 8, 1.3 * affine(8))
    assert model.target(8, 8) == pytest.approx(affine(8), rel=0.03)
    assert model.target(2, 8) == pytest.approx(1.3 * affine(8), rel=0.03)


def test_the_price_of_a_row_is_the_slope() -> None:
    generator = np.random.default_rng(1)
    model = CostModel(target=points(ridge))
    for _ in range(400):
        rows = int(generator.integers(5, 100))
        model.observe_target(4, rows, ridge(rows) * np.exp(0.02 * generator.standard_normal()))
    for rows in (6, 12, 20):
        assert model.row(rows, 4, rows + 1) < 1e-4
    for rows in (50, 70):
        assert model.row(rows, 4, 100) == pytest.approx(1e-3, rel=0.3)


def test_a_dear_row_that_leads_to_cheap_ones_is_spread_over_them() -> None:
    """Tiles of eight rows: the ninth row costs 8 ms, and the next seven cost nothing."""
    model = CostModel(target=[(n, 0.05 + 0.008 * ((n - 1) // 8)) for n in range(1, 33)])
    for _ in range(200):
        for rows in range(5, 33):
            model.observe_target(4, rows, 0.05 + 0.008 * ((rows - 1) // 8))
    assert model.row(8, 4, 9) > 0.002  # no cheap rows follow
    assert model.row(8, 4, 16) < 0.0012
    assert model.row(6, 4, 16) < 0.0003
    assert model.row(10, 4, 16) < 0.0003
    assert model.row(20, 4, 16) < 0.0003  # beyond the last row that was given


def test_a_round_of_drafting() -> None:
    """The costs of steps, of the work around them and of a long catch-up are separate."""
    model = CostModel()
    assert not model.knows_drafter
    for steps in (2, 5, 3, 4) * 10:
        model.observe_drafting(2, steps, 0.004 * steps, overhead=0.001, fed=4)
    assert model.knows_drafter
    assert model.drafter(2) == pytest.approx(0.004, rel=0.02)
    assert model.drafting(2, 5) == pytest.approx(0.021, rel=0.02)
    assert model.catch_up(1000) == 0
    for _ in range(5):
        model.observe_drafting(2, 3, 0.012 + 800 * 1e-5, fed=808)
    assert model.catch_up(1004) == pytest.approx(0.01, rel=0.1)
    assert model.catch_up(3) == 0
    assert model.drafter(2) == pytest.approx(0.004, rel=0.05)


def test_long_catch_ups_are_no_steps() -> None:
    """If the first round reads a whole prompt, it gives no cost of a step."""
    model = CostModel()
    model.observe_drafting(1, 2, 1.0, fed=2000)
    assert not model.knows_drafter


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_measurements_are_ignored(seconds: float) -> None:
    model = CostModel(target=points(ridge), drafter=[(1, 0.003)])
    model.observe_target(1, 1, seconds)
    model.observe_drafting(1, 2, seconds)
    assert model.target(1, 1) == pytest.approx(ridge(1))
    assert model.drafter(1) == pytest.approx(0.003)


def test_saved_costs_come_back() -> None:
    model = CostModel(target=points(affine), drafter=[(1, 0.003), (8, 0.004)], catch_up=1e-5)
    for _ in range(50):
        model.observe_target(4, 20, 1.2 * affine(20))
    again = CostModel.from_dict(json.loads(json.dumps(model.to_dict())))
    for batch, rows in ((1, 1), (4, 20), (4, 16), (16, 64)):
        assert again.target(batch, rows) == pytest.approx(model.target(batch, rows), rel=0.03)
    assert again.drafter(8) == pytest.approx(model.drafter(8), rel=1e-6)
    assert again.catch_up(1004) == pytest.approx(0.01, rel=1e-6)
    empty = CostModel.from_dict(json.loads(json.dumps(CostModel().to_dict())))
    assert not empty.knows_target
    assert not empty.knows_drafter


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"target": 3, "verify": [], "drafter": [], "overhead": [], "catch_up": 0},
        {"target": [["a", 1]], "verify": [], "drafter": [], "overhead": [], "catch_up": 0},
        {"target": [], "verify": [], "drafter": [], "overhead": [], "catch_up": -1},
    ],
)
def test_other_data_is_refused(saved: dict) -> None:
    with pytest.raises(ValueError, match="invalid saved costs"):
        CostModel.from_dict(saved)


def test_after_doubt_any_size_shows_a_change() -> None:
    """A probe drafts for one request; drafts were for four, when the machine was slow."""
    table = CostTable(points(affine))
    for _ in range(30):
        table.observe(4, 10 * affine(4))
    assert table.seconds(4) == pytest.approx(10 * affine(4), rel=0.01)
    quick = table.seconds(1) / 10
    table.doubt()
    for _ in range(2):
        table.observe(1, quick)
    assert table.seconds(4) == pytest.approx(affine(4), rel=0.05)


@pytest.mark.parametrize(("measured", "counted"), [(4.8, 5.0), (4.6, 4.0)])
def test_a_measurement_counts_for_a_size_up_to_6_percent_above(
    measured: float, counted: float
) -> None:
    table = CostTable()
    table.observe(measured, 0.1)
    assert {size for size, _ in table.points()} == {measured, counted}


def test_a_first_step_that_is_a_quarter_slower_may_have_compiled_kernels() -> None:
    for factor, counts in ((1.2, True), (1.3, False)):
        table = CostTable(points(affine))
        table.observe(3, factor * affine(3))
        assert (table.seconds(3) > 1.1 * affine(3)) == counts


@pytest.mark.parametrize(("read", "known"), [(40, False), (100, True)])
def test_only_a_long_catch_up_is_timed(read: int, known: bool) -> None:
    model = CostModel(drafter=[(1, 0.01)])
    model.observe_drafting(1, 1, 0.02, fed=4 + read)  # any round reads about 4 tokens
    assert model.knows_catch_up == known
