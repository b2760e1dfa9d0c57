# SPDX-License-Identifier: Apache-2.0
"""Where every token of a round goes, worked out on the host before anything is queued.

A round catches every request up in one forward and then takes single steps. All lengths are known
from the start, so positions and KV slots of all steps are too: they cross to the device at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.engine.drafter.request_state import DraftSequence

# The slot of a token whose KV is not to be written.
NOWHERE = -1


class Feed(NamedTuple):
    """The tokens of one forward, one request's after the other's.

    Attributes:
        tokens: int64 [3, N], of each its drafter id, its position in the sequence, and its slot:
            block number * block size + offset, NOWHERE where its KV is written already.
        starts: int32 [B+1], offset of each request among the N tokens.
        most: Most tokens of one request.
    """

    tokens: np.ndarray
    starts: np.ndarray
    most: int

    @property
    def last(self) -> np.ndarray:
        """int64 [B], each request's last token."""
        return self.starts[1:].astype(np.int64) - 1


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
        forks: int64 [2, F], of each place behind the n: the request that it goes on from, and the
            rank of its first token among that request's likeliest.
        uniform: Whether every place is fed as many tokens, idle ones too.
    """

    count: int
    feed: Feed
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


class Planner:
    """Plans the rounds of one drafter.

    Args:
        block_size: Tokens of a KV block.
        max_length: Most tokens of a sequence.
    """

    def __init__(self, block_size: int, max_length: int) -> None:
        self.block_size, self._max_length = block_size, max_length

    def plan(
        self,
        sequences: Sequence[DraftSequence],
        pending: Sequence[Sequence[int]],
        steps: Sequence[int],
        size: int = 0,
        width: int = 0,
        forks: Sequence[Sequence[DraftSequence]] = (),
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
            forks: Of each request; they are drafted for as far as it is.
        """
        count, rounds = len(sequences), max(1, steps[0])
        cached = np.array([len(sequence.kv_ids) for sequence in sequences], np.int64)
        pairs = [(line, rank) for line, own in enumerate(forks) for rank in range(1, len(own) + 1)]
        of = np.array([*range(count), *(line for line, _ in pairs)], np.int64)
        table = self.table([*sequences, *chain.from_iterable(forks)], size)
        size = len(table)
        feed = self.ragged(table, cached, pending)
        after = cached + np.diff(feed.starts)
        if width:
            feed = self._uniform(feed, sequences, after, size, width)
        lengths = np.ones((rounds, size), np.int32)
        used = len(of)
        np.minimum(after[of] + np.arange(rounds)[:, None], self._max_length, out=lengths[:, :used])
        places = np.zeros((rounds, 2, size), np.int64)
        places[:, 1, used:] = NOWHERE
        positions, slots = places[:, 0, :used], places[:, 1, :used]
        np.subtract(lengths[:, :used], 1, out=positions)
        blocks = np.minimum(positions // self.block_size, table.shape[1] - 1)  # that ended
        slots[:] = table[np.arange(used), blocks]
        slots *= self.block_size
        slots += positions % self.block_size
        lengths[0, count:] = 1  # they begin behind the request that is caught up
        drafting = np.array(steps)[of] > np.arange(rounds)[:, None]
        slots[~drafting] = NOWHERE
        last = np.where(drafting, np.arange(1, used + 1), 0)
        active = [int(last[0, :count].max()), *last[1:].max(1).tolist()]
        return RoundPlan(
            count, feed, table, lengths, places, active,
            np.array(pairs, np.int64).reshape(-1, 2).T, width > 0,
        )  # fmt: skip

    def table(self, sequences: Sequence[DraftSequence], size: int = 0) -> np.ndarray:
        """int32 [B, W], the KV blocks of each sequence, 0 behind the last."""
        width = max(len(sequence.table.blocks) for sequence in sequences)
        table = np.zeros((max(size, len(sequences)), width), np.int32)
        for line, sequence in zip(table, sequences, strict=False):
            count = len(sequence.table.blocks)
            line[:count] = sequence.table.row[:count]
        return table

    def ragged(
        self, table: np.ndarray, cached: np.ndarray, pending: Sequence[Sequence[int]]
    ) -> Feed:
        """Every line's pending ids, behind the tokens that it has cached.

        Args:
            table: int32 [n, W] or more.
            cached: int64 [n], tokens of each line whose KV is written.
            pending: Drafter ids to feed, at least one for each line.
        """
        counts = [len(ids) for ids in pending]
        starts = np.zeros(len(pending) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        tokens = np.empty((3, starts[-1]), np.int64)
        ids, positions, slots = tokens
        ids[:] = list(chain.from_iterable(pending))
        lines = np.repeat(np.arange(len(pending)), counts)
        np.add((cached - starts[:-1])[lines], np.arange(len(ids)), out=positions)
        slots[:] = table[lines, positions // self.block_size]
        slots *= self.block_size
        slots += positions % self.block_size
        return Feed(tokens, starts, max(counts))

    @staticmethod
    def _uniform(
        ragged: Feed, sequences: Sequence[DraftSequence], after: np.ndarray, size: int, width: int
    ) -> Feed:
        """As many tokens for every place, padded to the left with what is known."""
        tokens = np.zeros((3, size, width), np.int64)
        ids, positions, slots = tokens
        slots[:] = NOWHERE
        count, queries = len(sequences), np.diff(ragged.starts)
        positions[:count] = after[:, None] + np.arange(-width, 0)
        new = np.zeros((size, width), bool)
        new[:count] = np.arange(width) >= width - queries[:, None]
        ids[new], slots[new] = ragged.tokens[0], ragged.tokens[2]
        for line, (sequence, query) in enumerate(zip(sequences, queries.tolist(), strict=True)):
            if query < width:
                ids[line, : width - query] = sequence.kv_ids[query - width :]
        starts = np.arange(0, size * width + 1, width, dtype=np.int32)
        return Feed(tokens.reshape(3, -1), starts, width)
