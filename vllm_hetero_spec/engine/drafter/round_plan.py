# SPDX-License-Identifier: Apache-2.0
"""Compute all positions, KV slots and lengths of a round on the host, before it is queued.

A round runs one catch-up forward, then single-token steps. All lengths are known at the start, so
the plan of all steps goes to the device in one transfer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.drafter.requests import DraftSequence

# Slot of a token whose KV is not written.
NOWHERE = -1
# tokens; a row of a block table covers a multiple of this, as in vLLM.
_WHOLE_TOKENS = 128

# drafter tokens per target token of a draft; upper bound.
STEPS_PER_TOKEN = 8


class Fork(NamedTuple):
    """A further sequence of a request that drafts beside the request's own chain.

    Attributes:
        row: Index of the request.
        sequence: Its KV, with room for as many steps as the request has.
        leaves: Step after which it leaves the chain.
        column: Column of `TopCandidates` with its own first token.
        copy: (source, destination) KV blocks to copy after the catch-up forward, or None.
    """

    row: int
    sequence: DraftSequence
    leaves: int
    column: int
    copy: tuple[int, int] | None = None


class BatchFeed(NamedTuple):
    """The tokens of one forward, request after request.

    Attributes:
        tokens: int64 [3, N]: drafter id, position in the sequence, and slot of each token. The slot
            is block number * block size + offset, or NOWHERE if the KV exists.
        starts: int32 [B+1], offset of each request among the N tokens.
        most: Largest number of tokens of one request.
        back: Also compute the logits at the position of each last token, for token healing.
    """

    tokens: np.ndarray
    starts: np.ndarray
    most: int
    back: bool = False

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The ids as int32 [N], like picked ids; positions and slots int64 [N]; and `starts`.

        A packet aligns each array. Kernels are compiled for aligned slots.
        """
        ids, positions, slots = self.tokens
        return ids.astype(np.int32), positions, slots, self.starts

    @property
    def rows(self) -> np.ndarray:
        """Index of each request's last token, int64 [B].

        If `back`, [2B]: then the tokens before them, or the last token itself if it is the only
        one.
        """
        starts = self.starts.astype(np.int64)
        last = starts[1:] - 1
        return np.concatenate([last, np.maximum(last - 1, starts[:-1])]) if self.back else last


@dataclass
class RoundPlan:
    """A round of B rows: n requests, those with more steps first, then forks, then idle rows.

    Attributes:
        table: int32 [B, W], KV blocks of each row, padded with 0.
        lengths: int32 [S, B], length of each sequence after catch-up and after each step.
        places: int64 [S, 2, B], position and slot of the token that each step feeds. Row 0, of the
            catch-up forward, is unused.
        active: For each of the S steps, the number of leading rows that are still drafted; later
            rows need not be computed. The first is n if all requests draft.
        forks: int64 [3, F]: `row`, `leaves` and `column` of each fork.
        copies: (source, destination) KV blocks to copy after the catch-up forward.
        uniform: True if every row feeds the same number of tokens, idle rows included.
    """

    count: int
    feed: BatchFeed
    table: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    active: Sequence[int]
    forks: np.ndarray
    copies: Sequence[tuple[int, int]] = ()
    uniform: bool = False

    @property
    def steps(self) -> int:
        """Drafter tokens of the longest draft, S; at least 1."""
        return len(self.lengths)

    def forks_of(self, request: int) -> list[tuple[int, int]]:
        """Return (row, step after which it leaves) of each fork of a request."""
        own = np.flatnonzero(self.forks[0] == request)
        return list(zip((self.count + own).tolist(), self.forks[1, own].tolist(), strict=True))


