# SPDX-License-Identifier: Apache-2.0
"""Single decisions of controllers. `test_goodput.py` tests their speed over time."""

import math
import subprocess
import sys
from pkgutil import iter_modules

import pytest
from simulation import Clock

from vllm_hetero_spec import lookahead
from vllm_hetero_spec.lookahead.controllers import ConfidenceStop, Controller, Fixed, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import USUAL, Estimates, OutputLengths
from vllm_hetero_spec.lookahead.goodput import Goodput

SIZES = (1, 2, 4, 8, 16, 32, 64)


def calibrated(
    drafter: float = 0.002, row: float = 0.0, catch_up: float | None = None
) -> CostModel:
    """Return costs of 30 ms for a target step and `drafter` seconds for a drafter step."""
    return CostModel(
        target=[(n, 0.03 + row * n) for n in SIZES],
        drafter=[(n, drafter) for n in SIZES],
        catch_up=catch_up,
    )


def goodput(costs: CostModel, longest: int = 6, **options: bool) -> tuple[Goodput, Clock]:
    clock = Clock()
    return Goodput(Estimates.of(costs, longest), clock=clock, **options), clock


def good_drafts(controller: Goodput, clock: Clock, rounds: int, batch: int = 1) -> None:
    """Run rounds in which every token is accepted."""
    for _ in range(rounds):
        plan = controller.plan(batch, [6] * batch)
        longest = max(plan.lookahead)
        for length in plan.lookahead:
            if length:
                controller.observe_acceptance(length, length, [0.9] * length, length)
        if longest:
            drafting = sum(length > 0 for length in plan.lookahead)
            controller.observe_draft(drafting, longest, 0.002 * longest, longest=longest)
        controller.observe_step(batch, batch + sum(plan.lookahead), 0.03)
        controller.refresh_forecast()
        clock.now += 0.03 + 0.002 * longest
        controller.emitted(batch + sum(plan.lookahead), 0.03 + 0.002 * longest)


def test_fixed() -> None:
    controller: Controller = Fixed(4)
    assert controller.plan(4, [8, 3, 0, 4]).lookahead == (4, 3, 0, 4)
    assert controller.trim([[0.1] * 4, [], [0.9]]) == [4, 0, 1]
    assert controller.continue_drafting([[0.1], []]) == [True, True]
    assert controller.gauges().lookahead == 4
    assert not controller.off


def test_the_target_alone_leaves_the_drafter_alone() -> None:
    assert Fixed(0).plan(2, [4, 4]).lookahead == (0, 0)
    assert Fixed(0).off


def test_confidence_stop() -> None:
    """The first token below the threshold is kept, and ends the draft."""
    controller: Controller = ConfidenceStop(0.4, 5)
    assert controller.plan(2, [8, 2]).lookahead == (5, 2)
    assert controller.trim([[0.9, 0.4, 0.39, 0.9], [0.1, 0.9], [0.8, 0.9], []]) == [3, 1, 2, 0]
    assert controller.continue_drafting([[0.9, 0.5], [0.9, 0.3], []]) == [True, False, True]


def test_few_steps_have_no_drafts() -> None:
    """Without such steps, a wrong estimate of the target alone would never be corrected."""
    controller, clock = goodput(calibrated(), 8)
    good_drafts(controller, clock, 100)
    plain = 0
    for _ in range(2000):
        plain += not max(controller.plan(1, [6]).lookahead)
        good_drafts(controller, clock, 1)
    assert 1 <= plain <= 20


def test_limits_of_requests() -> None:
    controller, _ = goodput(calibrated(), 8)
    plan = controller.plan(4, [8, 2, 0, 1])
    assert 2 <= plan.lookahead[0] <= 8
    assert plan.lookahead[1:] == (2, 0, 1)
    assert controller.plan(3, [0, 0, 0]) == LookaheadPlan((0, 0, 0))
    assert controller.plan(3, []) == LookaheadPlan(())
    assert max(controller.plan(1, [1000]).lookahead) <= 8


def test_costs_first() -> None:
    """The first step has no drafts, and the second one short drafts of few requests."""
    controller, clock = goodput(CostModel())
    assert controller.regime == "measuring"
    assert controller.plan(8, [6] * 8) == LookaheadPlan((0,) * 8)
    controller.observe_step(8, 8, 0.03)
    clock.now += 0.1
    plan = controller.plan(8, [6] * 8)
    assert plan.probe
    assert 0 < sum(length > 0 for length in plan.lookahead) <= 4
    assert max(plan.lookahead) <= 2
    controller.observe_draft(4, 2, 0.004, longest=2)
    controller.observe_step(8, 16, 0.03)
    good_drafts(controller, clock, 30, batch=8)
    assert controller.regime == "drafting"
    assert controller.gauges().lookahead == 6


