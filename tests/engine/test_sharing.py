# SPDX-License-Identifier: Apache-2.0
"""A drafter that several engines share, on a toy model: none notices the others."""

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from toy_drafter import SIZE, VOCAB, ToyDrafterModel

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.source import sharing
from vllm_hetero_spec.engine.source.answers import encode
from vllm_hetero_spec.engine.source.messages import Commit, Row
from vllm_hetero_spec.engine.source.server import RIVALS, DraftingServer
from vllm_hetero_spec.engine.source.sharing import SharedTable, SharingEngine
from vllm_hetero_spec.engine.source.table import Drafted, DraftTable, make_file

SLOTS, LONGEST, SIDES, BUDGET, ROWS = 4, 12, 3, 24, 8


class Engine:
    """One engine, and its own table, to which news are brought."""

    def __init__(self, world: "World") -> None:
        self.world, self.serial = world, 0
        self.number = world.table.join(SLOTS)
        file = make_file(SLOTS, LONGEST, SIDES)
        self.table = DraftTable(file, SLOTS, LONGEST, SIDES)
        self.file = os.fdopen(file, "r+b", buffering=0)

    @property
    def shared(self) -> SharingEngine:
        return self.world.table.engine(self.number)

    def commit(self, *rows: Row, closed: tuple[int, ...] = ()) -> None:
        self.serial += 1
        message = encode(Commit(self.serial, list(closed), list(rows)))
        self.world.server.take(self.shared.commit(message))

    async def hear(self) -> None:
        for start, piece in await self.shared.news():
            self.file.seek(start)
            self.file.write(piece)

    async def drafted(self, slot: int) -> Drafted | None:
        await self.hear()
        return self.table.read(slot)


class World:
    """A drafter with room for so many blocks, and its engines."""

    def __init__(self, engines: int, blocks: int = 256) -> None:
        self.table = SharedTable(LONGEST, SIDES)
        self.model = ToyDrafterModel()
        model: Any = self.model
        drafter = Drafter(model, {0}, VOCAB, 3, ROWS, confidences=True, beside=RIVALS)
        self.pool = KVPool(blocks, SIZE)
        self.server = DraftingServer(drafter, self.pool, self.table, frozenset(), BUDGET, ROWS)
        self.engines = [Engine(self) for _ in range(engines)]

    def work(self) -> None:
        while self.server.busy:
            self.server.advance()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_LONGEST_POLL", 0.01)


