# SPDX-License-Identifier: Apache-2.0
"""Early ends of drafts: they are lossless if they are decided before the token is sampled.

The tests enumerate all outcomes. The same rules with the probability of the sampled token must
fail.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import reference as ref
from chance import Chance
from hypothesis import given
from hypothesis import strategies as st
from toy_worlds import World, total_variation, worlds

from vllm_hetero_spec.lookahead.controllers import ConfidenceStop, Controller, Fixed
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput

EXACT, WRONG = 1e-10, 0.01
STEPS = 3
Feature = Callable[[ref.Proposal], float]


def before_the_draw(proposal: ref.Proposal) -> float:
    """Return the largest probability of the row. It does not depend on the sampled token."""
    return float(proposal.row.max())


def after_the_draw(proposal: ref.Proposal) -> float:
    """Return the probability of the sampled token."""
    assert proposal.token is not None
    return float(proposal.row[proposal.token])


def thrifty(positions: int = 8) -> Goodput:
    """Return a controller for which a row of the target costs about 0.4 tokens."""
    costs = CostModel(
        target=[(n, 0.01 + 0.01 * n) for n in (1, 2, 4, 8, 16, 32)], drafter=[(1, 1e-4)]
    )
    controller = Goodput(Estimates.of(costs, positions), clock=lambda: 0.0)
    for _ in range(60):
        for rows in range(2, 9):
            controller.observe_step(1, rows, 0.01 + 0.01 * rows)
    assert max(controller.plan(1, [positions]).lookahead) > 0
    return controller


class Trimmed:
    """A drafting method that ends before the first token that `Controller.trim` removes."""

    def __init__(self, controller: Controller, feature: Feature) -> None:
        self.controller, self.feature = controller, feature
        self.verdicts: set[bool] = set()

    def __call__(self, w: World, c: tuple[int, ...], chance: Chance) -> Iterator[ref.Proposal]:
        confidences: list[float] = []
        for proposal in ref.push_forward(w.pair, w.q_after(c), STEPS, chance):
            confidences.append(self.feature(proposal))
            verdict = self.controller.trim([confidences])[0] == len(confidences)
            self.verdicts.add(verdict)
            if not verdict:
                return
            yield proposal


def deviation(world: World, draft: Trimmed, rule: Callable = ref.token_rule) -> float:
    """Return the total variation distance between speculation and the target, for 3 tokens."""
    found = world.law_of(
        lambda c, chance: rule(world.p, c, draft(world, c, chance), chance), length=3
    )
    return total_variation(found, world.target_law(length=3))


@pytest.mark.parametrize("rule", [ref.token_rule, ref.block_rule])
@pytest.mark.parametrize("make", [lambda: ConfidenceStop(0.6, 8), thrifty], ids=["stop", "goodput"])
def test_decided_before_the_draw_is_lossless(
    make: Callable[[], Controller], rule: Callable
) -> None:
    draft = Trimmed(make(), before_the_draw)
    for world in worlds(6):
        assert deviation(world, draft, rule) < EXACT
    assert draft.verdicts == {True, False}, "the rule must have had something to decide"


def test_stopping_after_an_unlikely_token_is_lossless() -> None:
    """Hugging Face's rule depends on the sampled token, but keeps it."""
    draft = Trimmed(ConfidenceStop(0.3, 8), after_the_draw)
    for world in worlds(6):
        assert deviation(world, draft) < EXACT
    assert draft.verdicts == {True, False}


def test_dropping_an_unlikely_token_is_caught() -> None:
    """The rule of `goodput` with the probability of the sampled token is biased."""
    worst = max(deviation(world, Trimmed(thrifty(), after_the_draw)) for world in worlds(6))
    assert worst > WRONG


drafts = st.lists(st.lists(st.floats(0.0, 1.0), max_size=6), min_size=1, max_size=5)
CONTROLLERS = {"fixed": Fixed(6), "stop": ConfidenceStop(0.5, 6), "goodput": thrifty()}


@given(data=st.data(), confidences=drafts)
@pytest.mark.parametrize("name", CONTROLLERS)
def test_later_tokens_do_not_change_a_decision(
    name: str, data: st.DataObject, confidences: list[list[float]]
) -> None:
    controller = CONTROLLERS[name]
    kinds = data.draw(st.lists(st.booleans(), min_size=len(confidences), max_size=len(confidences)))
    controller.plan(len(confidences), [6] * len(confidences), random=kinds)
    kept = controller.trim(confidences)
    request = data.draw(st.integers(0, len(confidences) - 1))
    draft = confidences[request]
    assert 0 <= kept[request] <= len(draft)
    if not draft:
        return
    position = data.draw(st.integers(0, len(draft) - 1))
    other = draft[: position + 1] + data.draw(st.lists(st.floats(0.0, 1.0), max_size=6))
    changed: list[Sequence[float]] = list(confidences)
    changed[request] = other
    after = controller.trim(changed)
    assert (kept[request] > position) == (after[request] > position)
