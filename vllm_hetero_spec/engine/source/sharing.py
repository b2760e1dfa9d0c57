# SPDX-License-Identifier: Apache-2.0
"""The engines that share a drafter: each has slots, a table and prefixes of its own."""

import asyncio
import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence

import msgspec

from vllm_hetero_spec.engine.source.messages import ENGINE_SLOTS, Commit, commit_of
from vllm_hetero_spec.engine.source.table import Counts, Drafted, DraftTable, make_file

# Seconds until an engine is told that there is nothing new, so that it asks again.
_LONGEST_POLL = 1.0

Piece = tuple[int, bytes]
"""Where in the memory of a table, and what stands there now."""


class SharingEngine:
    """One of them; made in the event loop of its relay's calls.

    Args:
        number: Which.
        shape: Of its table.
        before: What had been done before it joined.

    Attributes:
        heard: When it was heard of last.
    """

    def __init__(self, number: int, shape: Sequence[int], before: Counts) -> None:
        self._number, self._slots, self._before = number, shape[0], before
        file = make_file(*shape)
        try:
            self.table = DraftTable(file, *shape)
            self._memory = mmap.mmap(file, 0)
        finally:
            os.close(file)
        self._written = set[tuple[int, int]]()
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self.heard = time.monotonic()

    async def news(self) -> list[Piece]:
        """What the table has that was not told yet; waited for, but not for long."""
        self.heard = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _LONGEST_POLL)
        self._changed.clear()
        self.heard = time.monotonic()
        spans = [self.table.head]
        while self._written:
            spans.append(self.table.span(*self._written.pop()))
        return [(span.start or 0, self._memory[span]) for span in spans]

    def write(self, slot: int, rank: int, drafted: Drafted) -> None:
        """Put a record into its table."""
        self.table.write(slot, rank, drafted)
        self._written.add((slot, rank))

    def count(self, done: Counts) -> None:
        """See `DraftTable.count`: since it joined. If anything was written, it is told now."""
        since = Counts._make(now - then for now, then in zip(done, self._before, strict=True))
        self.table.count(since._replace(blocks=done.blocks))
        if self._written and not self._changed.is_set():
            self._loop.call_soon_threadsafe(self._changed.set)

    def commit(self, message: bytes) -> Commit:
        """What it says, as the drafter knows its slots; it shares KV with nobody else."""
        commit, first = commit_of(message), ENGINE_SLOTS * self._number
        rows = [
            msgspec.structs.replace(
                row, slot=first + row.slot, salt=f"engine {self._number} {row.salt!r}"
            )
            for row in commit.rows
        ]
        return Commit(commit.serial, [first + slot for slot in commit.closed], rows)

    @property
    def farewell(self) -> Commit:
        """What is to be said for it when it is gone."""
        first = ENGINE_SLOTS * self._number
        return Commit(0, list(range(first, first + self._slots)), [])


class SharedTable:
    """The tables of all engines, as one.

    Args:
        shape: Of an engine's table, but for its slots.
    """

    def __init__(self, *shape: int) -> None:
        self._shape = shape
        self.longest, self.sides, *_ = shape
        self._engines: dict[int, SharingEngine] = {}
        self._numbers = itertools.count()
        self._done = Counts()

    def join(self, slots: int) -> int:
        """One more engine, with so many slots; its number."""
        number = next(self._numbers)
        self._engines[number] = SharingEngine(number, (slots, *self._shape), self._done)
        return number

    def engine(self, number: int) -> SharingEngine:
        """That engine.

        Raises:
            KeyError: It was silent for too long.
        """
        return self._engines[number]

    def __len__(self) -> int:
        return len(self._engines)

    def forget(self, silent: float) -> Iterator[Commit]:
        """Let engines go that were silent for so many seconds; what the drafter is told of it."""
        now = time.monotonic()
        for number, engine in list(self._engines.items()):
            if now - engine.heard > silent:
                del self._engines[number]
                yield engine.farewell

    def write(self, slot: int, rank: int, drafted: Drafted) -> None:
        """See `DraftTable`."""
        number, slot = divmod(slot, ENGINE_SLOTS)
        if number in self._engines:
            self._engines[number].write(slot, rank, drafted)

    def count(self, done: Counts) -> None:
        """See `DraftTable`; each engine is told what was done for all of them together."""
        self._done = done
        for engine in list(self._engines.values()):
            engine.count(done)


AnyTable = DraftTable | SharedTable
"""Of one engine, or of several."""
