# SPDX-License-Identifier: Apache-2.0
"""Vectorized forecasts and batched updates: they equal plain loops."""

import math

import numpy as np
import pytest

from vllm_hetero_spec.lookahead.acceptance import Observation
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Load, forecast
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
    costs, (survival, rates) = known.costs, known.acceptance.replayed(random)
    groups, drafting, _ = survival.shape
    assert drafting == sum(limit > 0 for limit in limits)
    step_price = RATE * costs.drafter(drafting) * known.steps.each
    drafted = {(group, i) for group in range(groups) for i in range(drafting)}
    verified = set(drafted)
    tokens, rows, steps, found = float(batch), float(batch), 0.0, []
    for depth in range(max(limits)):
        price = RATE * costs.row(rows, batch, batch + drafting * (depth + 1))
        if depth:
            adds = {(g, i): survival[g, i, depth - 1] * rates[i, depth] for g, i in drafted}
            adds = {of: tokens for of, tokens in adds.items() if tokens >= price}
            sums = [
                sum(tokens for (g, _), tokens in adds.items() if g == of) for of in range(groups)
            ]
            drafted = {(g, i) for g, i in adds if sums[g] >= step_price}
        verified = {(g, i) for g, i in verified & drafted if survival[g, i, depth] >= price}
        steps += len({g for g, _ in drafted}) / groups
        weight = sum(limit > depth for limit in limits) / (groups * drafting)
        tokens += weight * sum(survival[g, i, depth] for g, i in verified)
        rows += weight * len(verified)
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
    found = forecast(known, Load(batch, limits, random, RATE, True))
    expected = replayed(known, batch, limits, random)
    assert found.rates == pytest.approx(expected[: len(found.rates)], rel=1e-9)
    assert found.alone == pytest.approx(batch / known.costs.target(batch, batch))


def test_a_policy_uses_the_cost_curve() -> None:
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