def in_a_loop(test: Callable[[], Coroutine]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


@in_a_loop
async def test_each_gets_the_drafts_that_it_would_get_alone() -> None:
    chance = random.Random(5)
    shared, alone = World(3), [World(1) for _ in range(3)]
    texts: list[dict[int, list[int]]] = [{}, {}, {}]
    compared = 0
    for _ in range(40):
        changed = []
        for number in chance.sample(range(3), chance.randint(1, 3)):
            own = texts[number]
            closed = tuple(slot for slot in own if chance.random() < 0.1 or len(own[slot]) > 60)
            for slot in closed:
                del own[slot]
            rows = []
            for slot in chance.sample(range(SLOTS), chance.randint(1, SLOTS)):
                keep = len(own[slot]) if slot in own else -1
                ids = chance.choices(range(1, VOCAB), k=chance.choice((1, 3, 20)))
                own[slot] = [*own.get(slot, []), *ids]
                drafted = chance.choices(range(1, VOCAB), k=chance.randint(0, 3))
                rows.append(Row(slot, keep, ids, drafted, 7, len(drafted), 3, SIDES))
            for engine in (shared.engines[number], alone[number].engines[0]):
                engine.commit(*rows, closed=closed)
            changed.append((number, [row.slot for row in rows]))
        for world in (shared, *alone):
            world.work()
        for number, slots in changed:
            one, other = shared.engines[number], alone[number].engines[0]
            await one.hear()
            await other.hear()
            for slot in slots:
                for rank in range(1 + SIDES):
                    found, single = one.table.read(slot, rank), other.table.read(slot, rank)
                    assert found is not None
                    assert single is not None
                    assert found[:3] == single[:3]
                    assert found.peaks == pytest.approx(single.peaks, abs=1e-5)
                    compared += len(found.ids)
    assert compared > 1000
    for engine in shared.engines:
        engine.commit(closed=tuple(range(SLOTS)))
    assert shared.pool.held == 0


@in_a_loop
async def test_prefixes_are_shared_within_an_engine_and_a_salt_alone() -> None:
    world = World(2)
    first, second = world.engines
    text = random.Random(1).choices(range(1, VOCAB), k=60)

    def read(engine: Engine, slot: int, salt: str | None) -> int:
        before = world.pool.reused_tokens
        engine.commit(Row(slot, -1, text, [], 1, salt=salt))
        world.work()
        return world.pool.reused_tokens - before

    assert read(first, 0, None) == 0
    assert read(first, 1, None) > 0
    assert read(second, 0, None) == 0
    assert read(first, 2, "None") == 0
    assert read(second, 1, "None") == 0
    assert read(second, 2, None) > 0


@in_a_loop
async def test_an_engine_that_is_silent_leaves_its_place() -> None:
    world = World(2)
    for engine in world.engines:
        engine.commit(Row(0, -1, [3, 4, 5], [], 4), Row(1, -1, [6], [], 4))
    world.work()
    held = world.pool.held
    world.engines[0].shared.heard -= 100
    for farewell in world.table.forget(silent=50):
        world.server.take(farewell)
    assert len(world.table) == 1
    assert world.pool.held == held // 2
    with pytest.raises(KeyError):
        _ = world.engines[0].shared
    second = world.engines[1]
    second.commit(Row(0, 3, [7], [], 4))
    world.work()
    found = await second.drafted(0)
    assert found is not None
    assert (found.serial, len(found.ids)) == (2, 4)


@in_a_loop
async def test_an_engine_that_joins_late_is_told_what_was_done_since() -> None:
    """To it the rest would be the work of its first step."""
    world = World(1)
    first = world.engines[0]
    first.commit(Row(0, -1, [3, 4, 5], [], 4))
    world.work()
    late = Engine(world)
    late.commit(Row(0, -1, [6, 7], [], 2))
    world.work()
    await first.hear()
    await late.hear()
    assert late.table.counts[1:3] == (2, 2)
    assert late.table.counts.read == 3
    assert 0 < late.table.counts.seconds < first.table.counts.seconds
    assert first.table.counts[1:3] == (6, 6)
    assert late.table.counts.blocks == first.table.counts.blocks == world.pool.held


@in_a_loop
async def test_no_engine_waits_for_what_another_wants() -> None:
    """One has more lines than a forward takes, and texts that fill it; the other has one line."""
    world = World(2)
    greedy, modest = world.engines
    for slot in range(SLOTS):
        greedy.commit(Row(slot, -1, [3 + slot] * 80, [], 12, 0, 12, SIDES))
    modest.commit(Row(0, -1, [9, 8], [], 6))
    for count in range(1, 7):
        world.server.advance()
        found = await modest.drafted(0)
        assert found is not None
        assert len(found.ids) == count
    world.work()
    found = await greedy.drafted(0)
    assert found is not None
    assert len(found.ids) == 12


@in_a_loop
async def test_kv_is_lent_by_the_engine_that_holds_most() -> None:
    world = World(2, blocks=24)
    greedy, modest = world.engines
    modest.commit(Row(0, -1, [9] * 8, [], 2))
    world.work()
    greedy.commit(*(Row(slot, -1, [3 + slot] * 24, [], 2) for slot in range(SLOTS)))
    world.work()
    fed = world.model.fed
    modest.commit(Row(0, 8, [9], [], 2))
    world.work()
    assert world.model.fed - fed < 8  # nothing was taken from it in the meantime
