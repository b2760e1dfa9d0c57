# SPDX-License-Identifier: Apache-2.0
"""Where every token of a round goes, worked out on the host before anything is queued.

A round catches every request up in one forward and then takes single steps. All lengths are known
from the start, so positions and KV slots of all steps are too: they cross to the device at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.drafter.requests import DraftSequence

# The slot of a token whose KV is not to be written.
NOWHERE = -1
# Tables of blocks are as wide as vLLM's: for whole numbers of so many tokens.
_WHOLE_TOKENS = 128
# What a fork leaves with: the likeliest token is the chain's.
_SECOND = 1

# Drafter tokens that a draft may take for each of its target tokens.
STEPS_PER_TOKEN = 8


class BatchFeed(NamedTuple):
    """The tokens of one forward, one request's after the other's.

    Attributes:
        tokens: int64 [3, N], of each its drafter id, its position in the sequence, and its slot:
            block number * block size + offset, NOWHERE where its KV is written already.
        starts: int32 [B+1], offset of each request among the N tokens.
        most: Most tokens of one request.
        back: What comes in the place of each last token is asked for, too.
    """

    tokens: np.ndarray
    starts: np.ndarray
    most: int
    back: bool = False

    @property
    def rows(self) -> np.ndarray:
        """int64 [B], each request's last token; behind them, [2B] where `back`, the ones before, of
        a request with one token itself."""
        starts = self.starts.astype(np.int64)
        last = starts[1:] - 1
        return np.concatenate([last, np.maximum(last - 1, starts[:-1])]) if self.back else last


@dataclass
class RoundPlan:
    """A round of B requests, those with more steps first; behind the n real ones, idle places.

    Attributes:
        count: n.
        feed: What catches the requests up.
        table: int32 [B, W], their KV blocks, 0 behind the last.
        lengths: int32 [S, B], tokens of each sequence after catching up and after each step.
        places: int64 [S, 2, B], position and slot of the token that each step feeds; row 0, which
            catches up, is not read.
        active: Places that are still drafted for in each of the S steps: those behind the last of
            them need not be computed. The first is n where all requests draft.
        forks: int64 [3, F], of each place behind the n: the request whose path it follows at first,
            the step behind which it leaves that, and the token that it leaves with, as a column of
            what is kept beside those that are picked.
        uniform: Whether every place is fed as many tokens, idle ones too.
    """

    count: int
    feed: BatchFeed
    table: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    active: Sequence[int]
    forks: np.ndarray
    uniform: bool = False

    @property
    def steps(self) -> int:
        """Drafter tokens of the longest draft, S; at least 1."""
        return len(self.lengths)

    def forks_of(self, request: int) -> list[tuple[int, int]]:
        """The places of a request's forks, and the steps behind which they leave it."""
        if not self.forks.size:
            return []
        own = np.flatnonzero(self.forks[0] == request)
        return list(zip((self.count + own).tolist(), self.forks[1, own].tolist(), strict=True))