def test_off_and_on() -> None:
    """A drafter as slow as the target is not used. A fast one drafts the whole lookahead."""
    slow, _ = goodput(calibrated(drafter=0.03))
    slow.plan(1, [6])
    assert slow.regime == "target alone"
    assert slow.off
    assert slow.gauges().lookahead == 0
    fast, clock = goodput(calibrated())
    good_drafts(fast, clock, 40)
    gauges = fast.gauges()
    assert fast.regime == "drafting"
    assert (fast.off, gauges.lookahead) == (False, 6)
    assert gauges.gain > 3
    assert gauges.tokens_per_second > 100
    assert gauges.drafter_seconds == pytest.approx(0.002, rel=0.1)
    assert gauges.target_seconds == pytest.approx(0.03, rel=0.1)
    assert len(gauges.acceptance) == 6
    assert gauges.acceptance[0] > 0.8


def test_a_new_batch_size_is_considered_at_once() -> None:
    """Rows are free for few requests and expensive for many. The regime changes in one step."""
    costs = CostModel(
        target=[(n, max(0.03, 0.003 * n)) for n in SIZES], drafter=[(n, 0.002) for n in SIZES]
    )
    controller, clock = goodput(costs, 4)
    good_drafts(controller, clock, 20)
    for batch, off in ((32, True), (1, False), (32, True), (2, False)):
        controller.plan(batch, [4] * batch)
        assert controller.off == off


def test_drafts_shorter_than_planned() -> None:
    """The drafter always ends after two tokens, so a longer lookahead gains nothing."""
    controller, clock = goodput(calibrated(drafter=0.006))
    deep = 0
    for _ in range(300):
        wanted = max(controller.plan(1, [6]).lookahead)
        if wanted:
            made = min(wanted, 2)
            controller.observe_acceptance(made, made, [0.9] * made, wanted)
            controller.observe_draft(1, wanted, 0.006 * wanted, longest=made)
        controller.observe_step(1, 1 + min(wanted, 2), 0.03)
        controller.refresh_forecast()
        clock.now += 0.03 + 0.006 * wanted
        deep += wanted > 2
    assert controller.gauges().lookahead == 2
    assert deep < 60


def test_a_costly_catch_up() -> None:
    """A request with a long unread context gets no draft if its catch-up costs too much."""
    controller, clock = goodput(calibrated(drafter=0.018, catch_up=1e-3), 4)
    good_drafts(controller, clock, 30, batch=4)
    assert not controller.off
    near = controller.plan(4, [4] * 4, [2, 2, 2, 2])
    assert min(near.lookahead) > 0
    cheap, clock = goodput(calibrated(drafter=0.018, catch_up=1e-7), 4)
    good_drafts(cheap, clock, 30, batch=4)
    assert min(cheap.plan(4, [4] * 4, [2, 2, 30_000, 2]).lookahead) > 0
    dear, clock = goodput(calibrated(drafter=0.018, catch_up=0.1), 4)
    good_drafts(dear, clock, 30, batch=4)
    assert dear.plan(4, [4] * 4, [2, 2, 30_000, 2]).lookahead[2] == 0
    assert dear.plan(4, [4] * 4, [2, 2, 30_000, 2]).lookahead[0] > 0


def test_a_catch_up_pays_by_the_length_of_the_output() -> None:
    """A context of 1,000 tokens is read for a long output, and not for a short one."""
    controller, clock = goodput(calibrated(drafter=0.018, catch_up=1e-3), 4)
    good_drafts(controller, clock, 30, batch=4)
    unread = [2, 2, 1000, 2]
    assert min(controller.plan(4, [4] * 4, unread, lengths=[5000] * 4).lookahead) > 0
    short = controller.plan(4, [4] * 4, unread, lengths=[5] * 4)
    assert short.lookahead[2] == 0 < min(short.lookahead[:2])


def test_a_catch_up_pays_if_it_takes_less_than_drafts_save() -> None:
    """At twice the speed of the target alone, drafts save half of its time."""
    controller, clock = goodput(calibrated(catch_up=1e-3))
    good_drafts(controller, clock, 40, batch=4)
    gain = controller.gauges().gain
    assert gain > 2.0  # so that the share of time saved differs from gain - 1
    saved = (1.0 - 1.0 / gain) * 100 * controller._seconds_per_token()  # in 100 tokens
    for share in (0.9, 1.1):
        unread = [2, 2, round(share * saved / 1e-3), 2]
        plan = controller.plan(4, [6] * 4, unread, lengths=[100.0] * 4)
        assert (plan.lookahead[2] > 0) is (share < 1)
        assert plan.lookahead[0] > 0


def test_lengths_of_outputs_are_learned_from_running_requests() -> None:
    """Outputs of 40 tokens: their requests have emitted 20 on average."""
    outputs, ages = OutputLengths(), [0, 0, 0, *range(1, 40, 2)]  # three still read their prompts
    assert outputs.expected([], []) == []
    assert outputs.expected([0], [1000]) == [256.0]
    assert outputs.expected([USUAL / 2], [5]) == [5]
    assert outputs.expected([USUAL / 2], [1000]) == [256.0]
    learned = [outputs.expected(ages, [1000] * len(ages))[0] for _ in range(200)]
    assert 100 < learned[34] < 150 < learned[17]  # half of the way in 35 steps
    assert learned[-1] == pytest.approx(40, rel=0.1)


