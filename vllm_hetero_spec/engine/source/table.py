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
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.draft.likeliest_rows import LIKELIEST

# In front of a record's tokens: checksum, serial, place, how many there are, how many were drawn.
_HEAD = 5
# Of a row that was drawn from.
_ROW = 2 * LIKELIEST


class Drafted(NamedTuple):
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
        drawn: Most drawn tokens of a line.
    """

    def __init__(self, file: int, slots: int, longest: int, sides: int, drawn: int = 0) -> None:
        self.sides, self.longest, self.drawn = sides, longest, drawn
        memory = np.frombuffer(mmap.mmap(file, self.size(slots, longest, sides, drawn)), np.int32)
        counts, records = np.split(memory, [2 * len(Counts._fields)])
        self._counts = counts.view(np.float64)
        self._records = records.reshape(slots, 1 + sides, -1)

    @staticmethod
    def size(slots: int, longest: int, sides: int, drawn: int = 0) -> int:
        """Bytes of a table."""
        record = _HEAD + 2 * longest + _ROW * drawn
        return 4 * (2 * len(Counts._fields) + slots * (1 + sides) * record)

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
        serial, place, ids, peaks, rows = drafted
        certain = len(ids) - len(rows)
        count = min(len(ids), self.longest, certain + self.drawn)
        num_drawn = max(0, count - certain)
        head = np.array([0, serial, place, count, num_drawn], np.int32)
        tokens = np.array(ids[:count], np.int32), np.array(peaks[:count], np.float32).view(np.int32)
        drawn = np.frombuffer(b"".join(rows[:num_drawn]), np.int32)
        record = np.concatenate([head, *tokens, drawn])
        record[0] = _checksum(record)
        self._records[slot, rank, : len(record)] = record

    def read(self, slot: int, rank: int = 0) -> Drafted | None:
        """A record as it stands; None where it is being written."""
        whole = self._records[slot, rank]
        count, num_drawn = whole[3:_HEAD].tolist()
        record = whole[: _HEAD + 2 * count + _ROW * num_drawn].copy()
        if [count, num_drawn] != record[3:_HEAD].tolist() or record[0] != _checksum(record):
            return None
        _, serial, place, _, _, *ids = record[: _HEAD + count].tolist()
        peaks = record[_HEAD + count : _HEAD + 2 * count].view(np.float32).tolist()
        rows = record[_HEAD + 2 * count :].reshape(num_drawn, _ROW)
        return Drafted(serial, place, ids, peaks, tuple(row.tobytes() for row in rows))


def make_file(slots: int, longest: int, sides: int, drawn: int = 0) -> int:
    """A file of memory for a table that nobody else can open, with nothing in it."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(DraftTable.size(slots, longest, sides, drawn))
        return os.dup(file.fileno())


def _checksum(record: np.ndarray) -> np.int32:
    return np.uint32(zlib.crc32(record[1:].tobytes())).astype(np.int32)
