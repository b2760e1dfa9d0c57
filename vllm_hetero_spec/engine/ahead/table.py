# SPDX-License-Identifier: Apache-2.0
"""Drafts in memory that two processes share: one writes them, the other reads them at any time.

The memory has no name, only the two processes have it. A record that is read while it is written is
known by its checksum, and not believed.
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

from vllm_hetero_spec.draft.sparse_rows import SPARSE_TOP_K

# In front of a record's tokens: checksum, serial, place, how many there are, how many were drawn.
_HEAD = 5
_head_of = Struct(f"=I{_HEAD - 1}i").unpack_from
# Of a row that was drawn from.
_ROW = 2 * SPARSE_TOP_K


class DraftRecord(NamedTuple):
    """A line that was drafted behind a text.

    Attributes:
        serial: Of the commit that it answers.
        place: Ids behind the text that come before its own: those that the commit took to come,
            and of the chain's.
        ids: Its own.
        peaks: The drafter's largest probability in the place of each.
        rows: What each of the last ids was drawn from, those before were not: int32 [2, LIKELIEST]
            of `likeliest_rows`, as bytes.
    """

    serial: int
    place: int
    ids: list[int]
    peaks: list[float]
    rows: Sequence[bytes] = ()


class Counts(NamedTuple):
    """What the writer has done so far.

    Attributes:
        beats: Signs of life, be it that nothing was written.
        forwards: Of the drafter.
        tokens: Drafted.
        blocks: Of its KV that are held at present.
        read: Tokens that the forwards were of.
        caught_up: Those of them that the target had written.
        replays: Forwards that were replayed graphs.
        reused: Tokens whose KV another text had left.
        seconds: That the forwards took.
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
    """Records of each text: of its chain, and of lines beside it.

    Args:
        file: Of the memory, from `make_file`.
        slots: Texts.
        longest: Most tokens of a line.
        branches: Most lines beside the chain.
        drawn: Most drawn tokens of a line.
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
        """Bytes of a table."""
        record = _HEAD + 2 * longest + _ROW * drawn
        return 4 * (2 * len(Counts._fields) + slots * (1 + branches) * record)

    @property
    def counts(self) -> Counts:
        """What was counted last."""
        *whole, seconds = self._counts.tolist()
        return Counts._make([*map(int, whole), seconds])

    def count(self, done: Counts) -> None:
        """Let the reader see what was done, and a sign of life more than last time."""
        self._counts[:] = done._replace(beats=self._counts[0] + 1)

    def write(self, slot: int, rank: int, drafted: DraftRecord) -> None:
        """Put a record in the place of the one before; that of the chain is number 0."""
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
        """Place and first token of each line beside the chain, be it that it is being written."""
        found: list[list[int]] = self._beginnings[slot].tolist()
        return found

    def read(self, slot: int, rank: int = 0) -> DraftRecord | None:
        """A record as it stands; None where it is being written."""
        # As bytes: of so few numbers numpy's calls would take longer than their work.
        start = self._at(slot, rank)
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

    def _at(self, slot: int, rank: int) -> int:
        """Where the bytes of a record begin."""
        start: int = self._start + slot * self._of_slot + rank * self._of_record
        return start


def make_file(slots: int, longest: int, branches: int, drawn: int = 0) -> int:
    """A file of memory for a table that nobody else can open, with nothing in it.

    Raises:
        OSError: There is no room for it.
    """
    size = DraftTable.size(slots, longest, branches, drawn)
    if hasattr(os, "memfd_create"):
        # Not in /dev/shm, of which containers have 64 MiB: who reads a page past that is ended.
        file = os.memfd_create("hetero_spec")
        os.fchmod(file, 0o600)
        os.truncate(file, size)
        return file
    # Builds of Python for old systems have no such call.
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
    """Of all but itself."""
    return zlib.crc32(memoryview(record)[4:])


@lru_cache
def _tokens_of(count: int) -> Struct:
    """Ids, and the peak of each."""
    return Struct(f"={count}i{count}f")
