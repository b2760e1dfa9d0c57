# SPDX-License-Identifier: Apache-2.0
"""Where every token of a round goes, worked out on the host before anything is queued.

A round catches every request up in one forward and then takes single steps. All lengths are known
from the start, so positions and KV slots of all steps are too: they cross to the device at once.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import neg
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
        cached = [len(sequence.kv_ids) for sequence in sequences]
        pairs = [(line, rank) for line, own in enumerate(forks) for rank in range(1, len(own) + 1)]
        of = [line for line, _ in pairs]
        every = [*sequences, *chain.from_iterable(forks)]
        after = [start + len(ids) for start, ids in zip(cached, pending, strict=True)]
        after += [after[line] for line in of]
        begin = cached + [after[line] - 1 for line in of]
        drafted = [*steps, *(steps[line] for line in of)]
        table = self.table(every, size)
        size = len(table)
        fed, slots = [], list[int]()
        for sequence, start, end, own in zip(every, begin, after, drafted, strict=True):
            rest = max(own, 1) - 1  # tokens that are fed behind the first
            walk = self._slots(sequence.table.blocks, range(start, end + rest))
            fed.append(walk[: end - start])
            slots += walk[end - start - 1 :] + [NOWHERE] * (rounds - 1 - rest)
        idle = size - len(every)
        slots += [NOWHERE] * (rounds * idle)
        feed = self._feed(cached, pending, fed[:count])
        if width:
            feed = self._uniform(feed, sequences, np.array(after[:count]), size, width)
        lengths = (
            np.array(after + [1] * idle, np.int32) + np.arange(rounds, dtype=np.int32)[:, None]
        )
        np.minimum(lengths, self._max_length, out=lengths)
        places = np.empty((rounds, 2, size), np.int64)
        places[:, 0] = lengths - 1
        places[:, 1] = np.array(slots).reshape(size, rounds).T
        lengths[0, count:] = 1  # they begin behind the request that is caught up
        chains, others = drafted[:count], drafted[count:]
        forking = [_num_above(step, others) for step in range(1, rounds)]
        active = [_num_above(step, chains) for step in range(rounds)]
        active[1:] = [count + n if n else k for n, k in zip(forking, active[1:], strict=True)]
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
        self,
        blocks: Sequence[Sequence[int]],
        cached: Sequence[int],
        pending: Sequence[Sequence[int]],
    ) -> Feed:
        """Every line's pending ids, behind the tokens that it has cached.

        Args:
            blocks: KV blocks of each line.
            cached: Tokens of each line whose KV is written.
            pending: Drafter ids to feed, at least one for each line.
        """
        lines = zip(blocks, cached, pending, strict=True)
        slots = [self._slots(own, range(start, start + len(ids))) for own, start, ids in lines]
        return self._feed(cached, pending, slots)

    @staticmethod
    def _feed(
        cached: Sequence[int], pending: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]
    ) -> Feed:
        counts = [len(ids) for ids in pending]
        starts = np.array([0, *accumulate(counts)], np.int32)
        ranges = [range(start, start + n) for start, n in zip(cached, counts, strict=True)]
        tokens = [list(chain.from_iterable(of)) for of in (pending, ranges, slots)]
        return Feed(np.array(tokens, np.int64), starts, max(counts))

    def _slots(self, blocks: Sequence[int], positions: range) -> list[int]:
        size = self.block_size
        return [blocks[place // size] * size + place % size for place in positions]

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


def _num_above(step: int, steps: Sequence[int]) -> int:
    """How many of some numbers, none of which rises, are above another."""
    return bisect_left(steps, -step, key=neg)