def table_width(blocks: int, block_size: int) -> int:
    """Return the columns of a block table: a multiple of 128 tokens, as some kernels require."""
    step = _WHOLE_TOKENS // math.gcd(_WHOLE_TOKENS, block_size)
    return -(-blocks // step) * step


class Planner:
    """Plans the rounds of one drafter, whose ids are below `vocab_size`.

    A context may contain further ids if both tokenizers are the same: a prompt may have padding ids
    of the target. The drafter reads id 0 instead.
    """

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self.block_size, self._vocab_size = block_size, vocab_size

    def plan(
        self,
        sequences: Sequence[DraftSequence],
        pending: Sequence[Sequence[int]],
        steps: Sequence[int],
        size: int = 0,
        width: int = 0,
        forks: Sequence[Fork] = (),
        *,
        back: bool = False,
    ) -> RoundPlan:
        """Plan a round.

        Args:
            pending: Drafter ids that each request feeds first, at least one.
            steps: Drafter tokens that each request drafts, not increasing; may be 0.
            size: Number of rows B; raised to n plus forks if smaller.
            width: Feed exactly this many tokens in every row: the last tokens of its sequence. No
                request may have more pending ids. Tokens that already have KV are read again
                without writing KV. 0 feeds the pending ids only.
            forks: Sorted by request. They draft as many steps as their request.
            back: Same as `BatchFeed.back`. If one token is pending, the one before is read again.
        """
        count, rounds = len(sequences), max(1, steps[0])
        table = self.table([*sequences, *(fork.sequence for fork in forks)], size)
        size = len(table)
        cached = [len(sequence.kv_ids) for sequence in sequences]
        after = [start + len(ids) for start, ids in zip(cached, pending, strict=True)]
        if width:
            feed = self._uniform(table, sequences, pending, after, width)
        else:
            feed = self.ragged(table, cached, pending)
            feed = self._one_before(feed, sequences) if back else feed
        lines = [*range(count), *(fork.row for fork in forks)]
        idle = [0] * (size - len(lines))
        begin = np.array([after[line] - 1 for line in lines] + idle)
        step = np.arange(rounds)[:, None]
        places = np.empty((rounds, 2, size), np.int64)
        positions, slots = places[:, 0], places[:, 1]
        np.add(begin, step, out=positions)
        active, uneven = [count] * rounds, bool(idle) or steps[-1] < rounds
        if uneven:  # shorter drafts stay at their last token and write no KV
            drafted = np.array([steps[line] for line in lines] + idle)
            ended = step >= drafted
            np.minimum(positions, begin + np.maximum(drafted - 1, 0), out=positions)
            active = (count - ended[:, :count].sum(1)).tolist()
        slots[:] = self._slots(table, np.arange(size), positions)
        if uneven:
            slots[ended] = NOWHERE
        lengths = (positions + 1).astype(np.int32)
        if forks:
            lengths[0, count:] = 1  # forks begin after the catch-up forward
            forking = [sum([steps[fork.row] > n for fork in forks]) for n in range(1, rounds)]
            active[1:] = [count + n if n else k for n, k in zip(forking, active[1:], strict=True)]
        return RoundPlan(
            count, feed._replace(back=back), table, lengths, places, active,
            np.array([(of.row, of.leaves, of.column) for of in forks], np.int64).reshape(-1, 3).T,
            [fork.copy for fork in forks if fork.copy], width > 0,
        )  # fmt: skip

    def nowhere(self, lengths: Sequence[int]) -> list[DraftSequence]:
        """Return sequences of these lengths on the padding block."""
        found = []
        for length in lengths:
            blocks = [0] * -(-length // self.block_size)
            table = BlockTable(blocks=blocks, row=np.zeros(len(blocks), np.int32))
            found.append(DraftSequence(table))
        return found

    def step_back(self, plan: RoundPlan, requests: Sequence[int]) -> None:
        """Move the steps of some requests back by one position, to replace their last token."""
        positions, slots = (plan.places[1:, line][:, requests] for line in (0, 1))
        positions -= 1
        plan.places[1:, 0, requests] = positions
        moved = self._slots(plan.table, np.array(requests), positions)
        plan.places[1:, 1, requests] = np.where(slots == NOWHERE, NOWHERE, moved)
        plan.lengths[1:, requests] -= 1

    def table(self, sequences: Sequence[DraftSequence], size: int = 0) -> np.ndarray:
        """Return the KV blocks of each sequence, int32 [B, W], padded with 0."""
        most = max(len(sequence.table.blocks) for sequence in sequences)
        width = table_width(most, self.block_size)
        table = np.zeros((max(size, len(sequences)), width), np.int32)
        for line, sequence in zip(table, sequences, strict=False):
            count = len(sequence.table.blocks)
            line[:count] = sequence.table.row[:count]
        return table

    def ragged(
        self, table: np.ndarray, cached: Sequence[int], pending: Sequence[Sequence[int]]
    ) -> BatchFeed:
        """Build a forward of every row's pending ids (at least one), after its cached tokens."""
        counts = [len(ids) for ids in pending]
        starts = np.array([0, *accumulate(counts)], np.int32)
        ranges = [range(start, start + n) for start, n in zip(cached, counts, strict=True)]
        tokens = np.empty((3, starts[-1]), np.int64)
        tokens[0] = list(chain.from_iterable(pending))
        tokens[1] = list(chain.from_iterable(ranges))
        tokens[2] = self._slots(table, np.arange(len(counts)).repeat(counts), tokens[1])
        return self._feed(tokens, starts, max(counts))

    def _slots(self, table: np.ndarray, lines: np.ndarray, positions: np.ndarray) -> np.ndarray:
        blocks, offsets = np.divmod(positions, self.block_size)
        return table[lines, blocks] * self.block_size + offsets

    def _feed(self, tokens: np.ndarray, starts: np.ndarray, most: int) -> BatchFeed:
        tokens[0][tokens[0] >= self._vocab_size] = 0
        return BatchFeed(tokens, starts, most)

    def _one_before(self, ragged: BatchFeed, sequences: Sequence[DraftSequence]) -> BatchFeed:
        """Add the token before it to each request that feeds only one."""
        starts, queries = ragged.starts, np.diff(ragged.starts)
        alone = (queries == 1) & np.array([bool(sequence.kv_ids) for sequence in sequences])
        at = starts[:-1][alone]
        ids = [sequences[line].kv_ids[-1] for line in np.flatnonzero(alone)]
        before = np.array([ids, ragged.tokens[1, at] - 1, [NOWHERE] * len(ids)], np.int64)
        tokens = np.insert(ragged.tokens, at, before, axis=1)
        starts = starts + np.array([0, *np.cumsum(alone)], np.int32)
        return self._feed(tokens, starts, max(ragged.most, 2))

    def _uniform(
        self,
        table: np.ndarray,
        sequences: Sequence[DraftSequence],
        pending: Sequence[Sequence[int]],
        after: Sequence[int],
        width: int,
    ) -> BatchFeed:
        """Build a forward of `width` tokens per row, padded on the left with cached tokens."""
        size, count = len(table), len(sequences)
        tokens = np.zeros((3, size, width), np.int64)
        ids, positions, slots = tokens
        every = zip(sequences, pending, after, strict=True)
        ids[:count] = [[*sequence.kv_ids[end - width :], *new] for sequence, new, end in every]
        positions[:count] = np.array(after)[:, None] + np.arange(-width, 0)
        known = width - np.array([len(new) for new in pending])
        lines = np.arange(count)[:, None]
        slots[:count] = self._slots(table, lines, positions[:count])
        slots[:count][np.arange(width) < known[:, None]] = NOWHERE
        slots[count:] = NOWHERE
        starts = np.arange(0, size * width + 1, width, dtype=np.int32)
        return self._feed(tokens.reshape(3, -1), starts, width)
