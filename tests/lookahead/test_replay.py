# SPDX-License-Identifier: Apache-2.0
"""Vectorized forecasts and batched updates: they equal plain loops."""

import math

import numpy as np
import pytest

from vllm_hetero_spec.lookahead import curve as curve_module
from vllm_hetero_spec.lookahead.acceptance_stats import Observation
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.curve import CostCurve
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import forecast
from vllm_hetero_spec.lookahead.step_policy import StepPolicy

LONGEST, RATE = 5, 60.0


def known_of(row: float, drafts: int) -> Estimates:
    """Return estimates after drafts of all lengths. Greedy requests accept more often."""
    generator = np.random.default_rng(drafts)
    costs = CostModel(
        target=[(n, 0.03 + row * n) for n in (1, 2, 4, 8, 16, 32, 64)],
        drafter=[(n, 0.002 + 0.0001 * n) for n in (1, 8, 64)],
    )
    known = Estimates.of(costs, LONGEST)
    for _ in range(drafts):
        for random in (False, True):
            confidences = generator.random(int(generator.integers(1, LONGEST + 1))).tolist()
            passed = generator.random(len(confidences)) < np.sqrt(confidences) * (1 - 0.5 * random)
            accepted = int(np.cumprod(passed).sum())
            known.acceptance.observe(
                Observation(len(confidences), accepted, confidences, LONGEST), random
            )
    known.acceptance.learn()
    return known


def replayed(known: Estimates, batch: int, limits: list[int], random: list[bool]) -> list[float]:
    """Return the rates of all lookaheads with early ends, computed draft by draft."""
    costs, survival = known.costs, known.acceptance.survival(random)
    rates = np.broadcast_to(known.acceptance.conditional(random), survival.shape)
    drafting = sum(limit > 0 for limit in limits)
    size = min(drafting, len(survival))
    groups = [range(at, at + size) for at in range(0, len(survival) - size + 1, size)]
    step_price = RATE * costs.drafter(drafting) * known.steps.each
    drafted, verified = set(range(len(survival))), set(range(len(survival)))
    tokens, rows, steps, found = float(batch), float(batch), 0.0, []
    for depth in range(max(limits)):
        price = RATE * costs.row(rows, batch, batch + drafting * (depth + 1))
        if depth:
            brings = [survival[i, depth - 1] * rates[i, depth] for i in range(len(survival))]
            earned = [sum(brings[i] for i in group if i in drafted) for group in groups]
            enough = [tokens * drafting / size >= step_price for tokens in earned]
            drafted = {i for i in drafted if brings[i] >= price and enough[i // size % len(groups)]}
        verified = {i for i in verified & drafted if survival[i, depth] >= price}
        steps += sum(any(i in drafted for i in group) for group in groups) / len(groups)
        weight = sum(limit > depth for limit in limits) / len(survival)
        accepted = weight * sum(survival[i, depth] for i in verified)
        tokens, rows = tokens + accepted, rows + weight * len(verified)
        seconds = costs.drafting(drafting, known.steps.expected(steps)) + costs.target(batch, rows)
        found.append(float(tokens / seconds))
    return found


@pytest.mark.parametrize("row", [0.0, 0.004])
@pytest.mark.parametrize("batch", [1, 3, 8, 40])
@pytest.mark.parametrize("kinds", [[False], [True], [False, True, True]], ids=str)
@pytest.mark.parametrize("drafts", [0, 5, 80])
def test_forecasts_are_replays(row: float, batch: int, kinds: list[bool], drafts: int) -> None:
    known = known_of(row, drafts)
    limits = [LONGEST - i % 3 for i in range(batch)]
    random = [kinds[i % len(kinds)] for i in range(batch)]
    found = forecast(known, batch, limits, random, RATE, can_stop_early=True)
    expected = replayed(known, batch, limits, random)
    assert found.rates == pytest.approx(expected[: len(found.rates)], rel=1e-9)
    assert found.alone == pytest.approx(batch / known.costs.target(batch, batch))


def test_a_policy_asks_the_curve_of_costs() -> None:
    known = known_of(0.004, 20)
    for rows in (4, 6, 9, 20, 23):
        known.costs.observe_target(4, rows, 0.05 + 0.002 * rows)
    for most in (4, 5, 17, 24):
        policy = StepPolicy(known, RATE, 4, most, [False] * 4)
        for rows in range(30):
            price = RATE * known.costs.row(rows, 4, max(most, rows))
            assert policy.row_price(rows) == price
    draft = [0.9, 0.4, math.nan]
    survival = known.acceptance.survival_of(draft, False)
    counts = survival[-1] * known.acceptance.rates(False)[3]
    for rate in (1.0, 20.0, 60.0, 200.0):
        policy = StepPolicy(known, rate, 4, 24, [False] * 4)
        pays = counts >= policy.row_price(7) and counts >= rate * known.costs.drafter(1)
        assert policy.continue_drafting([[], draft, [], []]) == [False, pays, False, False]


def test_measurements_alike_may_be_learnt_from_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise, outliers and a lasting change, four at a time give the same as one by one."""
    generator = np.random.default_rng(2)
    curves = [CostCurve({0: [(1, 0.03), (8, 0.04)]}, kinds=2) for _ in range(2)]
    for number in range(400):
        size, kind = int(generator.choice([1, 4, 6])), int(generator.integers(2))
        seconds = 0.03 * np.exp(0.05 * generator.standard_normal()) * (2.5 if number > 250 else 1)
        seconds *= 20 if number % 90 == 0 else 1
        for at_once, curve in zip((1, 4), curves, strict=True):
            monkeypatch.setattr(curve_module, "_TOGETHER", at_once)
            for _ in range(4):
                curve.observe(size, seconds, kind)
        one_by_one, together = curves
        for place in (1, 4, 5, 6, 30):
            assert together.seconds(place, kind) == pytest.approx(one_by_one.seconds(place, kind))
            assert together.stddev(place, kind) == pytest.approx(one_by_one.stddev(place, kind))
            slopes = [curve.slope(place, 1, 12, kind) for curve in curves]
            assert slopes[1] == pytest.approx(slopes[0], abs=1e-9)
