# SPDX-License-Identifier: Apache-2.0
"""When `goodput` begins and ends to draft, when it probes, and what it takes for another load."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from simulation import Clock

from vllm_hetero_spec.lookahead.acceptance import Acceptance, Observation
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import DraftSteps, Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.lookahead.prober import Prober

TARGET = 0.03  # seconds of any step


def known(drafter: float, accepted: Sequence[int], longest: int = 1) -> Estimates:
    """Return estimates after 100 drafts, of which these numbers were accepted; none if empty."""
    acceptance = Acceptance(longest)
    for number in range(100 if accepted else 0):
        found = accepted[number % len(accepted)]
        acceptance.observe(Observation(longest, found, [0.9] * longest, longest), False)
    acceptance.learn()
    sizes = (1, 2, 4, 8, 16, 32, 64)
    costs = CostModel([(n, TARGET) for n in sizes], [(n, drafter) for n in sizes])
    return Estimates(costs, DraftSteps(), acceptance, {})


def gaining(gain: float) -> Estimates:
    """Return estimates with which drafts of one token have this gain."""
    survival, _ = known(TARGET, [1]).acceptance.replayed([False])
    tokens = 1 + float(survival.mean())
    return known(TARGET * (tokens / gain - 1), [1])


@pytest.mark.parametrize(("gain", "off"), [(1.015, True), (1.03, False)])
def test_drafting_begins_at_a_gain_of_two_percent(gain: float, off: bool) -> None:
    controller = Goodput(gaining(gain), clock=Clock())
    controller.plan(1, [1])
    assert controller.gauges().gain == pytest.approx(gain)
    assert controller.off == off


def test_an_unknown_pair_may_lose_50_ms_and_two_steps() -> None:
    """Each draft loses 10.5 ms, so that eleven lose more than 110 ms in all."""
    clock = Clock()
    controller = Goodput(known(0.0025, [], 4), clock=clock)
    for _ in range(11):
        (wanted,) = controller.plan(1, [4]).lookahead
        assert wanted
        controller.observe_acceptance(wanted, 0, [0.9] * wanted, wanted)
        controller.observe_draft(1, wanted, 0.0105, longest=wanted)
        controller.observe_step(1, 1 + wanted, TARGET)
        controller.refresh_forecast()
        controller.emitted(1, TARGET + 0.0105)
        clock.now += TARGET + 0.0105
    controller.plan(1, [4])
    assert controller.off


def probes(known: Estimates, steps: int) -> list[int]:
    """Return the lengths of probes in these steps, which lose nothing."""
    clock = Clock()
    controller, found = Goodput(known, clock=clock), ""
    for _ in range(steps):
        plan = controller.plan(1, [1])
        found += "p" if plan.probe and any(plan.lookahead) else " "
        controller.emitted(1, TARGET)
        clock.now += TARGET
    return [len(probe) for probe in found.split()]


@pytest.mark.parametrize(("gain", "follows"), [(0.9, False), (0.94, True)])
def test_a_probe_that_gains_almost_enough_is_followed_by_others(gain: float, follows: bool) -> None:
    assert (sum(probes(gaining(gain), 400)) > 100) == follows


def test_a_probe_has_four_steps() -> None:
    lengths = probes(known(TARGET, [0]), 4000)  # the next one may follow at once
    assert min(lengths) == 4
    assert not any(length % 4 for length in lengths)


def test_loads_differ_by_two_quarters_of_sampled_requests() -> None:
    """One sampled request of four is the same load as none; two are another load."""
    controller = Goodput(known(0.002, [4], 4), clock=Clock())
    controller.plan(4, [4] * 4, random=[False] * 4)
    gain = controller.gauges().gain
    for _ in range(50):
        controller.observe_acceptance(4, 0, [0.9] * 4, 4)
    controller.plan(4, [4] * 4, random=[True, False, False, False])
    assert controller.gauges().gain == gain
    controller.plan(4, [4] * 4, random=[True, True, False, False])
    assert controller.gauges().gain < gain


def test_waits_between_experiments_without_news() -> None:
    prober, dues = Prober(5.0), [5.0]
    for _ in range(8):
        dues.append(prober.next)
        assert prober.due(prober.next, 0.0, 1)
    waits = [after - before for before, after in pairwise(dues)]
    assert waits == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 4.0])


def test_what_experiments_may_lose() -> None:
    """One percent of the time, without idle time, at most 0.2 s; and as much in advance."""
    prober = Prober(0.0)
    assert not prober.due(100.0, 1.0, 1)
    assert (prober.budget, prober.next) == pytest.approx((0.01, 101.0))
    for second in range(101, 200):
        prober.next = second + 1.0
        prober.due(second, 0.0, 1)
    assert prober.budget == pytest.approx(0.2)
    prober.charge(5.0)
    assert prober.budget == pytest.approx(-0.2)
