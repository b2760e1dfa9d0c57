# SPDX-License-Identifier: Apache-2.0
"""`goodput` with precomputed drafts: missing drafts, waiting for late ones, and guesses."""

import random
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from vllm_hetero_spec.engine.ahead.late_drafts import GuessHits, LateDrafts
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import DraftSteps, Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.lookahead.step_policy import StepPolicy

TARGET, ROW, LOOK_UP, LONGEST = 0.03, 0.0005, 0.0005, 4
SIZES = (1, 2, 4, 8, 16)


class Seen(NamedTuple):
    """Results of the second half of all steps.

    Attributes:
        on: Share of steps for which drafts were planned, probes excluded.
        waited: Share of steps in which the target waited for a draft.
        gain: Speed relative to the target alone.
    """

    on: float
    waited: float
    gain: float


def simulated(
    hits: float, accepts: float, drafter: float, steps: int = 600, late: float | None = None
) -> Seen:
    """Simulate one request.

    Args:
        hits: Probability that a draft was precomputed.
        accepts: Acceptance rate.
        drafter: Seconds of a drafter step.
        steps: Number of target steps.
        late: Acceptance rate of drafts for which the target waited; None for `accepts`.
    """
    chance, now = random.Random(5), 0.0
    costs = CostModel(
        target=[(n, TARGET + ROW * (n - 1)) for n in SIZES],
        drafter=[(n, drafter) for n in SIZES],
        catch_up=0.0,
    )
    known = Estimates.of(costs, LONGEST, DraftSteps(each=0.0))  # as in an engine
    controller, drafts = Goodput(known, clock=lambda: now), LateDrafts()
    on = waits = tokens = 0
    began = 0.0
    for step in range(steps):
        if step == steps // 2:
            on = waits = tokens = 0
            began = now
        plan = controller.plan(1, [LONGEST])
        wanted, there, waited, emitted, took = plan.lookahead[0], 0, 0.0, 1, 0.0
        if wanted:
            on += not plan.probe
            there = wanted if chance.random() < hits else 0
            if not there:
                policy = controller.policy
                there = wanted
                if policy is not None:
                    there, _ = drafts.wait(policy, [0], wanted, 1.0, 0)
                waited = there * drafter
                waits += there > 0
            rate = accepts if late is None or not waited else late
            confidences = [0.7] * there
            there = controller.trim([confidences])[0]
            accepted = next((n for n in range(there) if chance.random() >= rate), there)
            if waited and controller.policy is not None:
                drafts.observe(controller.policy, there, accepted, False)
            if confidences or not plan.probe:
                controller.observe_acceptance(there, accepted, confidences, wanted)
            controller.observe_draft(
                1,
                LONGEST,
                LONGEST * drafter,
                overhead=LOOK_UP,
                longest=wanted,
                exposed=waited / drafter,
            )
            emitted, took = 1 + accepted, waited + LOOK_UP
        verified = TARGET + ROW * there
        controller.observe_step(1, 1 + there, verified)
        controller.refresh_forecast()
        controller.emitted(emitted, took + verified)
        now += took + verified
        tokens += emitted
    half = steps - steps // 2
    return Seen(on / half, waits / half, tokens * TARGET / (now - began))


def test_ready_drafts_are_used_even_if_the_drafter_is_slow() -> None:
    seen = simulated(hits=0.7, accepts=0.8, drafter=0.05)
    assert seen.on > 0.8
    assert seen.waited < 0.05
    assert seen.gain > 1.3


def test_the_target_waits_for_missing_drafts_if_they_are_cheap() -> None:
    seen = simulated(hits=0.5, accepts=0.8, drafter=0.002)
    assert seen.on > 0.8
    assert seen.waited > 0.3 * seen.on
    assert seen.gain > simulated(hits=0.5, accepts=0.8, drafter=0.05).gain


def test_late_drafts_that_are_mostly_rejected_are_rarely_waited_for() -> None:
    """If the drafter did not foresee the target's token, its next drafts are often rejected."""
    worth = simulated(hits=0.7, accepts=0.9, drafter=0.004, steps=1800)
    poor = simulated(hits=0.7, accepts=0.9, drafter=0.004, steps=1800, late=0.1)
    assert worth.waited > 0.25 * worth.on
    assert 0 < poor.waited < 0.08 * poor.on
    # As fast as without waiting, which a drafter step of 0.5 s rules out.
    assert poor.gain > 0.97 * simulated(hits=0.7, accepts=0.9, drafter=0.5, steps=1800).gain


@pytest.mark.parametrize(
    ("hits", "accepts", "drafter"), [(1.0, 0.0, 0.002), (0.0, 0.9, 0.05), (0.0, 0.0, 0.002)]
)
def test_a_useless_drafter_ends_at_no_speculation(
    hits: float, accepts: float, drafter: float
) -> None:
    """Its drafts are wrong, or never precomputed and too slow to wait for."""
    seen = simulated(hits, accepts, drafter, steps=1200)
    assert seen.on < 0.05
    assert seen.gain > 0.98


def late_drafts_as_good_as_others(*, parallel: bool = False) -> LateDrafts:
    drafts = LateDrafts(parallel=parallel)
    drafts.share = 1.0
    return drafts


def policy_of(drafter: float, row: float = 0.0, rate: float = 40.0) -> StepPolicy:
    costs = CostModel(
        target=[(n, TARGET + row * n) for n in SIZES],
        drafter=[(n, drafter * n) for n in SIZES],
        catch_up=0.001,
    )
    return StepPolicy(Estimates.of(costs, LONGEST), rate, 1, 5, [False])


