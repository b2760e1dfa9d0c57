# SPDX-License-Identifier: Apache-2.0
"""Exact tests: drafts sampled before their context is known keep the target's distribution.

Two steps of the target are enumerated with all random draws. The first step verifies a draft, and
lines of later tokens are sampled meanwhile. The second step verifies what the search finds in these
lines. Known faults must be detected.
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
BRANCHES, BEHIND = 2, 2  # lines besides the chain; sampled tokens of each line
Draws = Callable[[Row, Pair], Row]


def of_both(row: Row, pair: Pair) -> Row:
    """`tli`: sample from the tokens that both vocabularies contain."""
    own = row * [pair.twin(d) is not None for d in range(len(row))]
    return own / own.sum()


def of_all(row: Row, pair: Pair) -> Row:
    """`push_forward`: sample from all drafter tokens."""
    return row


class Line(Sequence[int]):
    """Tokens of a line. Each is sampled at its first access; the distribution is the same."""

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
        """Return the distribution of a token over the drafter's vocabulary."""
        return self._of.draws(self._of.drafter(tuple(self[:at])), self._of.world.pair)


@dataclass(frozen=True)
class Ahead:
    """Lines drafted after a text while the target verifies the chain's first tokens."""

    world: World
    draws: Draws
    drafter: Drafter
    chance: Chance

    def chain(self, at_stake: int) -> Line:
        return Line(self, (), at_stake + BEHIND)

    def beside(self, chain: Line, at_stake: int) -> Iterator[Line]:
        """Yield the guesses, which depend only on the rows and on the chain's tokens."""
        rivals = []
        for place in range(at_stake + 1):
            row = self.drafter(tuple(chain[:place]))
            best = [int(d) for d in np.argsort(-row, kind="stable")]
            rivals.append(Alternative(chain[place], best, [float(row[d]) for d in best]))
        follows = [max(rival.shares) for rival in rivals]
        for place, token, _ in choose_guesses(rivals, follows, BRANCHES):
            yield Line(self, [*chain[:place], token], BEHIND, place + 1)

    def proposals(self, drawn: Sequence[int], rows: Sequence[Row | None]) -> Stream:
        """Yield the target tokens that drafter tokens propose. A row is None for certain tokens."""
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
    """The draft of the second step: drafter tokens, their laws, and proposals that precede them."""

    ids: Sequence[int]
    rows: Sequence[Row | None]
    instead: Sequence[Proposal] = ()


Find = Callable[[Ahead, Sequence[Line], bytes, int], Found]


def as_it_is(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """Search like the engine. The first `seen` tokens of the chain are certain."""
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
    """A variant of the two steps: the engine's, or a known fault."""

    find: Find = as_it_is
    at_stake: int = 1
    blind: bool = False  # fault: verified tokens keep their rows
    again: bool = False  # two lines continue the first guess
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


def deviation(world: World, way: Step, draws: Draws, rule: Callable, length: int) -> float:
    found = world.law_of(partial(two_steps, way, draws, rule, world), length=length)
    return total_variation(found, world.target_law(length=length))


METHODS = {"tli": of_both, "push_forward": of_all}
RULES = {"token": ref.token_rule, "block": ref.block_rule}
PAIR = {"target": (b"a", b"b", b"ab", b"ba"), "drafter": (b"a", b"b", b"aa")}
# The target has a token that adds no bytes to the drafter's text.
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
    """The recovered token adds no bytes, so the search finds the rejected token again."""
    for world in worlds(2, **EMPTY):
        way = Step(at_stake=at_stake)
        assert deviation(world, way, METHODS[method], RULES[rule], length=3) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_two_lines_with_one_base_are_lossless_where_the_first_is_used(rule: str) -> None:
    """If two lines have the same base, the search must use the first one."""
    for world in worlds(2, **PAIR):
        assert deviation(world, Step(again=True), of_all, RULES[rule], length=4) < EXACT


# --------------------------------------------------------------------- faults to detect


def likelier(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """Fault 1: of two lines with one base, use the one with the more likely next token."""
    chain, *branches = lines

    def share(line: Line) -> float:
        return float(line.row(line.base)[line[line.base]])

    return as_it_is(of, [chain, *sorted(branches, key=share, reverse=True)], outcome, seen)


def row_of_the_draw_before(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """Fault 2: each token has the row of the draw before it."""
    spelled = of.world.pair.drafter.__getitem__
    found = find_drawn(((line.base, line) for line in lines), outcome, spelled)
    return _found(lines, found, seen, earlier=1)


def inside_a_token(of: Ahead, lines: Sequence[Line], outcome: bytes, seen: int) -> Found:
    """Fault 3: the rest of a token has the row of the whole token."""
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
    """Fault 4: sampling of a line and acceptance of its tokens use the same random numbers."""

    def __init__(self, chance: Chance, of: Ahead, found: Found) -> None:
        self._chance = chance
        self.draw = chance.draw
        self._drawn = []  # start and width of the interval that contains each token's number
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
    """Each of faults 1 to 4 changes the output distribution."""
    assert worst(way, ref.token_rule) > WRONG


def test_what_a_verification_of_blocks_has_looked_at_is_not_new() -> None:
    """Fault 5: a token found again keeps its row, but decides on earlier ones under `block`."""
    ways = (Step(at_stake=3, blind=blind) for blind in (False, True))
    right, wrong = (worst(way, ref.block_rule, drafter=(b"a", b"b")) for way in ways)
    assert right < EXACT
    assert wrong > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_what_was_rejected_is_not_new(rule: str) -> None:
    """Fault 6: the same with a rejected token, found again after a token that adds no bytes."""
    assert worst(Step(blind=True), RULES[rule], **EMPTY) > WRONG