def test_a_step_without_requests() -> None:
    """With asynchronous scheduling, all requests of a step may have ended."""
    controller, clock = goodput(calibrated())
    good_drafts(controller, clock, 40)
    assert controller.plan(0, []).lookahead == ()
    controller.emitted(0, None)
    controller.refresh_forecast()
    controller.gauges()
    assert max(controller.plan(2, [6] * 2).lookahead) > 0


def test_rows_without_a_price_are_all_verified() -> None:
    controller, clock = goodput(calibrated())
    good_drafts(controller, clock, 40)
    controller.plan(3, [6] * 3)
    assert controller.trim([[0.01, 0.01], [0.5] * 3, []]) == [2, 3, 0]


def test_rows_with_a_price_are_given_to_the_likeliest() -> None:
    controller, _ = goodput(calibrated(drafter=1e-4, row=0.01))
    for _ in range(50):
        for rows in range(2, 14):
            controller.observe_step(2, rows, 0.03 + 0.01 * rows)
        controller.plan(2, [6, 6])
        controller.observe_acceptance(4, 4, [0.99] * 4, 4)
        controller.observe_acceptance(4, 0, [0.02] * 4, 4)
    controller.plan(2, [6, 6])
    assert controller.trim([[0.99] * 4, [0.02] * 4]) == [4, 0]


def test_between_drafter_steps() -> None:
    """Drafting continues only after likely tokens, and never beyond the longest draft."""
    controller, _ = goodput(calibrated(drafter=0.01), can_stop_early=True)
    for seen, accepted in ((0.95, True), (0.05, False)) * 150:
        controller.plan(1, [6])
        controller.observe_acceptance(1, int(accepted), [seen])
        controller.observe_draft(1, 1, 0.01, longest=1)
        controller.observe_step(1, 2, 0.03)
    controller.plan(1, [6])
    assert controller.continue_drafting([[0.95]]) == [True]
    assert controller.continue_drafting([[0.05]]) == [False]
    assert controller.continue_drafting([[0.95] * 6]) == [False]
    assert controller.continue_drafting([[]]) == [False]


def test_missing_confidences() -> None:
    """If confidences are missing or NaN, the acceptance rates of positions are used."""
    controller, clock = goodput(calibrated())
    for _ in range(100):
        length = max(controller.plan(1, [6]).lookahead)
        if length:
            controller.observe_acceptance(length, length)
        controller.observe_step(1, 1 + length, 0.03)
        clock.now += 0.04
    assert controller.gauges().lookahead == 6
    assert controller.trim([[math.nan, 0.9, math.nan]]) == [3]
    controller.observe_acceptance(3, 1, [math.nan, 0.9, math.nan], 3)
    assert max(controller.plan(1, [6]).lookahead) > 0


def test_greedy_and_random_requests_have_their_own_rates() -> None:
    """All drafts have the same confidence, but only those of greedy requests are accepted."""
    controller, clock = goodput(calibrated(drafter=1e-4, row=0.01))
    kinds = [False, True]
    for _ in range(50):
        for rows in range(2, 14):
            controller.observe_step(2, rows, 0.03 + 0.01 * rows)
        controller.plan(2, [6, 6], random=kinds)
        for random in kinds:
            controller.observe_acceptance(4, 0 if random else 4, [0.9] * 4, 4, random)
        controller.refresh_forecast()
        clock.now += 0.1
    controller.plan(2, [6, 6], random=kinds)
    assert controller.trim([[0.9] * 4, [0.9] * 4]) == [4, 0]
    assert controller.continue_drafting([[0.9], [0.9]]) == [True, False]
    controller.plan(2, [6, 6], random=kinds[::-1])
    assert controller.trim([[0.9] * 4, [0.9] * 4]) == [0, 4]


def test_nothing_breaks_without_observations() -> None:
    for costs in (CostModel(), calibrated(), calibrated(drafter=0.1)):
        controller, clock = goodput(costs, 4)
        for _ in range(200):
            plan = controller.plan(3, [4, 4, 4])
            assert len(plan.lookahead) == 3
            controller.trim([[0.5] * length for length in plan.lookahead])
            clock.now += 0.03


def test_pure() -> None:
    """The room imports neither torch nor vLLM."""
    modules = [f"{lookahead.__name__}.{info.name}" for info in iter_modules(lookahead.__path__)]
    assert "vllm_hetero_spec.lookahead.goodput" in modules
    lines = [f"import {module}" for module in modules]
    lines.append("import sys; assert not {'torch', 'vllm', 'transformers'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