def test_the_target_does_not_wait_for_the_first_late_drafts() -> None:
    """Then it tries some. Precomputed drafts cost no waiting and show the acceptance rate first."""
    policy, drafts = policy_of(0.001), LateDrafts()
    waits = [drafts.wait(policy, [0], LONGEST, 1.0, 0)[0] for _ in range(60)]
    assert waits[:8] == [0] * 8
    assert 1 <= waits.count(LONGEST) <= 6
    drafts.observe(policy, LONGEST, LONGEST, False)  # the first late draft was verified
    assert [drafts.wait(policy, [0], LONGEST, 1.0, 0)[0] for _ in range(9)] == [LONGEST] * 9


def test_the_target_waits_only_while_a_draft_gains_more_time() -> None:
    drafts = late_drafts_as_good_as_others()
    cheap, seconds = drafts.wait(policy_of(0.001), [0], LONGEST, 1.0, 0)
    assert cheap == LONGEST
    # At most the time that the draft gains: 0.7 + 0.7^2 + ... tokens, at 40 tokens per second.
    assert 0.001 * LONGEST < seconds == pytest.approx(1.773 / 40, rel=0.1)
    some, _ = drafts.wait(policy_of(0.011), [0], LONGEST, 1.0, 0)
    assert 0 < some < LONGEST
    assert drafts.wait(policy_of(0.05), [0], LONGEST, 1.0, 0) == (0, 0.0)
    assert drafts.wait(policy_of(0.011), [0], LONGEST, 3.0, 0) == (0, 0.0)  # 3 steps per token
    assert drafts.wait(policy_of(0.001), [0], LONGEST, 1.0, 100) == (0, 0.0)  # 100 unread tokens
    assert drafts.wait(policy_of(0.001, rate=4000.0), [0], LONGEST, 1.0, 0) == (0, 0.0)
    rows_that_cost_more = policy_of(0.001, row=0.05)
    assert drafts.wait(rows_that_cost_more, [0], LONGEST, 1.0, 0) == (0, 0.0)


def test_the_number_of_guesses_is_the_one_that_pays() -> None:
    """Lines share the drafter's forwards, so with more lines each one is shorter."""

    def guesses(drafter: float, hits: tuple[int | None, ...] = (), **changes: Any) -> int:
        drafts = LateDrafts()
        for rank in 30 * hits:
            drafts.hits.observe(rank, 8)
        of: dict[str, Any] = {"drafting": 1, "longest": LONGEST, "each": 1.0, "most": 8} | changes
        return drafts.guesses(policy_of(drafter), *of.values())

    assert guesses(0.0001) == 8  # all are done in time
    assert guesses(0.0001, most=0) == 0
    assert guesses(0.02) == 0  # not even the chain alone is done in time
    hit = (0, 0, 0, 1, 2, 3, None)
    few = guesses(0.002, hit)
    assert few > 0
    # Each line has time for two drafter steps. The first one is for the target's own token.
    assert 2 * 0.002 * (1 + few) < TARGET
    assert guesses(0.002, hit, drafting=4) < few
    assert guesses(0.002, hit, each=4.0) < few
    assert guesses(0.002, (0, 0, 0, 0, None), each=2.0) == 0  # no guess was ever hit
    assert guesses(0.002, (0, 1, 2, 3, 4, 5)) > few


def test_a_parallel_drafter_drafts_all_tokens_in_one_forward() -> None:
    """All tokens cost one step of waiting. Branches have their tokens if two forwards fit."""
    drafts = late_drafts_as_good_as_others(parallel=True)
    for each in (1.0, 4.0):
        assert drafts.wait(policy_of(0.02), [0], LONGEST, each, 0)[0] == LONGEST
    assert drafts.wait(policy_of(0.05), [0], LONGEST, 1.0, 0) == (0, 0.0)
    for drafter, lines in ((0.0016, 8), (0.004, 2), (0.011, 0), (0.02, 0), (0.05, 0)):
        assert drafts.guesses(policy_of(drafter), 1, LONGEST, 4.0, 8) == lines


# ---- hit rates of lines, learnt by rank ----------------------------------------------------------


def test_at_first_each_line_has_half_of_the_rest() -> None:
    assert GuessHits().chances(3) == [0.5, 0.75, 0.875, 0.9375]
    assert GuessHits().chances(0) == [0.5]


def test_chances_converge_to_the_hit_rates() -> None:
    true, chance, hits = [0.5, 0.2, 0.1, 0.05, 0.02], random.Random(1), GuessHits()
    for _ in range(2000):
        drawn, rank = chance.random(), 0
        while rank < len(true) and drawn >= true[rank]:
            drawn -= true[rank]
            rank += 1
        hits.observe(rank if rank < len(true) else None, len(true) - 1)
    found = hits.chances(len(true) - 1)
    assert found == sorted(found)
    for line in range(len(true)):
        assert found[line] == pytest.approx(sum(true[: line + 1]), abs=0.12)


def test_a_line_that_was_not_observed_is_no_likelier_than_the_line_before_it() -> None:
    hits = GuessHits()
    for number in range(100):
        hits.observe(1 if number % 10 == 0 else 0 if number % 10 < 6 else None, 1)
    found = hits.chances(4)
    second = found[1] - found[0]
    assert second < 0.2
    assert all(after - before <= second + 1e-9 for before, after in pairwise(found[1:]))


def test_the_chance_of_a_line_that_is_left_out_grows_over_time() -> None:
    hits = GuessHits()
    for _ in range(100):
        hits.observe(0, 4)
    never = hits.chances(4)[4] - hits.chances(3)[3]
    for number in range(300):
        hits.observe(0 if number % 2 else None, 0)
    assert hits.chances(4)[4] - hits.chances(3)[3] > 3 * never
    assert hits.chances(4)[-1] <= 1.0
