# SPDX-License-Identifier: Apache-2.0
"""Drafts in shared memory: what is half written is not believed."""

import os
import random

import pytest

from vllm_hetero_spec.engine.source.table import Drafted, DraftTable, make_file

SLOTS, LONGEST, SIDES = 3, 5, 2


@pytest.fixture
def tables() -> tuple[DraftTable, DraftTable]:
    file = make_file(SLOTS, LONGEST, SIDES)
    assert os.fstat(file).st_mode & 0o777 == 0o600
    assert os.fstat(file).st_nlink == 0
    both = DraftTable(file, SLOTS, LONGEST, SIDES), DraftTable(file, SLOTS, LONGEST, SIDES)
    os.close(file)
    return both


def test_what_one_writes_the_other_reads(tables: tuple[DraftTable, DraftTable]) -> None:
    writer, reader = tables
    assert reader.read(1) is None
    for rank in range(1 + SIDES):
        written = Drafted(7, rank, [3, 1, 4], [0.5, 0.25, 1.0])
        writer.write(1, rank, written)
        assert reader.read(1, rank) == written
    assert reader.read(0) is None
    writer.write(1, 0, Drafted(8, 2, [], []))
    assert reader.read(1) == Drafted(8, 2, [], [])
    writer.write(1, 0, Drafted(9, 0, list(range(9)), [1.0] * 9))
    assert reader.read(1).ids == list(range(LONGEST))
    assert reader.counts == (0, 0, 0, 0, 0, 0.0)
    writer.count(forwards=3, tokens=5, blocks=2, read=7, seconds=0.25)
    writer.count(forwards=4, tokens=6, blocks=1, read=8, seconds=0.5)
    assert reader.counts == (2, 4, 6, 1, 8, 0.5)


def test_a_writer_that_stops_half_way_is_not_believed(
    tables: tuple[DraftTable, DraftTable],
) -> None:
    """Whatever part of a record has come, in whatever order: the old one, the new one or none."""
    writer, reader = tables
    chance = random.Random(1)
    torn = 0
    for number in range(300):
        old, new = [
            (serial, [chance.randrange(9) for _ in range(chance.randint(0, LONGEST))])
            for serial in (2 * number + 1, 2 * number + 2)
        ]
        records = []
        for serial, ids in (old, new):
            writer.write(0, 0, Drafted(serial, 0, ids, [0.5] * len(ids)))
            records.append(writer._records[0, 0].copy())
        places = list(range(len(records[0])))
        chance.shuffle(places)
        writer._records[0, 0] = records[0]
        for place in places[: chance.randrange(len(places))]:
            writer._records[0, 0, place] = records[1][place]
        found = reader.read(0)
        torn += found is None
        assert found is None or (found.serial, found.ids) in (old, new)
    assert torn > 100
