# SPDX-License-Identifier: Apache-2.0
"""When `goodput` begins to draft, how long it probes, and what it takes for another load."""

from collections.abc import Sequence

import pytest
from simulation import Clock

from vllm_hetero_spec.lookahead.acceptance import Acceptance, Observation
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import DraftSteps, Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput

TARGET = 0.03  # seconds of any step


def known(drafter: float, accepted: Sequence[int], longest: int = 1) -> Estimates:
    """Return estimates of a drafter after 100 drafts, of which these numbers were accepted."""
    acceptance = Acceptance(longest)
    for number in range(100):
        found = accepted[number % len(accepted)]
        acceptance.observe(Observation(longest, found, [0.9] * longest, longest), False)
    acceptance.learn()
    sizes = (1, 2, 4, 8, 16, 32, 64)
    costs = CostModel([(n, TARGET) for n in sizes], [(n, drafter) for n in sizes])
    return Estimates(costs, DraftSteps(), acceptance, {})


@pytest.mark.parametrize(("gain", "off"), [(1.015, True), (1.03, False)])
def test_drafting_begins_at_a_gain_of_two_percent(gain: float, off: bool) -> None:
    survival, _ = known(TARGET, [1]).acceptance.replayed([False])
    tokens = 1 + float(survival.mean())
    controller = Goodput(known(TARGET * (tokens / gain - 1), [1]), clock=Clock())
    controller.plan(1, [1])
    assert controller.gauges().gain == pytest.approx(gain)
    assert controller.off == off


def test_a_probe_has_four_steps() -> None:
    clock = Clock()
    controller, probes = Goodput(known(TARGET, [0]), clock=clock), ""
    for _ in range(4000):
        plan = controller.plan(1, [1])
        probes += "p" if plan.probe and any(plan.lookahead) else " "
        controller.emitted(1, TARGET)
        clock.now += TARGET
    lengths = {len(probe) for probe in probes.split()}  # the next one may follow at once
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
