# SPDX-License-Identifier: Apache-2.0
"""The drafter process at work: texts come and change, and it drafts on behind each of them.

Behind a text there is a chain, the drafter's likeliest tokens, and beside it guesses: tokens with
which the target may leave the chain where it verifies it, each with a continuation of its own, in a
fork of the chain's KV. All of them advance by one token in each forward, which stands in the table
at once. What a commit says of a text replaces what was said before; the KV is kept of whichever
line agrees with it furthest.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from vllm_hetero_spec.draft.guesses import choose_guesses
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.tasks import DraftRow, DraftTask
from vllm_hetero_spec.engine.source.drafted_lines import Line, Text
from vllm_hetero_spec.engine.source.messages import Commit
from vllm_hetero_spec.engine.source.table import Drafted, DraftTable

# The last ids of a text may still merge with what follows: not published for reuse.
_UNSTABLE_TAIL = 32
# Of each row of the drafter's, so many tokens may be guesses.
RIVALS = 8


class _Work(NamedTuple):
    """One line in a forward."""

    text: Text
    rank: int
    line: Line
    row: DraftRow


class DraftingServer:
    """Drafts behind texts.

    Args:
        drafter: The decode loop.
        pool: The drafter's KV blocks.
        table: Where drafts are put.
        ends: Ids after which nothing is drafted.
        budget: Tokens of a forward.
        most_rows: Lines of a forward.
    """

    def __init__(
        self,
        drafter: Drafter,
        pool: KVPool,
        table: DraftTable,
        ends: Collection[int],
        budget: int,
        most_rows: int,
    ) -> None:
        self._drafter, self._pool, self._table = drafter, pool, table
        self._ends, self._budget, self._most_rows = ends, budget, most_rows
        self._texts: dict[int, Text] = {}
        self._tokens = self._read = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return any(line.has_work for _, _, line in self._lines())

    def take(self, commit: Commit) -> None:
        """Take in what has changed; what is drafted behind a text begins anew from there."""
        self._count()
        for slot in commit.closed:
            self._close(slot)
        for row in commit.rows:
            if row.keep < 0:
                self._close(row.slot)
            text = self._texts.get(row.slot)
            if text is None:
                text = self._texts[row.slot] = Text(row.slot, row.salt)
            text.renew(row, commit.serial, self._pool)
            self._guess(text)

    def advance(self) -> None:
        """One forward for all lines that need one, as far as tokens and blocks last."""
        work, budget = list[_Work](), self._budget
        waiting = [found for found in self._lines() if found[2].has_work]
        for text, rank, line in sorted(
            waiting, key=lambda of: (of[1] > 0, of[2].state.num_uncached)
        ):
            if not budget or len(work) == self._most_rows:
                break
            row = self._row(line, budget)
            if row is None:
                line.state.close(self._pool)
                continue
            work.append(_Work(text, rank, line, row))
            budget -= len(row.pending)
        if not work:
            return
        drafted = self._drafter.run([of.row for of in work])
        self._read += sum(len(of.row.pending) for of in work)
        for of, tokens in zip(work, drafted, strict=True):
            of.line.book(of.row, tokens, self._ends)
            self._tokens += len(tokens.tokens)
            if tokens.finite and not of.rank:
                state = of.line.state
                stable = min(state.num_kv_valid, of.text.num_text) - _UNSTABLE_TAIL
                self._pool.publish(of.row.sequence.table, state.context.ids, stable)
            if of.row.steps:
                self._put(of.text, of.rank, of.line)
        for of in work:
            if not of.rank:
                self._guess(of.text)
        self._count()

    def _count(self) -> None:
        drafter = self._drafter
        done = drafter.forwards, self._tokens, self._pool.held, self._read
        self._table.count(*done, drafter.forward_seconds)

    def _lines(self) -> Iterator[tuple[Text, int, Line]]:
        """All lines, with their texts and ranks."""
        for text in self._texts.values():
            for rank, line in enumerate(text.lines):
                yield text, rank, line

    def _put(self, text: Text, rank: int, line: Line) -> None:
        drafted = Drafted(text.serial, line.place, line.ids, line.peaks)
        self._table.write(text.slot, rank, drafted)

    def _guess(self, text: Text) -> None:
        """Begin lines beside the chain, once it is known what the drafter thinks of all of it."""
        rivals = text.rivals()
        if rivals is None:
            return
        text.guessed = True
        follows = [
            dict(zip(of.tokens, of.shares, strict=True)).get(of.chosen, 0.0) for of in rivals
        ]
        copies = []
        most = min(text.guesses, self._table.sides)
        for guess in choose_guesses(rivals, follows, most):
            sequence = text.chain.state.sequence
            at = text.num_text + guess.place
            if sequence is None or at > len(sequence.kv_ids):
                continue
            fork = self._pool.fork(sequence.table, at)
            if fork is None:
                break
            if fork.copy is not None:
                copies.append(fork.copy)
            line = text.begin_beside(guess, fork.table)
            self._put(text, len(text.lines) - 1, line)
        if copies:
            self._drafter.model.copy_blocks(copies)

    def _row(self, line: Line, budget: int) -> DraftRow | None:
        """What of a line goes into the next forward; None where there is no room for it."""
        state = line.state
        assert state.sequence is not None
        start = state.num_kv_valid
        pending = state.context.ids[start : start + budget]
        steps = int(line.drafts and start + len(pending) == len(state.context.ids))
        length = start + len(pending) + steps
        if length > self._drafter.max_length:
            return None
        while not self._pool.grow(state.sequence.table, length):
            sides_first = sorted(self._lines(), key=lambda of: of[1] == 0)
            idle = (other.state for _, _, other in sides_first if not other.has_work)
            lender = next((other for other in idle if other.sequence is not None), None)
            if lender is None:
                return None
            lender.close(self._pool)
        return DraftRow(DraftTask(state, steps, paths=1), state.sequence, pending, steps)

    def _close(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text is not None:
            text.close(self._pool)
