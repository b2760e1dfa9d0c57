# SPDX-License-Identifier: Apache-2.0
"""What is foreseen of shorter drafts: by hand, and against an engine that is asked for them."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from advice_fakes import PROMPTS, World, engine

from vllm_hetero_spec.advice.costs import StepCosts, costs_of
from vllm_hetero_spec.advice.prediction import Prediction, foresee, schedule
from vllm_hetero_spec.advice.rounds import Round, Story, acceptance_of, rounds_of, story_of
from vllm_hetero_spec.measure.load import Load, Sample, Trace

LONGEST = 13
K = 4


def load(size: int = 1) -> Load:
    return Load(PROMPTS, LONGEST, size)


def predicted(world: World, size: int, longest: int = LONGEST) -> Prediction:
    """From drafts of K tokens."""
    alone, drafting = engine(world), engine(world, K)
    drafted = Load(PROMPTS, longest, size)
    return foresee(
        {n: [alone.run(Load(PROMPTS, longest, n))] for n in (1, 2, 4)},
        [drafting.run(drafted)] * 2,
        drafting.run(dataclasses.replace(drafted, max_tokens=1)),
        slots=size,
        lookahead=K,
        max_tokens=longest,
        one_more=True,
    )


def runs(world: World) -> tuple[Sample, Sample, Sample]:
    """Of batch 1: alone, with drafts of K tokens, and for one token each."""
    drafting = engine(world, K)
    read = drafting.run(dataclasses.replace(load(), max_tokens=1))
    return engine(world).run(load()), drafting.run(load()), read


def of_runs(plain: Sequence[Sample], drafted: Sequence[Sample], read: Sample) -> Prediction:
    return foresee(
        {1: plain}, drafted, read, slots=1, lookahead=K, max_tokens=LONGEST, one_more=True
    )


def speedup(world: World, size: int, lookahead: int, longest: int = LONGEST) -> float:
    """Measured."""
    asked = Load(PROMPTS, longest, size)
    runs = [engine(world, k).run(asked) for k in (0, lookahead)]
    return runs[1].tokens_per_second / runs[0].tokens_per_second


def test_rounds_of_two_requests_of_which_one_waits() -> None:
    first = Trace([1, 2, 3], "", 0.0, [2.0, 3.0], [1, 2])
    second = Trace([4, 5], "", 3.0, [5.0, 6.0], [1, 1])
    rounds = list(rounds_of(Sample([first, second], 6.0)))
    assert rounds == [Round(2, 1, 0), Round(1, 0, 1), Round(2, 1, 0), Round(1, 0, 1)]
    together = list(rounds_of(Sample([first, dataclasses.replace(second, sent=0.5)], 6.0)))
    assert together[1] == Round(1, 1, 1)


def test_places_of_a_trace() -> None:
    """4 tokens ahead, of 12: all accepted, two, none, then one where there is room for one."""
    trace = Trace(list(range(12)), "", 0.0, [1.0, 2.0, 3.0, 4.0, 5.0], [1, 5, 3, 1, 2])
    story = story_of(trace, 4, 12)
    right, wrong = [True] * 4, [True, True, False]
    assert list(story.places) == [*right, None, *wrong, False, True, None]
    assert story.tokens == 12
    # Positions: tested, accepted. The whole draft, the two and a wrong one, the wrong one, the one.
    assert acceptance_of([story], 4) == [(4, 3), (2, 2), (2, 1), (1, 1)]


def test_shorter_drafts_of_one_text() -> None:
    """Places 1110 1 and the rest: with 4 the bonus token is wrong, with 2 it is the third."""
    story = Story(1, (True, True, True, False, True, True, False, True))
    # k=4: 3 and the wrong one, 2 and the wrong one, then the last place.
    assert story.rounds(4) == 3
    # k=3: the bonus token behind 111 is the fourth; the same then.
    assert story.rounds(3) == 3
    # k=2: 11+1, the fourth is wrong, 11+1 (the wrong one comes as the bonus token), the last.
    assert story.rounds(2) == 4
    # k=1: 1+1, 1+1 (wrong), 1+1, wrong one, last.
    assert story.rounds(1) == 5


def test_a_completion_that_ends_early_is_not_drafted_for_beyond() -> None:
    assert Story(1, (True, True, True)).rounds(8) == 1
    assert Story(1, ()).rounds(8) == 0


def test_slots_are_filled_as_requests_end() -> None:
    # Two at a time: 3 and 1 steps; the third, of 2, starts when the second has ended.
    assert schedule([3, 1, 2], 2) == {0: 1, 2: 2, 1: 3 - 2 + 1}
    assert schedule([2, 2], 1) == {0: 2, 1: 4}
    assert schedule([0, 0, 0], 2) == {0: 2}


def test_costs_are_the_worlds() -> None:
    world = World()
    drafting = engine(world, K)
    found = costs_of(
        {n: [engine(world).run(load(n))] for n in (1, 4)},
        [drafting.run(load(4))],
        drafting.run(dataclasses.replace(load(4), max_tokens=1)),
        lookahead=K,
        one_more=True,
    )
    for requests in (1, 4):
        assert found.target(requests, 0) == pytest.approx(world.target(requests, 0))
    for k in (1, 2, K):
        assert found.target(4, k) == pytest.approx(world.target(4, k))
        assert found.steps(k) == pytest.approx(world.steps(k))
        assert found.drafting(k) == pytest.approx(world.drafting(k))
    assert found.drafter_step == pytest.approx(world.drafter_step)


def test_drawn_drafts_take_no_step_more() -> None:
    costs = StepCosts({1: 1.0}, {1: 2.0}, 4, 0.5, 8.0, 0.0, one_more=False)
    assert [costs.steps(k) for k in (1, 2, 4)] == [2, 4, 8]
    assert dataclasses.replace(costs, one_more=True).steps(2) == 4.5


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lookahead", [1, 2, 3, K])
def test_every_lookahead_is_foreseen_as_the_engine_does_it(size: int, lookahead: int) -> None:
    """Nothing is unknown of these texts, and costs are straight lines."""
    world = World()
    assert all("1111" not in pattern * 2 for pattern in world.right)
    found = predicted(world, size)
    foreseen = found.foreseen[lookahead - 1]
    measured = speedup(world, size, lookahead)
    # Behind a draft accepted up to the end of its room one place stays unknown, which no draft
    # reaches; requests that end at other times make steps of sizes that were not seen.
    assert foreseen.speedup == pytest.approx(measured, rel=1e-9 if size == 1 else 0.02)
    assert foreseen.lookahead == lookahead
    assert foreseen.low <= foreseen.speedup <= foreseen.high
    if lookahead == K:
        assert found.measured_speedup == pytest.approx(measured)


def test_figures_by_hand() -> None:
    """One text, batch 1: 1 + 4 tokens, of which the drafter gets the first two of every three."""
    world = World(right=["110"])
    found = predicted(world, 1)
    # 12 places behind the first token: 110 four times, three steps each of k=1, or one of k>=2.
    steps = {1: 2 * 4, 2: 4, 3: 4, 4: 4}
    alone = 2.0 + 12 * 1.125
    for foreseen in found.foreseen:
        k = foreseen.lookahead
        drafting = 0.03125 + 0.0625 * (1 + 1.5 * k)
        step = 1 + 0.125 * (1 + k) + drafting
        taken = 2.25 + drafting + steps[k] * step
        assert foreseen.speedup == pytest.approx(alone / taken)
        assert foreseen.tokens_per_round == pytest.approx(12 / steps[k])
        assert foreseen.decode_speedup == pytest.approx(1.125 * 12 / steps[k] / step)
        assert foreseen.low == pytest.approx(foreseen.speedup)  # all texts are alike
    assert found.best.lookahead == 2
    assert found.reading == pytest.approx(4 * 2.0)
    assert found.alone_tokens_per_second == pytest.approx(13 / alone)
    # Tested only behind accepted ones: not 2/3, 2/3, 0 of all drafts.
    assert [a / t if t else None for t, a in found.acceptance] == [1, 1, 0, None]


def test_what_is_not_known_of_a_text_is_drawn() -> None:
    """Texts in which the drafter is often right: behind many a draft a place is not known."""
    ratios = []
    for seed in range(8):
        draw = random.Random(seed)
        right = ["".join("01"[draw.random() < 0.9] for _ in range(96)) for _ in PROMPTS]
        world = World(right=right)
        foreseen = predicted(world, 1, 97).foreseen[1].speedup
        ratios.append(foreseen / speedup(world, 1, 2, 97))
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.01)
    assert min(ratios) > 0.95
    assert max(ratios) < 1.05


def test_easy_and_hard_stretches() -> None:
    """Shorter drafts begin inside easy stretches more often than the measured ones did.

    What the measured drafts have accepted by position does not say so.
    """
    world = World(right=["1" * 12 + "0" * 12])
    found = predicted(world, 1, 97)
    measured = speedup(world, 1, 1, 97)
    assert found.foreseen[0].speedup == pytest.approx(measured, rel=0.01)
    tested, accepted = found.acceptance[0]
    by_position = found.foreseen[0].speedup / found.foreseen[0].tokens_per_round
    by_position *= 1 + accepted / tested
    assert by_position < 0.95 * measured


def test_requests_that_differ_widen_the_interval() -> None:
    alike = predicted(World(right=["110"]), 1).foreseen[1]
    apart = predicted(World(right=["110", "000", "111", "100"]), 1).foreseen[1]
    assert alike.high - alike.low < 1e-9
    assert apart.low < apart.speedup < apart.high


def test_repeats_that_differ_widen_the_interval() -> None:
    plain, drafted, read = runs(World(right=["110"]))
    slow = dataclasses.replace(plain, seconds=plain.seconds * 1.5)
    found = of_runs([plain, slow], [drafted] * 2, read)
    assert found.best.high / found.best.low == pytest.approx(1.5)


def test_what_no_step_explains_is_kept() -> None:
    """A load that took longer than its steps: slower at every lookahead, at both ends."""
    world = World(right=["110", "000"])
    plain, drafted, read = runs(world)
    slower = dataclasses.replace(drafted, seconds=drafted.seconds * 1.25)
    usual, late = (of_runs([plain], [sample], read).foreseen for sample in (drafted, slower))
    assert late[K - 1].speedup == pytest.approx(usual[K - 1].speedup / 1.25)
    for before, after in zip(usual, late, strict=True):
        assert after.speedup < before.speedup / 1.2
        assert after.low < before.low / 1.2
        assert after.high < before.high / 1.2


def test_a_prompt_that_took_long_once_is_not_held_against_the_engine() -> None:
    """Half of what is known about reading prompts comes from engines of the other kind."""
    plain, drafted, read = runs(World(right=["110"]))
    late = dataclasses.replace(
        plain,
        traces=[
            dataclasses.replace(
                trace, times=[at + 5 for at in trace.times], sent=trace.sent and trace.sent + 5
            )
            for trace in plain.traces
        ],
        seconds=plain.seconds + 5,
    )
    usual = of_runs([plain], [drafted] * 2, read)
    found = of_runs([late], [drafted] * 2, read)
    assert found.measured_speedup > usual.measured_speedup * 1.05
    for before, after in zip(usual.foreseen, found.foreseen, strict=True):
        assert after.speedup == pytest.approx(before.speedup)


def test_nothing_drafted_is_no_prediction() -> None:
    with pytest.raises(ValueError, match="nothing drafted"):
        predicted(World(drafted=False), 1)
