# SPDX-License-Identifier: Apache-2.0
"""`Lookup` finds the same precomputed draft as a comparison with all lines of the table."""

import os
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K, Draft
from vllm_hetero_spec.engine.ahead.continuations import (
    MatchedContinuation,
    find_drawn,
    find_remainder,
)
from vllm_hetero_spec.engine.ahead.lookup import Lookup
from vllm_hetero_spec.engine.ahead.remote_requests import RemoteRequest
from vllm_hetero_spec.engine.ahead.table import DraftRecord, DraftTable, make_file
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats

TOKENS = [b"a", b"b", b"ab", b"ba", b"aab", b"bb"]
LONGEST, SIDES = 8, 4
SERIAL = 7


class Lines(NamedTuple):
    """A draft table with one request."""

    table: DraftTable
    text: RemoteRequest

    def all(self) -> list[tuple[int, list[int], list[float], list[bytes]]]:
        """Return guess, ids, peaks and rows of each line that belongs to the current text."""
        text, lines = self.text, []
        chain = text.drafted, text.peaks, text.rows
        for rank in range(1 + SIDES):
            of = self.table.read(0, rank)
            if of is not None and of.serial == SERIAL and of.place <= len(chain[0]):
                certain = [b""] * (len(of.ids) - len(of.rows))
                own = of.ids, of.peaks, [*certain, *of.rows]
                line = tuple([*a[: of.place], *b] for a, b in zip(chain, own, strict=True))
                lines.append(((of.place + 1) * (rank > 0), *line))
                chain = chain if rank else line
            elif not rank:
                lines.append((0, *chain))
        return lines


@pytest.fixture
def lines() -> Lines:
    shape = 1, LONGEST, SIDES, LONGEST
    file = make_file(*shape)
    table = DraftTable(file, *shape)
    os.close(file)
    return Lines(table, RemoteRequest(slot=0, serial=SERIAL))


def may_follow(context: object, token: int, known: int) -> bool:
    """Stand-in for `may_follow` of a bridge."""
    return (token + known) % 5 < 4


def look_up(lines: Lines) -> Lookup:
    bridge = SimpleNamespace(
        may_follow=may_follow, special=SimpleNamespace(drafter_control=frozenset())
    )
    pair: Any = SimpleNamespace(bridge=bridge, drafter=SimpleNamespace(token_bytes=TOKENS))
    process: Any = SimpleNamespace(table=lines.table)
    return Lookup(process, pair, DraftStats())


def task_of(
    text: RemoteRequest, written: list[int], held: bytes = b"", *, drawn: bool
) -> DraftTask:
    """Return the task of a request whose target has generated these tokens."""
    context = SimpleNamespace(ids=written, held=held)
    sequence = SimpleNamespace(table=text)
    state: Any = SimpleNamespace(req_id="", context=context, num_kv_valid=0, sequence=sequence)
    draw: Any = object() if drawn else None
    return DraftTask(state, 3, draw=draw)


def fill(lines: Lines, chance: random.Random) -> None:
    """Fill the table with guesses, some of an earlier update, some after the chain's end."""
    text, table = lines.text, lines.table

    def ids(count: int) -> list[int]:
        return chance.choices(range(len(TOKENS)), k=count)

    def rows(count: int) -> list[bytes]:
        return [chance.randbytes(8 * SPARSE_TOP_K) for _ in range(count)]

    text.drafted = ids(chance.randint(0, 3))
    text.peaks = [chance.random() for _ in text.drafted]
    text.rows = [b""] * len(text.drafted)
    for rank in range(1 + SIDES):
        own = ids(chance.randint(rank > 0, 4))
        place = chance.randint(0, 4 if rank else len(text.drafted))
        serial = SERIAL - (chance.random() < 0.1)
        peaks, drawn = [0.5 / (1 + i) for i in range(len(own))], rows(chance.randint(0, len(own)))
        table.write(0, rank, DraftRecord(serial, place, own, peaks, drawn))


@pytest.mark.parametrize("drawn", [False, True])
def test_lines_that_cannot_match_are_not_read(
    lines: Lines, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are not read if they leave the chain after the outcome, or at another token."""
    text, table, reads = lines.text, lines.table, []
    read = table.read
    monkeypatch.setattr(table, "read", lambda *of: reads.append(of) or read(*of))
    table.write(0, 0, DraftRecord(SERIAL, 0, [0, 0, 0, 1], [0.5] * 4))
    for rank, (place, guess) in enumerate(((3, 0), (1, 0), (1, 1), (0, 1)), 1):
        table.write(0, rank, DraftRecord(SERIAL, place, [guess, 0, 0], [0.5] * 3))
    look = look_up(lines)
    assert look.behind(task_of(text, [0, 0], drawn=drawn)).ids == [0, 1]
    assert reads == [(0,)]
    assert look.behind(task_of(text, [0, 1], drawn=drawn)).ids == [0, 0]
    assert reads == [(0,), (0,), (0, 3)]


@pytest.mark.parametrize("drawn", [False, True])
def test_the_result_is_that_of_a_search_of_all_lines(lines: Lines, drawn: bool) -> None:
    chance = random.Random(3)
    look, by_chain, beside, none = look_up(lines), 0, 0, 0
    for _ in range(4000):
        fill(lines, chance)
        known = lines.all()
        written = chance.choice(known)[1][: chance.randint(0, 4)]
        held = chance.choice([b"", b"", b"a"]) if not drawn else b""
        found = look.behind(task_of(lines.text, written, held, drawn=drawn))
        outcome = b"".join(TOKENS[i] for i in written)
        expected: MatchedContinuation | None
        if drawn:
            expected = find_drawn([of[:2] for of in known], outcome, TOKENS.__getitem__)
        else:
            expected = find_remainder(
                [of[1] for of in known],
                outcome,
                held,
                TOKENS.__getitem__,
                lambda token, known: may_follow(None, token, known),
            )
        if expected is None or not expected.ids:
            assert found.missing == ("not_guessed" if expected is None else "not_ready")
            assert not found.ids
            none += 1
            continue
        _, _, peaks, rows = known[expected.rank]
        count = len(expected.ids)
        assert (found.ids, found.known, found.missing) == (expected.ids, expected.known, "")
        assert [*found.peaks] == peaks[-count:]
        assert [*found.rows] == (rows[-count:] if drawn else [b""] * count)
        assert (found.rank > 0) == (expected.rank > 0)
        by_chain, beside = by_chain + (not found.rank), beside + (found.rank > 0)
    assert min(by_chain, beside, none) > 300


def test_a_rejected_token_that_is_found_again_has_no_distribution(lines: Lines) -> None:
    """The target's correction adds no text, so the proposed tokens were rejected."""
    rows = [bytes([number]) * 8 * SPARSE_TOP_K for number in range(4)]
    lines.table.write(0, 0, DraftRecord(SERIAL, 0, [0, 1, 0, 1], [0.5] * 4, rows))
    look: Any = look_up(lines)
    look._bridge.to_target = lambda *_: [[]]
    look._bridge.ids_covering = lambda *_: []
    draft = Draft.chain("", [0, 1], (), None)
    look._drawn = SimpleNamespace(drafts=lambda *_: [draft], ends=lambda _: [1, 2])
    found = look.behind(task_of(lines.text, [0], drawn=True))
    assert (found.ids, found.rows) == ([1, 0, 1], rows[1:])
    look.translate([found])
    again = look.behind(task_of(lines.text, [0], drawn=True))
    assert (again.ids, again.rows) == ([1, 0, 1], [b""] * 3)
