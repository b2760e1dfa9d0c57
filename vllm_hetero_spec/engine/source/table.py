# SPDX-License-Identifier: Apache-2.0
"""Drafts in memory that two processes share: one writes them, the other reads them at any time.

The memory has no name, only the two processes have it. A record that is read while it is written is
known by its checksum, and not believed.
"""

import mmap
import os
import tempfile
import zlib
from typing import NamedTuple

import numpy as np

# In front of a record's tokens: checksum, serial, place, count.
_HEAD = 4


class Drafted(NamedTuple):
    """A line that was drafted behind a text.

    Attributes:
        serial: Of the commit that it answers.
        place: Ids behind the text that come before its own: those that the commit took to come,
            and of the chain's.
        ids: Its own.
        peaks: The drafter's largest probability in the place of each.
    """

    serial: int
    place: int
    ids: list[int]
    peaks: list[float]


class Counts(NamedTuple):
    """What the writer has done so far.

    Attributes:
        beats: Signs of life, be it that nothing was written.
        forwards: Of the drafter.
        tokens: Drafted.
        blocks: Of its KV that are held at present.
        read: Tokens that the forwards were of.
        seconds: That they took.
    """

    beats: int = 0
    forwards: int = 0
    tokens: int = 0
    blocks: int = 0
    read: int = 0
    seconds: float = 0.0


class DraftTable:
    """Records of each text: of its chain, and of lines beside it.

    Args:
        file: Of the memory, from `make_file`.
        slots: Texts.
        longest: Most tokens of a line.
        sides: Most lines beside the chain.
    """

    def __init__(self, file: int, slots: int, longest: int, sides: int) -> None:
        self.sides, self.longest = sides, longest
        memory = np.frombuffer(mmap.mmap(file, self.size(slots, longest, sides)), np.int32)
        counts, records = np.split(memory, [2 * len(Counts._fields)])
        self._counts = counts.view(np.float64)
        self._records = records.reshape(slots, 1 + sides, -1)

    @staticmethod
    def size(slots: int, longest: int, sides: int) -> int:
        """Bytes of a table."""
        return 4 * (2 * len(Counts._fields) + slots * (1 + sides) * (_HEAD + 2 * longest))

    @property
    def head(self) -> slice:
        """Bytes of the memory that have the counts."""
        return slice(self._counts.nbytes)

    def span(self, slot: int, rank: int) -> slice:
        """Bytes of the memory that have a record."""
        of_slot, of_record, _ = self._records.strides
        start = self._counts.nbytes + slot * of_slot + rank * of_record
        return slice(start, start + of_record)

    @property
    def counts(self) -> Counts:
        """What was counted last."""
        *whole, seconds = self._counts.tolist()
        return Counts._make([*map(int, whole), seconds])

    def count(self, forwards: int, tokens: int, blocks: int, read: int, seconds: float) -> None:
        """Let the reader see a sign of life, and what `Counts` says."""
        self._counts[:] = (self._counts[0] + 1, forwards, tokens, blocks, read, seconds)

    def write(self, slot: int, rank: int, drafted: Drafted) -> None:
        """Put a record in the place of the one before; that of the chain is number 0."""
        serial, place, ids, peaks = drafted
        record = np.zeros(self._records.shape[2], np.int32)
        count = min(len(ids), self.longest)
        record[1:_HEAD] = serial, place, count
        record[_HEAD : _HEAD + count] = ids[:count]
        peak_bits = record[_HEAD + self.longest :].view(np.float32)
        peak_bits[:count] = peaks[:count]
        record[0] = _checksum(record)
        self._records[slot, rank] = record

    def read(self, slot: int, rank: int = 0) -> Drafted | None:
        """A record as it stands; None where it is being written."""
        record = self._records[slot, rank].copy()
        if record[0] != _checksum(record):
            return None
        _, serial, place, count, *ids = record[: _HEAD + self.longest].tolist()
        peaks = record[_HEAD + self.longest :].view(np.float32)[:count].tolist()
        return Drafted(serial, place, ids[:count], peaks)


def make_file(slots: int, longest: int, sides: int) -> int:
    """A file of memory for a table that nobody else can open, with nothing in it."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(DraftTable.size(slots, longest, sides))
        return os.dup(file.fileno())


def _checksum(record: np.ndarray) -> np.int32:
    return np.uint32(zlib.crc32(record[1:].tobytes())).astype(np.int32)
