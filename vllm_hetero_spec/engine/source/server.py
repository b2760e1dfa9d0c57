# SPDX-License-Identifier: Apache-2.0
"""The drafter process at work: texts come and change, and it drafts on behind each of them.

All texts advance by one token in each forward, which stands in the table at once. What a commit
says of a text replaces what was said before; KV is kept as far as it agrees, be it of the text or
of what was drafted behind it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.request_state import RequestState
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.engine.source.messages import Commit, Row
from vllm_hetero_spec.engine.source.table import DraftTable
from vllm_hetero_spec.text.context import IdentityContext

# The last ids of a text may still merge with what follows: not published for reuse.
_UNSTABLE_TAIL = 32


@dataclass
class _Text:
    """One text, and what is drafted behind it.

    Attributes:
        state: Its ids, with all that is drafted behind them, and their KV.
        serial: Of the last commit that named it.
        num_text: Ids of it that the target has written.
        num_drafted: Ids behind them that the commit took to come.
        wanted: Ids to have behind the text in all.
        ids: Drafted since.
        peaks: The drafter's largest probability in the place of each.
    """

    state: RequestState
    serial: int = 0
    num_text: int = 0
    num_drafted: int = 0
    wanted: int = 0
    ids: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    @property
    def drafts(self) -> bool:
        """Whether more is to be drafted."""
        return self.num_drafted + len(self.ids) < self.wanted

    @property
    def has_work(self) -> bool:
        """Whether it needs a forward: the last id of all has no KV until another is wanted."""
        if self.state.sequence is None:  # its KV was given back
            return False
        return self.drafts or self.state.num_uncached > 1


class DraftingServer:
    """Drafts behind texts.

    Args:
        drafter: The decode loop.
        pool: The drafter's KV blocks.
        table: Where drafts are put.
        ends: Ids after which nothing is drafted.
        budget: Tokens of a forward.
        most_rows: Texts of a forward.
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
        self._texts: dict[int, _Text] = {}

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return any(text.has_work for text in self._texts.values())

    def take(self, commit: Commit) -> None:
        """Take in what has changed; what is drafted behind a text begins anew from there."""
        self._table.beat()
        for slot in commit.closed:
            self._close(slot)
        for row in commit.rows:
            if row.keep < 0:
                self._close(row.slot)
            text = self._texts.get(row.slot)
            if text is None:
                state = RequestState(str(row.slot), IdentityContext(), row.salt)
                text = self._texts[row.slot] = _Text(state)
            self._renew(text, row, commit.serial)

    def advance(self) -> None:
        """One forward for all texts that need one, as far as tokens and blocks last."""
        self._table.beat()
        rows: list[DraftRow] = []
        texts, budget = [], self._budget
        waiting = [text for text in self._texts.values() if text.has_work]
        for text in sorted(waiting, key=lambda text: text.state.num_uncached):
            if not budget or len(rows) == self._most_rows:
                break
            row = self._row(text, budget)
            if row is None:
                text.state.close(self._pool)
                continue
            texts.append(text)
            rows.append(row)
            budget -= len(row.pending)
        if not rows:
            return
        for text, row, tokens in zip(texts, rows, self._drafter.run(rows), strict=True):
            self._book(text, row, tokens)

    def _renew(self, text: _Text, row: Row, serial: int) -> None:
        ids = text.state.context.ids
        keep = max(0, min(row.keep, text.num_text, len(ids)))
        ids[keep:] = row.ids + row.drafted
        text.serial, text.num_text = serial, keep + len(row.ids)
        text.num_drafted, text.wanted = len(row.drafted), row.wanted
        text.ids, text.peaks = [], []
        text.state.align(self._pool, keep)

    def _row(self, text: _Text, budget: int) -> DraftRow | None:
        """What of a text goes into the next forward; None where there is no room for it."""
        state = text.state
        assert state.sequence is not None
        start = state.num_kv_valid
        pending = state.context.ids[start : start + budget]
        steps = int(text.drafts and start + len(pending) == len(state.context.ids))
        length = start + len(pending) + steps
        if length > self._drafter.max_length:
            return None
        while not self._pool.grow(state.sequence.table, length):
            idle = (other.state for other in self._texts.values() if not other.has_work)
            lender = next((other for other in idle if other.sequence is not None), None)
            if lender is None:
                return None
            lender.close(self._pool)
        return DraftRow(DraftTask(state, steps), state.sequence, pending, steps)

    def _book(self, text: _Text, row: DraftRow, tokens: DrafterTokens) -> None:
        state = text.state
        state.num_kv_valid += len(row.pending)
        if tokens.finite:
            stable = min(state.num_kv_valid, text.num_text) - _UNSTABLE_TAIL
            self._pool.publish(row.sequence.table, state.context.ids, stable)
        if not row.steps:
            return
        state.context.ids += tokens.tokens
        text.ids += tokens.tokens
        text.peaks += tokens.confidences
        if not tokens.finite or tokens.tokens[0] in self._ends:
            text.wanted = 0
        self._table.write(int(state.req_id), text.serial, text.ids, text.peaks)

    def _close(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text is not None:
            text.state.close(self._pool)
