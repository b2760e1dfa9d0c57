# SPDX-License-Identifier: Apache-2.0
"""The work of the drafter process: it drafts after the text of each request.

Each request has a chain: the drafter's most likely tokens, or sampled ones. Beside it are branches.
A branch starts with a guess, a token with which the target may leave the chain, and has a fork of
the chain's KV. A guess is never sampled; it follows from the chain's rows. Each forward adds one
token to chains and branches, and writes it to the table at once; with a parallel drafter it adds
all tokens. An update replaces the state of a request, and keeps the KV of the chain or branch that
agrees longest.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K, pack_rows
from vllm_hetero_spec.engine.ahead.messages import UpdateBatch
from vllm_hetero_spec.engine.ahead.server_requests import (
    Continuation,
    ServerRequest,
    choose_guesses,
)
from vllm_hetero_spec.engine.ahead.table import Counts, DraftRecord, DraftTable
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.requests import UNSTABLE_TAIL
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.staging import Receiver

# Number of most likely tokens kept of each drafter row. Only these can become guesses.
RIVALS = 8


class _Work(NamedTuple):
    """A chain or branch in a forward."""

    text: ServerRequest
    line: Continuation
    row: DraftRow


class DraftingServer:
    """Drafts for the requests of one engine.

    Args:
        ends: Drafter ids that end a draft.
        budget: Maximum tokens of a forward.
        most_rows: Maximum sequences of a forward.
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
        self._texts: dict[int, ServerRequest] = {}
        row_bytes = np.dtype(np.int32).itemsize * 2 * SPARSE_TOP_K
        self._receiver = Receiver(drafter.model.device, row_bytes * most_rows)
        self._tokens = self._read = self._caught_up = 0

    @property
    def busy(self) -> bool:
        """True if a chain or branch needs a forward."""
        return any(line.has_work for _, line in self._lines())

    def take(self, commit: UpdateBatch) -> None:
        """Apply an update. Each request in it is drafted anew from its new text."""
        for slot in commit.closed:
            self._close(slot)
        for row in commit.rows:
            if row.keep < 0:
                self._close(row.slot)
            text = self._texts.get(row.slot)
            if text is None:
                text = self._texts[row.slot] = ServerRequest(row.slot, row.salt)
            text.renew(row, commit.serial, self._pool, parallel=self._drafter.parallel)
            if text.chain.ids:  # drafted while the update was on its way
                if text.chain.ids[-1] in self._ends:
                    text.chain.wanted = 0
                self._put(text, text.chain)
            self._guess(text)
        self._count()

    def advance(self) -> None:
        """Run one forward for all chains and branches that need one, within the limits."""
        work = self._chosen()
        if not work:
            return
        drafted = self._drafter.run([of.row for of in work])
        for of in work:
            pending, unread = len(of.row.pending), of.text.num_text - of.line.state.num_kv_valid
            self._read += pending
            self._caught_up += max(0, min(pending, unread))
        rows = self._drawn_from(drafted)
        for of, made, sampled in zip(work, drafted, rows, strict=True):
            of.line.book(of.row, made, self._ends, sampled)
            self._tokens += len(made.tokens)
            of.row.sequence.table.sound = bool(of.row.steps)  # otherwise its logits were not read
            if not made.finite:
                self._pool.suspect()
            elif not of.line.rank:
                state = of.line.state
                stable = min(state.num_kv_valid, of.text.num_text) - UNSTABLE_TAIL
                self._pool.publish(of.row.sequence.table, state.context.ids, stable)
            if of.row.steps:
                self._put(of.text, of.line)
        for of in work:
            if not of.line.rank:
                self._guess(of.text)
        self._count()

    def _count(self) -> None:
        drafter, pool = self._drafter, self._pool
        done = Counts(
            forwards=drafter.forwards,
            tokens=self._tokens,
            blocks=pool.held,
            read=self._read,
            caught_up=self._caught_up,
            replays=drafter.steps.replays,
            reused=pool.reused_tokens,
            seconds=drafter.stopwatch.seconds,
        )
        self._table.count(done)

    def _lines(self) -> Iterator[tuple[ServerRequest, Continuation]]:
        for text in self._texts.values():
            for line in text.lines:
                yield text, line

    def _chosen(self) -> list[_Work]:
        """Choose sequences for the next forward: chains first, then the shortest prefill."""
        work, tokens = list[_Work](), self._budget
        waiting = [of for of in self._lines() if of[1].has_work]
        waiting.sort(key=lambda of: (of[1].rank > 0, of[1].state.num_uncached))
        for text, line in waiting:
            if not tokens or len(work) == self._most_rows:
                break
            row = self._row(text, line, tokens)
            if row is None:
                line.state.close(self._pool)
                continue
            work.append(_Work(text, line, row))
            tokens -= len(row.pending)
        return work

    def _put(self, text: ServerRequest, line: Continuation) -> None:
        drafted = DraftRecord(text.serial, line.place, line.ids, line.peaks, line.rows)
        self._table.write(text.slot, line.rank, drafted)

    def _guess(self, text: ServerRequest) -> None:
        """Start branches once the drafter's rows for all positions under verification exist."""
        rivals = text.rivals()
        if rivals is None:
            return
        text.guessed = True
        # A sampled token is assumed to be followed as often as the most likely one.
        drawn = text.draw is not None
        follows = [max(of.shares) if drawn else of.share for of in rivals]
        copies = []
        most = min(text.guesses, self._table.branches)
        for guess in choose_guesses(rivals, follows, most):
            sequence = text.chain.state.sequence
            at = text.num_text + guess.place
            if sequence is None:
                continue
            known = min(at, len(sequence.kv_ids))
            if known < at and not self._drafter.parallel:
                continue
            fork = self._pool.fork(sequence.table, known)
            if fork is None:
                break
            if fork.copy is not None:
                copies.append(fork.copy)
            self._put(text, text.begin_beside(guess, fork.table, known))
        if copies:
            self._drafter.model.copy_blocks(copies)

    def _drawn_from(self, drafted: Sequence[DrafterTokens]) -> list[Sequence[bytes]]:
        """The rows that the tokens of each result were sampled from, see `DraftRecord`."""
        proposals = [of.proposal and of.proposal.draft_probs for of in drafted]
        tables = [probs.rows for probs in proposals if probs is not None and probs.row_of]
        if not tables:
            return [()] * len(drafted)
        packed = self._receiver.fetch(pack_rows(tables[0], SPARSE_TOP_K)).wait()  # they share it
        return [
            [packed[row].tobytes() for row in probs.row_of] if probs is not None else ()
            for probs in proposals
        ]

    def _row(self, text: ServerRequest, line: Continuation, budget: int) -> DraftRow | None:
        """The next input of a chain or branch; None if there is no room for it."""
        state = line.state
        assert state.sequence is not None
        start = state.num_kv_valid
        pending = state.context.ids[start : start + budget]
        steps, room = 0, self._drafter.max_length - start - len(pending)
        if line.drafts and start + len(pending) == len(state.context.ids):
            steps = min(line.wanted - len(line.ids), self._drafter.steps.places)
        if room < bool(steps):
            return None
        steps = min(steps, room)
        length = start + len(pending) + steps
        while not self._pool.grow(state.sequence.table, length):
            lender = self._lender()
            if lender is None:
                return None
            lender.state.close(self._pool)
        draw = text.draw_of(line, self._drafter.max_length)
        return DraftRow(DraftTask(state, steps, draw=draw, paths=1), state.sequence, pending, steps)

    def _lender(self) -> Continuation | None:
        """A chain or branch without work that can give up its KV; branches come first."""
        lines = [line for _, line in self._lines()]
        resting = [of for of in lines if of.state.sequence is not None and not of.has_work]
        return max(resting, key=lambda of: of.rank > 0, default=None)

    def _close(self, slot: int) -> None:
        if slot in self._texts:
            for line in self._texts.pop(slot).lines:
                line.state.close(self._pool)