def table_width(blocks: int, block_size: int) -> int:
    """Columns of a table of so many blocks: of whole 128 tokens, as some kernels demand."""
    step = _WHOLE_TOKENS // math.gcd(_WHOLE_TOKENS, block_size)
    return -(-blocks // step) * step


class Planner:
    """Plans the rounds of one drafter.

    Args:
        block_size: Tokens of a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def plan(
        self,
        sequences: Sequence[DraftSequence],
        pending: Sequence[Sequence[int]],
        steps: Sequence[int],
        size: int = 0,
        width: int = 0,
        forks: Sequence[Sequence[DraftSequence]] = (),
        *,
        back: bool = False,
    ) -> RoundPlan:
        """A round.

        Args:
            sequences: Of the n requests.
            pending: Drafter ids that each is to be fed first, at least one.
            steps: Drafter tokens that each is to draft, not increasing; may be 0.
            size: Places of the round, B; n where smaller.
            width: Feed every place so many tokens, the last of its text, in the place of `pending`,
                of which none may have more: those whose KV is written already are read again and
                written nowhere. 0 feeds what is pending.
            forks: Of each request; they are drafted for as far as it is. Each leaves it a step
                later than the one before.
            back: As in `BatchFeed`. If one token is pending, the one before is read again.
        """
        count, rounds = len(sequences), max(1, steps[0])
        pairs = [(line, step) for line, own in enumerate(forks) for step in range(len(own))]
        table = self.table([*sequences, *chain.from_iterable(forks)], size)
        size = len(table)
        cached = [len(sequence.kv_ids) for sequence in sequences]
        after = [start + len(ids) for start, ids in zip(cached, pending, strict=True)]
        if width:
            feed = self._uniform(table, sequences, pending, after, width)
        else:
            feed = self.ragged(table, cached, pending)
            feed = self._one_before(feed, sequences) if back else feed
        lines = [*range(count), *(line for line, _ in pairs)]
        idle = [0] * (size - len(lines))
        begin = np.array([after[line] - 1 for line in lines] + idle)
        step = np.arange(rounds)[:, None]
        places = np.empty((rounds, 2, size), np.int64)
        positions, slots = places[:, 0], places[:, 1]
        np.add(begin, step, out=positions)
        active, uneven = [count] * rounds, bool(idle) or steps[-1] < rounds
        if uneven:  # those that end sooner stay at their last token, and write nothing
            drafted = np.array([steps[line] for line in lines] + idle)
            ended = step >= drafted
            np.minimum(positions, begin + np.maximum(drafted - 1, 0), out=positions)
            active = (count - ended[:, :count].sum(1)).tolist()
        slots[:] = self._slots(table, np.arange(size), positions)
        if uneven:
            slots[ended] = NOWHERE
        lengths = (positions + 1).astype(np.int32)
        if pairs:
            lengths[0, count:] = 1  # they begin behind the request that is caught up
            forking = [sum([steps[line] > n for line, _ in pairs]) for n in range(1, rounds)]
            active[1:] = [count + n if n else k for n, k in zip(forking, active[1:], strict=True)]
        return RoundPlan(
            count, feed._replace(back=back), table, lengths, places, active,
            np.array([(*pair, _SECOND) for pair in pairs], np.int64).reshape(-1, 3).T, width > 0,
        )  # fmt: skip

    def nowhere(self, lengths: Sequence[int]) -> list[DraftSequence]:
        """Texts of such lengths, on the padding block."""
        found = []
        for length in lengths:
            blocks = [0] * -(-length // self.block_size)
            table = BlockTable(blocks=blocks, row=np.zeros(len(blocks), np.int32))
            found.append(DraftSequence(table))
        return found

    def step_back(self, plan: RoundPlan, requests: Sequence[int]) -> None:
        """Let the steps of some requests begin in the place of their last token."""
        positions, slots = (plan.places[1:, line][:, requests] for line in (0, 1))
        positions -= 1
        plan.places[1:, 0, requests] = positions
        moved = self._slots(plan.table, np.array(requests), positions)
        plan.places[1:, 1, requests] = np.where(slots == NOWHERE, NOWHERE, moved)
        plan.lengths[1:, requests] -= 1

    def table(self, sequences: Sequence[DraftSequence], size: int = 0) -> np.ndarray:
        """int32 [B, W], the KV blocks of each sequence, 0 behind the last."""
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
        """Every line's pending ids, behind the tokens that it has cached.

        Args:
            table: int32 [n or more, W], the KV blocks of each line.
            cached: Tokens of each line whose KV is written.
            pending: Drafter ids to feed, at least one for each line.
        """
        counts = [len(ids) for ids in pending]
        starts = np.array([0, *accumulate(counts)], np.int32)
        ranges = [range(start, start + n) for start, n in zip(cached, counts, strict=True)]
        tokens = np.empty((3, starts[-1]), np.int64)
        tokens[0] = list(chain.from_iterable(pending))
        tokens[1] = list(chain.from_iterable(ranges))
        tokens[2] = self._slots(table, np.arange(len(counts)).repeat(counts), tokens[1])
        return BatchFeed(tokens, starts, max(counts))

    def _slots(self, table: np.ndarray, lines: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where tokens at some positions of some lines of a table go."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return table[lines, blocks] * self.block_size + offsets

    @staticmethod
    def _one_before(ragged: BatchFeed, sequences: Sequence[DraftSequence]) -> BatchFeed:
        """With the token before that of each request that has one alone."""
        starts, queries = ragged.starts, np.diff(ragged.starts)
        alone = (queries == 1) & np.array([bool(sequence.kv_ids) for sequence in sequences])
        at = starts[:-1][alone]
        ids = [sequences[line].kv_ids[-1] for line in np.flatnonzero(alone)]
        before = np.array([ids, ragged.tokens[1, at] - 1, [NOWHERE] * len(ids)], np.int64)
        tokens = np.insert(ragged.tokens, at, before, axis=1)
        starts = starts + np.array([0, *np.cumsum(alone)], np.int32)
        return BatchFeed(tokens, starts, max(ragged.most, 2))

    def _uniform(
        self,
        table: np.ndarray,
        sequences: Sequence[DraftSequence],
        pending: Sequence[Sequence[int]],
        after: Sequence[int],
        width: int,
    ) -> BatchFeed:
        """As many tokens for every line of the table, padded to the left with what is known."""
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
        return BatchFeed(tokens.reshape(3, -1), starts, width)
