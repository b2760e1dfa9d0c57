# SPDX-License-Identifier: Apache-2.0
"""Rules that end a round of drafting early: the controller is as good as the best of them.

A drafter step takes a tenth of a target step. Tokens are easy or hard. Rows are free.
"""

from functools import cache

import numpy as np
import pytest
from simulated_drafts import DraftStream, Text, confidence_rule, survival_rule
from simulation import Clock, Machine, Outcome, Phase, run, static_rate, stopped_rate

from vllm_hetero_spec.lookahead.controllers import ConfidenceStop, Controller, Fixed
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput

MACHINE = Machine(target=lambda rows: 1.0, drafter=lambda batch: 0.1)
DEPTH, ROUNDS = 12, 6000
TEXTS = {
    "mixed": Text(0.95, 0.4, 0.5, 0.5),
    "noisy": Text(0.95, 0.3, 0.5, 1.0),
    "mostly easy": Text(0.98, 0.2, 0.75, 0.7),
}
THRESHOLDS = np.linspace(0.02, 0.98, 49)


@cache
def rates(text: Text) -> tuple[float, float, float]:
    """Return the best rate of each rule: fixed lookahead, confidence threshold, survival."""
    drafts = DraftStream(text, DEPTH, 0).take(ROUNDS)
    return (
        max(static_rate(text, MACHINE, 1, k) for k in range(DEPTH + 1)),
        max(stopped_rate(drafts, MACHINE, confidence_rule(drafts, t)) for t in THRESHOLDS),
        max(stopped_rate(drafts, MACHINE, survival_rule(drafts, t)) for t in THRESHOLDS / 2),
    )


def drive(controller: Controller, clock: Clock, text: Text, seconds: float) -> Outcome:
    phases = [Phase(1, seconds, text, MACHINE)]
    return run(controller, clock, phases, limit=DEPTH, can_stop_early=True)


@pytest.mark.parametrize("name", TEXTS)
def test_the_controller_is_as_good_as_the_best_of_the_grid(name: str) -> None:
    """It starts without acceptance rates; the grid uses the true ones, on the same drafts."""
    text, clock = TEXTS[name], Clock()
    costs = CostModel(target=[(1, 1.0), (64, 1.0)], drafter=[(1, 0.1)])
    controller = Goodput(Estimates.of(costs, DEPTH), can_stop_early=True, clock=clock)
    fixed, confidence, survival = rates(text)
    ours = drive(controller, clock, text, 8000.0)
    assert ours.steps == pytest.approx(ROUNDS, rel=0.1)
    assert ours.rate > 0.995 * survival
    assert ours.rate > 0.995 * confidence
    assert ours.rate > 1.02 * fixed
    assert controller.gauges().tokens_per_second == pytest.approx(ours.rate, rel=0.1)


def test_simple_controllers_follow_their_rules() -> None:
    """A run through the interface has the rate that is computed from its drafts."""
    text = TEXTS["mixed"]
    ours = drive(ConfidenceStop(0.5, DEPTH), Clock(), text, 2000.0)
    drafts = DraftStream(text, DEPTH, 0).take(ours.steps)
    exact = stopped_rate(drafts, MACHINE, confidence_rule(drafts, 0.5))
    assert ours.rate == pytest.approx(exact, rel=1e-9)
    ours = drive(Fixed(3), Clock(), text, 2000.0)
    assert ours.rate == pytest.approx(static_rate(text, MACHINE, 1, 3), rel=0.02)
