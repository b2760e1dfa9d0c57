# SPDX-License-Identifier: Apache-2.0
"""Search for precomputed continuations by bytes, compared with a search through whole strings."""

import random
from functools import partial

from vllm_hetero_spec.engine.ahead.continuations import (
    MatchedContinuation,
    find_drawn,
    find_remainder,
)

# Single bytes, parts of a two-byte and of a three-byte character, and tokens of several bytes.
TOKENS = [b"a", b"b", b" ", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"ab", b" a", b"a b"]
TOKENS += ["é".encode(), "€".encode(), b"b\xc3", b"\x82\xac", b"\xa9 a", b"aa"]


def searched(
    branches: list[list[int]], outcome: bytes, held: bytes, unfit: int
) -> MatchedContinuation | None:
    """Return what `find_remainder` must return, found through whole strings.

    The first branch that extends past the outcome with a fitting token is used. If there is none,
    the last branch that agrees so far is used, without ids.
    """
    agrees = None
    for rank, ids in enumerate(branches):
        text = b"".join(TOKENS[i] for i in ids)
        wanted = outcome + held
        if text.startswith(wanted) and len(text) > len(outcome):
            for first in range(len(ids), -1, -1):
                before = b"".join(TOKENS[i] for i in ids[:first])
                if len(before) <= len(outcome):
                    if (ids[first] + len(outcome) - len(before)) % 5 == unfit:
                        break
                    return MatchedContinuation(rank, ids[first:], len(outcome) - len(before))
        elif wanted.startswith(text) or text == outcome:
            agrees = MatchedContinuation(rank, [])
    return agrees


def _fits(unfit: int, token: int, known: int) -> bool:
    return (token + known) % 5 != unfit


def test_continuations_are_found_as_by_a_naive_search() -> None:
    chance = random.Random(4)
    kinds = {"none": 0, "cut": 0, "whole": 0, "held": 0, "short": 0, "side": 0, "unfit": 0}
    for _ in range(200_000):
        alphabet = chance.choice((3, 8, len(TOKENS)))
        branches = [
            [chance.randrange(alphabet) for _ in range(chance.randrange(7))]
            for _ in range(chance.randint(1, 4))
        ]
        text = b"".join(TOKENS[i] for i in chance.choice(branches))
        if chance.random() < 0.2:
            text += TOKENS[chance.randrange(alphabet)]
        if chance.random() < 0.2:
            text = b"".join(TOKENS[chance.randrange(alphabet)] for _ in range(3))
        end = chance.randint(0, len(text))
        written = text[:end]
        # The target's tokens may end inside a character, whose first bytes are then held.
        whole = written.decode(errors="ignore").encode() if chance.random() < 0.5 else written
        held = written[len(whole) :] if written.startswith(whole) else b""
        outcome = written[: len(written) - len(held)]
        unfit = chance.choice((-1, -1, 0, 1))
        fits = partial(_fits, unfit)
        found = find_remainder(branches, outcome, held, TOKENS.__getitem__, fits)
        expected = searched(branches, outcome, held, unfit)
        kinds["unfit"] += expected != searched(branches, outcome, held, -1)
        assert found == expected, (branches, outcome, held)
        kinds["none"] += found is None
        if found is not None:
            kinds["short"] += not found.ids
            kinds["cut"] += found.known > 0
            kinds["whole"] += bool(found.ids) and not found.known
            kinds["held"] += bool(found.ids and held)
            kinds["side"] += found.rank > 0
    assert min(kinds.values()) > 1000, kinds


def test_sampled_lines_are_found_only_at_the_ends_of_tokens() -> None:
    """The result equals that of a naive search. Tokens after the outcome do not influence it."""
    chance = random.Random(5)
    kinds = {"none": 0, "whole": 0, "short": 0, "side": 0}
    for _ in range(50_000):
        alphabet = chance.choice((3, 9, len(TOKENS)))
        lines = []
        for _ in range(chance.randint(1, 4)):
            ids = [chance.randrange(alphabet) for _ in range(chance.randrange(7))]
            lines.append((chance.randint(0, min(2, len(ids))), ids))
        text = b"".join(TOKENS[i] for i in chance.choice(lines)[1])
        outcome = text[: chance.randint(0, len(text))]
        expected = None
        for rank, (base, ids) in enumerate(lines):
            ends = [b"".join(TOKENS[i] for i in ids[:end]) for end in range(len(ids) + 1)]
            if outcome in ends and base <= (end := ends.index(outcome)):
                expected = MatchedContinuation(rank, ids[end:])
            elif outcome not in ends and outcome.startswith(ends[-1]):
                expected = MatchedContinuation(rank, [])
            if expected is not None and expected.ids:
                break
        found = find_drawn(lines, outcome, TOKENS.__getitem__)
        assert found == expected
        if found is not None and found.ids:
            others = [(base, ids.copy()) for base, ids in lines]
            own = others[found.rank][1]
            own[-len(found.ids) :] = [chance.randrange(alphabet) for _ in found.ids]
            again = find_drawn(others, outcome, TOKENS.__getitem__)
            assert again is not None
            assert (again.rank, len(again.ids)) == (found.rank, len(found.ids))
        kinds["none"] += found is None
        kinds["whole"] += found is not None and bool(found.ids)
        kinds["short"] += found is not None and not found.ids
        kinds["side"] += found is not None and found.rank > 0
    assert min(kinds.values()) > 1000, kinds
