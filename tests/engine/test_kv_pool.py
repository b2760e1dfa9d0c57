# SPDX-License-Identifier: Apache-2.0
"""The drafter's block pool, compared with a model of the contents of each block."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable, KVPool

SIZE = 4


def grown(pool: KVPool, tokens: int) -> BlockTable:
    """Return a new sequence with blocks for this many tokens."""
    table, _ = pool.open([1], None)
    assert pool.grow(table, tokens)
    return table


def published(pool: KVPool, ids: list[int]) -> BlockTable:
    """Return a new sequence whose full blocks others find."""
    table = grown(pool, len(ids))
    pool.publish(table, ids, len(ids))
    return table


def test_last_token_is_always_left_to_compute() -> None:
    pool, ids = KVPool(16, SIZE), list(range(8))
    published(pool, ids)
    assert pool.open(ids, None)[1] == 4


def test_rolling_back_into_a_published_block_gives_it_up() -> None:
    pool, ids = KVPool(16, SIZE), list(range(8))
    table = published(pool, ids)
    assert pool.rollback(table, 6) == 4
    assert len(table.blocks) == 1
    # Other requests still find the released block.
    assert pool.open([*ids, 9], None)[1] == 8


def test_suspect_blocks_are_cleaned_once_before_they_are_handed_out() -> None:
    cleaned: list[int] = []
    pool = KVPool(4, SIZE, cleaned.extend)
    table = grown(pool, 2 * SIZE)
    assert cleaned == []
    pool.suspect()
    other = grown(pool, SIZE)
    assert cleaned == other.blocks
    pool.close(table)
    pool.grow(other, 3 * SIZE)
    assert sorted(cleaned) == [1, 2, 3]
    pool.close(other)
    pool.grow(other, 3 * SIZE)
    assert len(cleaned) == 3


def test_blocks_whose_logits_were_not_checked_are_cleaned() -> None:
    """This happens if a request ends during its prefill."""
    cleaned: list[int] = []
    pool = KVPool(6, SIZE, cleaned.extend)
    for sound in (True, False):
        table = grown(pool, 3 * SIZE)
        assert cleaned == []
        blocks, table.sound = sorted(table.blocks), sound
        pool.close(table)
    grown(pool, 5 * SIZE)
    assert cleaned == blocks


def test_no_suspect_block_is_found_by_its_prefix() -> None:
    """A published block is suspect if later logits were not finite, or if none were checked."""
    ids = list(range(3 * SIZE))
    for sound in (True, False):
        cleaned: list[int] = []
        pool = KVPool(8, SIZE, cleaned.extend)
        table = grown(pool, len(ids))
        table.sound = sound
        pool.publish(table, ids, len(ids))
        blocks = sorted(table.blocks)
        if sound:
            pool.suspect()
        pool.close(table)
        assert pool.available == pool.capacity
        other, reused = pool.open([*ids, 9], None)
        assert reused == 0
        pool.grow(other, 7 * SIZE)
        assert set(blocks) <= set(cleaned)


def test_checked_blocks_stay_findable_if_the_last_read_was_not_checked() -> None:
    """The request ends in a round that reads its last tokens and drafts nothing."""
    ids, pool = list(range(3 * SIZE)), KVPool(8, SIZE)
    table = grown(pool, len(ids))
    pool.publish(table, ids, 2 * SIZE)
    table.sound = False
    pool.publish(table, ids, 3 * SIZE)
    pool.close(table)
    assert pool.open([*ids, 9], None)[1] == 2 * SIZE


def test_grow_is_all_or_nothing() -> None:
    pool = KVPool(4, SIZE)
    table, _ = pool.open([1], None)
    assert not pool.grow(table, 4 * SIZE)
    assert table.blocks == []
    assert pool.held == 0
    assert pool.grow(table, 3 * SIZE)
    assert 0 not in table.blocks


def test_a_fork_shares_full_blocks_and_copies_the_last() -> None:
    pool = KVPool(8, SIZE)
    table = grown(pool, 11)
    at_a_boundary, within = pool.fork(table, 8), pool.fork(table, 10)
    assert at_a_boundary is not None
    assert within is not None
    assert at_a_boundary.copy is None
    assert at_a_boundary.table.blocks == within.table.blocks[:2] == table.blocks[:2]
    assert within.copy == (table.blocks[2], within.table.blocks[2])
    assert table.blocks[2] != within.table.blocks[2]
    assert pool.held == 4
    # A sequence does not write to blocks that its fork still reads.
    assert pool.rollback(table, 6) == 4
    assert pool.held == 3
    pool.adopt(table, within.table)
    assert len(table.blocks) == 3
    assert within.table.blocks == []
    assert pool.held == 3


def test_a_fork_without_room_takes_nothing() -> None:
    pool = KVPool(3, SIZE)
    table = grown(pool, 2 * SIZE)
    assert pool.fork(table, 6) is None
    assert pool.held == 2
    assert pool.fork(table, 4) is not None


def test_a_fork_does_not_write_to_a_block_that_others_find() -> None:
    pool, ids = KVPool(8, SIZE), list(range(8))
    table = grown(pool, 8)
    fork = pool.fork(table, 8)
    assert fork is not None
    pool.publish(table, ids, 8)  # the fork's own list of names does not contain it
    pool.close(table)
    assert pool.rollback(fork.table, 5) == 4


class PoolMachine(RuleBasedStateMachine):
    """Sequences share, fork, grow, roll back and end; contents of blocks are simulated."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(12, SIZE)
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> prefix
        self.live: dict[int, tuple] = {}

    def _write(self, table, ids: list[int], start: int) -> None:
        read = {
            block for other, _ in self.live.values() if other is not table for block in other.blocks
        }
        read |= set(self.pool._name_of)
        for position in range(start, len(ids)):
            block = table.blocks[position // SIZE]
            assert block not in read
            # KV at a position depends on all ids before it.
            self.contents[block, position % SIZE] = tuple(ids[: position + 1])

    @rule(
        target=tables, ids=st.lists(st.integers(0, 1), min_size=1, max_size=18), salt=st.booleans()
    )
    def start(self, ids: list[int], salt: bool):
        table, reused = self.pool.open(ids, "s" if salt else None)
        entry = [table, ids[:reused], salt]
        self.live[id(table)] = (table, entry)
        if self.pool.grow(table, len(ids)):
            entry[1] = ids
            self._write(table, ids, reused)
            self.pool.publish(table, ids, len(ids))
        return entry

    @rule(entry=tables, keep=st.integers(0, 20), more=st.lists(st.integers(0, 1), max_size=6))
    def redraft(self, entry, keep: int, more: list[int]) -> None:
        table, ids, _ = entry
        kept = self.pool.rollback(table, min(keep, len(ids)))
        assert kept <= min(keep, len(ids))
        ids = ids[:kept]
        if self.pool.grow(table, kept + len(more)):
            ids = ids + more
            self._write(table, ids, kept)
            self.pool.publish(table, ids, len(ids))
        entry[1] = ids

    @rule(target=tables, entry=tables, keep=st.integers(0, 20))
    def fork(self, entry, keep: int):
        table, ids, salt = entry
        ids = ids[:keep]
        fork = self.pool.fork(table, len(ids))
        if fork is None:
            assert not self.pool.available
            return multiple()
        if fork.copy is not None:
            source, copy = fork.copy
            for offset in range(len(ids) % SIZE):
                self.contents[copy, offset] = self.contents[source, offset]
        forked = [fork.table, ids, salt]
        self.live[id(fork.table)] = (fork.table, forked)
        return forked

    @rule(entry=tables, branch=consumes(tables))
    def adopt(self, entry, branch) -> None:
        if entry is branch:
            self.end(branch)
            return
        self.pool.adopt(entry[0], branch[0])
        entry[1:] = branch[1:]
        assert branch[0].blocks == []
        del self.live[id(branch[0])]

    @rule(entry=consumes(tables))
    def end(self, entry) -> None:
        self.pool.close(entry[0])
        del self.live[id(entry[0])]

    @invariant()
    def every_sequence_reads_its_own_text(self) -> None:
        for table, (_, ids, salt) in self.live.values():
            assert table.row[: len(table.blocks)].tolist() == table.blocks
            for position in range(len(ids)):
                held = self.contents[table.blocks[position // SIZE], position % SIZE]
                assert held == tuple(ids[: position + 1]), (salt, position)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        used = {block for table, _ in self.live.values() for block in table.blocks}
        assert self.pool.held == len(used)
        assert self.pool.held + self.pool.available == self.pool.capacity


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40)
