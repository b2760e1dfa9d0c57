# SPDX-License-Identifier: Apache-2.0
"""Drafts that were drawn before it was known what they follow keep the target's law, exactly.

Two steps of the target are enumerated with all that is drawn: the first verifies a draft while the
lines behind it are drawn, the second what was found of them. Known-wrong ways must be caught.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, overload

import numpy as np
import pytest
import reference as ref
from chance import Chance
from reference import Drafter, Pair, Proposal, Row, Stream
from toy_worlds import World, total_variation, worlds

from vllm_hetero_spec.engine.ahead.continuations import (
    MatchedContinuation,
    find_drawn,
    find_remainder,
)
from vllm_hetero_spec.engine.ahead.server_requests import Alternative, choose_guesses

EXACT, WRONG = 1e-10, 1e-3
BRANCHES, BEHIND = 2, 2  # lines beside the chain, and tokens that are drawn for each
Draws = Callable[[Row, Pair], Row]


def of_both(row: Row, pair: Pair) -> Row:
    """tli: drawn from what both have."""
    own = row * [pair.twin(d) is not None for d in range(len(row))]
    return own / own.sum()


def of_all(row: Row, pair: Pair) -> Row:
    """push_forward."""
    return row


class Line(Sequence[int]):
    """Tokens of a line, each drawn when it is first looked at: the law is the same."""

    def __init__(self, of: "Ahead", start: Sequence[int], drawn: int, base: int = 0) -> None:
        self._of, self._ids, self.base = of, [*start], base
        self._length, self._certain = len(start) + drawn, len(start)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if at >= len(self):
            raise IndexError(at)
        while len(self._ids) <= at:
            self._ids.append(self._of.chance.draw(self.row(len(self._ids))))
        return self._ids[at]

    def row(self, at: int) -> Row:
        """What the token there is drawn from, over the drafter's."""
        return self._of.draws(self._of.drafter(tuple(self[:at])), self._of.world.pair)


@dataclass(frozen=True)
class Ahead:
    """What is drafted behind a text while the target verifies the chain's first tokens."""

    world: World
    draws: Draws
    drafter: Drafter
    chance: Chance

    def chain(self, at_stake: int) -> Line:
        return Line(self, (), at_stake + BEHIND)

    def beside(self, chain: Line, at_stake: int) -> Iterator[Line]:
        """Guesses, which follow from rows and from the chain's tokens."""
        rivals = []
        for place in range(at_stake + 1):
            row = self.drafter(tuple(chain[:place]))
            best = [int(d) for d in np.argsort(-row, kind="stable")]
            rivals.append(Alternative(chain[place], best, [float(row[d]) for d in best]))
        follows = [max(rival.shares) for rival in rivals]
        for place, token, _ in choose_guesses(rivals, follows, BRANCHES):
            yield Line(self, [*chain[:place], token], BEHIND, place + 1)

    def proposals(self, drawn: Sequence[int], rows: Sequence[Row | None]) -> Stream:
        """Drafter tokens as what they propose; a row that is None is that of a certain token."""
        pair, size = self.world.pair, len(self.world.pair.target)
        for d, row in zip(drawn, rows, strict=True):
            first, *rest = pair.kappa(d)
            law = np.zeros(size)
            for x, share in enumerate(() if row is None else row):
                law[pair.kappa(x)[0]] += share
            yield Proposal(first, ref.one_hot(first, size) if row is None else law)
            for token in rest:
                yield Proposal(token, ref.one_hot(token, size))


class Found(NamedTuple):
    """What is used: drafter tokens, their rows, and what the first ones propose otherwise."""

    ids: Sequence[int]
    rows: Sequence[Row | None]
    instead: Sequence[Proposal] = ()


Find = Callable[[Ahead, Sequence[Line], bytes, int], Found]


