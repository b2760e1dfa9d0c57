# SPDX-License-Identifier: Apache-2.0
"""Table of drafts in shared memory: a record that is only partly written is not used."""

import errno
import os
import random

import pytest

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K
from vllm_hetero_spec.engine.ahead.table import Counts, DraftRecord, DraftTable, make_file

SLOTS, LONGEST, SIDES, DRAWN = SHAPE = 3, 5, 2, 4


@pytest.fixture(params=["memfd_create", "posix_fallocate"])
def tables(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[DraftTable, DraftTable]:
    if request.param != "memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    file = make_file(*SHAPE)
    assert os.fstat(file).st_mode & 0o777 == 0o600
    assert os.fstat(file).st_nlink == 0
    reserved = 512 * os.fstat(file).st_blocks
    assert request.param == "memfd_create" or reserved >= DraftTable.size(*SHAPE)
    both = DraftTable(file, *SHAPE), DraftTable(file, *SHAPE)
    os.close(file)
    return both


def test_a_table_does_not_lie_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved at once, because the first use of a missing page ends the process."""

    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = make_file(*SHAPE)
    assert "/dev/shm" not in os.readlink(f"/proc/self/fd/{file}")
    os.close(file)
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"table of drafts needs \d+ bytes in .*max_num_seqs") as said:
        make_file(*SHAPE)
    assert said.value.errno == errno.ENOSPC


def test_what_one_writes_the_other_reads(tables: tuple[DraftTable, DraftTable]) -> None:
    writer, reader = tables
    assert reader.read(1) is None
    for rank in range(1 + SIDES):
        written = DraftRecord(7, rank, [3, 1, 4], [0.5, 0.25, 1.0])
        writer.write(1, rank, written)
        assert reader.read(1, rank) == written
    assert reader.read(0) is None
    writer.write(1, 0, DraftRecord(8, 2, [], []))
    assert reader.read(1) == DraftRecord(8, 2, [], [])
    writer.write(1, 0, DraftRecord(9, 0, list(range(9)), [1.0] * 9))
    assert reader.read(1).ids == list(range(LONGEST))
    assert reader.counts == Counts()
    writer.count(Counts(forwards=3, tokens=5, blocks=2, read=7, seconds=0.25))
    writer.count(Counts(0, 4, 6, 1, 8, 3, 2, 5, 0.5))
    assert reader.counts == (2, 4, 6, 1, 8, 3, 2, 5, 0.5)


def rows_of(count: int, chance: random.Random) -> tuple[bytes, ...]:
    return tuple(chance.randbytes(8 * SPARSE_TOP_K) for _ in range(count))


def test_drawn_tokens_come_with_what_they_were_drawn_from(
    tables: tuple[DraftTable, DraftTable],
) -> None:
    """The rows belong to the last tokens of a line. A line that is too long is cut at its end."""
    writer, reader = tables
    rows = rows_of(9, random.Random(2))
    written = DraftRecord(7, 0, [3, 1, 4], [0.5, 0.25, 1.0], rows[:2])
    writer.write(2, 1, written)
    assert reader.read(2, 1) == written
    writer.write(2, 1, DraftRecord(8, 0, [1, 5, 9], [1.0] * 3))
    assert reader.read(2, 1) == DraftRecord(8, 0, [1, 5, 9], [1.0] * 3)
    writer.write(2, 1, DraftRecord(9, 0, list(range(9)), [1.0] * 9, rows[:8]))
    assert reader.read(2, 1) == DraftRecord(9, 0, list(range(5)), [1.0] * 5, rows[:4])
    writer.write(2, 1, DraftRecord(9, 0, list(range(9)), [1.0] * 9, rows))
    assert reader.read(2, 1) == DraftRecord(9, 0, list(range(4)), [1.0] * 4, rows[:4])


def test_a_writer_that_stops_half_way_is_not_believed(
    tables: tuple[DraftTable, DraftTable],
) -> None:
    """If a record is partly written, in any order, the reader gets the old one, the new or none."""
    writer, reader = tables
    chance = random.Random(1)
    torn = 0
    rows = rows_of(DRAWN, chance)
    for number in range(300):
        old, new = [
            (serial, [chance.randrange(9) for _ in range(chance.randint(0, LONGEST))], drawn)
            for serial, drawn in ((2 * number + 1, rows), (2 * number + 2, rows[::-1]))
        ]
        records = []
        for serial, ids, drawn in (old, new):
            own = drawn[: len(ids) - number % 3] if len(ids) > number % 3 else ()
            writer.write(0, 0, DraftRecord(serial, 0, ids, [0.5] * len(ids), own))
            records.append(writer._records[0, 0].copy())
        places = list(range(len(records[0])))
        chance.shuffle(places)
        writer._records[0, 0] = records[0]
        for place in places[: chance.randrange(len(places))]:
            writer._records[0, 0, place] = records[1][place]
        found = reader.read(0)
        torn += found is None
        assert found is None or (found.serial, found.ids) in (old[:2], new[:2])
        drawn = rows if found and found.serial % 2 else rows[::-1]
        assert found is None or found.rows == drawn[: len(found.rows)]
    assert torn > 100
