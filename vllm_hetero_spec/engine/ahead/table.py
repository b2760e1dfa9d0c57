# SPDX-License-Identifier: Apache-2.0
"""Table of drafts in memory that two processes share: one writes, the other reads at any time.

The memory has no name, so no other process can open it. A checksum detects a record that is read
while it is written; the reader ignores it.
"""

import mmap
import os
import tempfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K

# int32 fields before a record's tokens: checksum, serial, place, tokens, sampled tokens.
_HEAD = 5
_head_of = Struct(f"=I{_HEAD - 1}i").unpack_from
# int32 fields of a row that a token was sampled from.
_ROW = 2 * SPARSE_TOP_K


class DraftRecord(NamedTuple):
    """A chain or branch in the table.

    Attributes:
        serial: Number of the update that it answers.
        place: Ids after the text before its own: the update's `drafted`, and the chain's.
        ids: Its own ids.
        peaks: For each id, the drafter's largest probability at its position.
        rows: For each of the last ids, the row (distribution) that it was sampled from: int32 [2,
            SPARSE_TOP_K] of `draft.pack_rows`, as bytes. Earlier ids were not sampled.
    """

    serial: int
    place: int
    ids: list[int]
    peaks: list[float]
    rows: Sequence[bytes] = ()


class Counts(NamedTuple):
    """Counts of the writer so far.

    Attributes:
        beats: Signs of life; grows even if nothing is written.
        forwards: Drafter forwards.
        tokens: Drafted tokens.
        blocks: KV blocks in use now.
        read: Tokens fed to the forwards.
        caught_up: Context tokens among `read`.
        replays: Forwards that were replayed as CUDA graphs.
        reused: Tokens whose KV came from another request.
        seconds: Duration of the forwards.
    """

    beats: int = 0
    forwards: int = 0
    tokens: int = 0
    blocks: int = 0
    read: int = 0
    caught_up: int = 0
    replays: int = 0
    reused: int = 0
    seconds: float = 0.0


class DraftTable:
    """Records of each request: its chain, and its branches.

    Args:
        file: File descriptor from `make_file`.
        longest: Maximum tokens of a record.
        branches: Maximum number of branches of a request.
        drawn: Maximum sampled tokens of a record.
    """

    def __init__(self, file: int, slots: int, longest: int, branches: int, drawn: int = 0) -> None:
        self.branches, self.longest, self.drawn = branches, longest, drawn
        shared = mmap.mmap(file, self.size(slots, longest, branches, drawn))
        memory, self._bytes = np.frombuffer(shared, np.int32), memoryview(shared)
        counts, records = np.split(memory, [2 * len(Counts._fields)])
        self._counts = counts.view(np.float64)
        self._records = records.reshape(slots, 1 + branches, -1)
        self._beginnings = self._records[:, 1:, 2 : 1 + _HEAD : _HEAD - 2]  # places, first tokens
        self._start, (self._of_slot, self._of_record, _) = counts.nbytes, self._records.strides

    @staticmethod
    def size(slots: int, longest: int, branches: int, drawn: int = 0) -> int:
        """Size of a table in bytes."""
        record = _HEAD + 2 * longest + _ROW * drawn
        return 4 * (2 * len(Counts._fields) + slots * (1 + branches) * record)

    @property
    def counts(self) -> Counts:
        *whole, seconds = self._counts.tolist()
        return Counts._make([*map(int, whole), seconds])

    def count(self, done: Counts) -> None:
        """Publish the counts, with one more sign of life."""
        self._counts[:] = done._replace(beats=self._counts[0] + 1)

    def write(self, slot: int, rank: int, drafted: DraftRecord) -> None:
        """Replace a record. Rank 0 is the chain."""
        serial, place, ids, peaks, rows = drafted
        certain = len(ids) - len(rows)
        count = min(len(ids), self.longest, certain + self.drawn)
        num_drawn = max(0, count - certain)
        head = np.array([0, serial, place, count, num_drawn], np.int32)
        tokens = np.array(ids[:count], np.int32), np.array(peaks[:count], np.float32).view(np.int32)
        drawn = np.frombuffer(b"".join(rows[:num_drawn]), np.int32)
        record = np.concatenate([head, *tokens, drawn])
        record.view(np.uint32)[0] = _checksum(record.tobytes())
        self._records[slot, rank, : len(record)] = record

    def beginnings(self, slot: int) -> list[list[int]]:
        """Place and first token of each branch, even of one that is being written."""
        found: list[list[int]] = self._beginnings[slot].tolist()
        return found

    def read(self, slot: int, rank: int = 0) -> DraftRecord | None:
        """Return a record; None if it is being written."""
        # Bytes, because calls of NumPy would take longer than the work on so few numbers.
        start = self._start + slot * self._of_slot + rank * self._of_record
        _, _, _, count, num_drawn = _head_of(self._bytes, start)
        tokens = _tokens_of(count)
        drawn = tokens.size + 4 * _HEAD
        record = self._bytes[start : start + drawn + 4 * _ROW * num_drawn].tobytes()
        checksum, serial, place, *counts = _head_of(record)
        if counts != [count, num_drawn] or checksum != _checksum(record):
            return None
        values = tokens.unpack_from(record, 4 * _HEAD)
        ids, peaks = [*values[:count]], [*values[count:]]
        if not num_drawn:
            return DraftRecord(serial, place, ids, peaks)
        starts = range(drawn, len(record), 4 * _ROW)
        rows = tuple([record[start : start + 4 * _ROW] for start in starts])
        return DraftRecord(serial, place, ids, peaks, rows)


def make_file(slots: int, longest: int, branches: int, drawn: int = 0) -> int:
    """Make a file in memory for a table, filled with zeros, that no other process can open.

    Raises:
        OSError: There is not enough space.
    """
    size = DraftTable.size(slots, longest, branches, drawn)
    if hasattr(os, "memfd_create"):
        # Not in /dev/shm: containers limit it to 64 MiB, and access to a page past that is fatal.
        file = os.memfd_create("hetero_spec")
        os.fchmod(file, 0o600)
        os.truncate(file, size)
        return file
    # Python builds for old systems lack `memfd_create`.
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder) as named:
        try:
            os.posix_fallocate(named.fileno(), 0, size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the table of drafts needs {size} bytes in {folder}, which has no room for it; "
                "give the container more (--shm-size), or lower max_num_seqs",
            ) from error
        return os.dup(named.fileno())


def _checksum(record: bytes) -> int:
    """CRC-32 of a record without its checksum."""
    return zlib.crc32(memoryview(record)[4:])


@lru_cache
def _tokens_of(count: int) -> Struct:
    return Struct(f"={count}i{count}f")