def as_it_is(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """What the engine does; `seen` leading tokens of the chain are certain by now."""
    found = find_drawn(
        ((line.base, line) for line in lines), outcome, of.world.pair.drafter.__getitem__
    )
    return _found(lines, found, seen)


def _found(
    lines: Sequence[Line], found: MatchedContinuation | None, seen: int, earlier: int = 0
) -> Found:
    if found is None:
        return Found((), ())
    line = lines[found.rank]
    first = len(line) - len(found.ids)
    places = range(first, len(line))
    return Found(
        found.ids, [None if at < seen else line.row(max(0, at - earlier)) for at in places]
    )


class Step(NamedTuple):
    """A way of doing it."""

    find: Find = as_it_is
    at_stake: int = 1
    blind: bool = False  # verification does not tell what it has looked at
    again: bool = False  # the first guess is followed twice
    noise: Callable[[Chance, Ahead, Found], Chance] = lambda chance, of, found: chance


def two_steps(
    way: Step, draws: Draws, rule: Callable, world: World, c: tuple[int, ...], chance: Chance
) -> tuple[int, ...]:
    of = Ahead(world, draws, world.q_after(c), chance)
    chain = of.chain(way.at_stake)
    branches = list(of.beside(chain, way.at_stake))
    if way.again:
        branches = [
            branches[0],
            Line(of, branches[0][: branches[0].base], BEHIND, branches[0].base),
        ]
    draft = of.proposals(chain[: way.at_stake], [chain.row(i) for i in range(way.at_stake)])
    emitted: tuple[int, ...] = rule(world.p, c, draft, chance)
    outcome = b"".join(world.pair.target[t] for t in emitted)
    seen = 0 if way.blind else way.at_stake
    found = way.find(of, [chain, *branches], outcome, seen)

    def stream() -> Stream:
        yield from found.instead
        yield from of.proposals(found.ids, found.rows)

    chance = way.noise(chance, of, found)
    with np.errstate(divide="ignore"):
        return emitted + rule(world.p, c + emitted, stream(), chance)


def deviation(
    world: World, way: Step, draws: Draws, rule: Callable, length: int, c: tuple[int, ...] = ()
) -> float:
    found = world.law_of(partial(two_steps, way, draws, rule, world), length=length, prompt=c)
    return total_variation(found, world.target_law(length=length, prompt=c))


METHODS = {"tli": of_both, "push_forward": of_all}
RULES = {"token": ref.token_rule, "block": ref.block_rule}
PAIR = {"target": (b"a", b"b", b"ab", b"ba"), "drafter": (b"a", b"b", b"aa")}
# A target with a token that adds nothing to the drafter's text.
EMPTY = {"target": (b"a", b"b", b"ab", b""), "drafter": (b"a", b"b")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at_stake", [0, 1, 2])
def test_lossless(method: str, rule: str, at_stake: int) -> None:
    for world in worlds(2 if at_stake < 2 else 1, **PAIR):
        way = Step(at_stake=at_stake)
        assert deviation(world, way, METHODS[method], RULES[rule], length=4) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at_stake", [1, 2])
def test_lossless_where_a_correction_adds_no_bytes(method: str, rule: str, at_stake: int) -> None:
    """The token that was rejected is found behind the text again."""
    for world in worlds(2, **EMPTY):
        way = Step(at_stake=at_stake)
        assert deviation(world, way, METHODS[method], RULES[rule], length=3) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_two_lines_with_one_base_are_lossless_where_the_first_is_used(rule: str) -> None:
    for world in worlds(2, **PAIR):
        assert deviation(world, Step(again=True), of_all, RULES[rule], length=4) < EXACT


# --------------------------------------------------------------------- ways that must be caught


def likelier(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """(i) Of two lines with one base the one whose next token is likelier."""
    chain, *branches = lines

    def share(line: Line) -> float:
        return float(line.row(line.base)[line[line.base]])

    return as_it_is(of, [chain, *sorted(branches, key=share, reverse=True)], outcome, seen)


def row_of_the_draw_before(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """(ii)"""
    spelled = of.world.pair.drafter.__getitem__
    found = find_drawn(((line.base, line) for line in lines), outcome, spelled)
    return _found(lines, found, seen, earlier=1)


def inside_a_token(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """(iii) What is left of a token comes with the row that the whole was drawn from."""
    spelled = of.world.pair.drafter.__getitem__
    found = find_remainder(lines, outcome, b"", spelled)
    if found is None or not found.known:
        return _found(lines, found, seen)
    cut = found.ids[0]
    whole = _found(lines, found, seen)
    rest = of.world.pair.tau(spelled(cut)[found.known :])
    (told, *_) = of.proposals([cut], whole.rows[:1])
    certain = [Proposal(t, ref.one_hot(t, len(of.world.pair.target))) for t in rest[1:]]
    return Found(whole.ids[1:], whole.rows[1:], [Proposal(rest[0], told.row), *certain])


class SharedNoise:
    """(iv) A line is drawn by the very numbers that its tokens will be accepted by."""

    def __init__(self, chance: Chance, of: Ahead, found: Found) -> None:
        self._chance = chance
        self.draw = chance.draw
        self._drawn = []  # where the number of each lies
        for d, row in zip(found.ids, found.rows, strict=True):
            assert row is not None
            self._drawn.append((float(row[:d].sum()), float(row[d])))
            self._drawn += [(0.0, 1.0)] * (len(of.world.pair.kappa(d)) - 1)

    def flip(self, probability: float) -> bool:
        start, share = self._drawn.pop(0)
        return self._chance.flip((probability - start) / share)


def worst(way: Step, rule: Callable, **pair: Sequence[bytes]) -> float:
    return max(
        deviation(world, way, of_all, rule, length=4) for world in worlds(3, **(PAIR | pair))
    )


@pytest.mark.parametrize(
    "way",
    [
        Step(likelier, again=True),
        Step(row_of_the_draw_before),
        Step(inside_a_token),
        Step(noise=SharedNoise),
    ],
    ids=["likelier", "row before", "inside", "noise"],
)
def test_wrong_ways_are_caught(way: Step) -> None:
    assert worst(way, ref.token_rule) > WRONG


def test_what_a_verification_of_blocks_has_looked_at_is_not_new() -> None:
    """(v) A draft's end has had a part in where it was left, and is found behind that again."""
    ways = (Step(at_stake=3, blind=blind) for blind in (False, True))
    right, wrong = (worst(way, ref.block_rule, drafter=(b"a", b"b")) for way in ways)
    assert right < EXACT
    assert wrong > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_what_was_rejected_is_not_new(rule: str) -> None:
    """(vi) It is found again behind a correction that adds no bytes, under every rule."""
    assert worst(Step(blind=True), RULES[rule], **EMPTY) > WRONG
