# SPDX-License-Identifier: Apache-2.0
"""The drafter process's own work, on a toy model: texts that come, change, go, and are many."""

import os
import random
from typing import Any

import pytest
from toy_drafter import SIZE, VOCAB, ToyDrafterModel

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.source.messages import Commit, Row, commit_of, encode
from vllm_hetero_spec.engine.source.server import RIVALS, DraftingServer
from vllm_hetero_spec.engine.source.table import Drafted, DraftTable, make_file

SLOTS, LONGEST, BUDGET, SIDES = 6, 12, 24, 4

ROWS = 2 * SLOTS


class World:
    """A server with room for so many blocks."""

    def __init__(self, blocks: int = 128, ends: frozenset[int] = frozenset()) -> None:
        file = make_file(SLOTS, LONGEST, SIDES)
        self.table = DraftTable(file, SLOTS, LONGEST, SIDES)
        os.close(file)
        self.model = ToyDrafterModel()
        model: Any = self.model
        drafter = Drafter(model, {0}, VOCAB, 3, ROWS, confidences=True, beside=RIVALS)
        self.pool = KVPool(blocks, SIZE)
        self.server = DraftingServer(drafter, self.pool, self.table, ends, BUDGET, ROWS)
        self.serial = 0

    def commit(self, *rows: Row, closed: tuple[int, ...] = ()) -> None:
        self.serial += 1
        self.server.take(commit_of(encode(Commit(self.serial, list(closed), list(rows)))))

    def work(self) -> int:
        """Forwards until there is nothing to do."""
        count = 0
        while self.server.busy:
            self.server.advance()
            count += 1
            assert count < 200
        return count

    def drafted(self, slot: int) -> Drafted:
        found = self.table.read(slot)
        assert found is not None
        return found


@pytest.fixture
def world() -> World:
    return World()


def alone(text: list[int], count: int) -> list[int]:
    """What a drafter that has nothing else to do writes behind a text."""
    world = World()
    world.commit(Row(0, -1, text, [], count))
    world.work()
    return world.drafted(0).ids


def test_each_forward_adds_a_token_to_every_text(world: World) -> None:
    world.commit(Row(0, -1, [3, 4, 5], [], 4), Row(1, -1, [6, 7], [8], 6))
    for count in range(1, 5):
        world.server.advance()
        assert len(world.drafted(0).ids) == len(world.drafted(1).ids) == count
    assert world.work() == 1  # of the second alone: what is taken to come is part of what is wanted
    assert world.drafted(0).serial == world.drafted(1).serial == 1
    assert world.drafted(0).ids == alone([3, 4, 5], 4)
    assert world.drafted(1).ids == alone([6, 7, 8], 5)
    assert len(world.drafted(0).peaks) == 4


def test_a_text_that_goes_the_foreseen_way_costs_the_new_tokens_alone(world: World) -> None:
    world.commit(Row(0, -1, [3, 4, 5], [], 4))
    world.work()
    ahead = world.drafted(0).ids
    fed = world.model.fed
    # Two of them were accepted; the rest is on its way to the target.
    world.commit(Row(0, 3, ahead[:2], ahead[2:], 6))
    assert world.work() == 4
    assert world.model.fed - fed == 4
    assert world.drafted(0) == Drafted(
        2, len(ahead[2:]), alone([3, 4, 5, *ahead], 4), world.drafted(0).peaks
    )


def test_a_guess_that_comes_true_costs_the_new_tokens_alone(world: World) -> None:
    """Its KV takes the place of the chain's, whose own tokens are given back with the others'."""
    world.commit(Row(0, -1, [3, 4, 5], [], 4))
    world.work()
    ahead = world.drafted(0).ids
    world.commit(Row(0, 3, [ahead[0]], ahead[1:], 9, at_stake=2, beside=4, guesses=SIDES))
    world.work()
    for rank in range(1, 1 + SIDES):
        side = world.table.read(0, rank)
        assert side is not None
        before = [3, 4, *[5, *ahead][: 2 + side.place]]
        assert side.ids == [side.ids[0], *alone([*before, side.ids[0]], 3)]
    likeliest = world.table.read(0, 1)
    assert likeliest is not None
    text = [3, 4, 5, *ahead[: 1 + likeliest.place], *likeliest.ids[:2]]
    fed = world.model.fed
    world.commit(Row(0, 4, text[4:], likeliest.ids[2:], 4, at_stake=2))
    assert world.work() == 2
    assert world.model.fed - fed == 2
    assert world.drafted(0).ids == alone([*text, *likeliest.ids[2:]], 2)
    world.commit(closed=(0,))
    assert world.pool.held == 0


def test_random_texts_are_drafted_as_if_each_were_alone() -> None:
    chance = random.Random(3)
    world = World()
    texts: dict[int, list[int]] = {}
    checked = beside_checked = 0
    drafted_of: dict[int, list[int]] = {}
    for _ in range(120):
        rows = []
        closed = [slot for slot in texts if chance.random() < 0.1 or len(texts[slot]) > 90]
        for slot in closed:
            del texts[slot]
        for slot in chance.sample(range(SLOTS), chance.randint(1, SLOTS)):
            old = texts.get(slot)
            if old is None:
                keep, ids = -1, chance.choices(range(1, VOCAB), k=chance.choice((1, 5, 40)))
                texts[slot] = ids
            else:
                keep = max(0, len(old) - chance.choice((0, 0, 1, 3)))
                found = world.table.read(slot)
                found = chance.choice([world.table.read(slot, n) for n in range(1 + SIDES)])
                ids = found.ids if found and chance.random() < 0.7 else []
                if found and found.place and ids and chance.random() < 0.7:
                    chain = world.table.read(slot)
                    new = chain.ids if chain is not None else []
                    ids = [*drafted_of[slot], *new][: found.place] + ids
                ids = ids[: chance.randint(1, 6)]
                ids = ids or chance.choices(range(1, VOCAB), k=2)
                texts[slot] = [*old[:keep], *ids]
            drafted = chance.choices(range(1, VOCAB), k=chance.randint(0, 3))
            drafted_of[slot] = drafted
            at_stake, beside = chance.randint(0, len(drafted)), chance.choice((0, 3))
            rows.append(
                Row(slot, keep, ids, drafted, chance.randint(0, 8), at_stake, beside, SIDES)
            )
        world.commit(*rows, closed=tuple(closed))
        if chance.random() < 0.5:
            for _ in range(chance.randint(0, 3)):
                world.server.advance()
            continue
        world.work()
        for row in rows:
            wanted = row.wanted - len(row.drafted)
            if wanted > 0:
                found = world.drafted(row.slot)
                assert found.serial == world.serial
                assert found.ids == alone([*texts[row.slot], *row.drafted], wanted)
                checked += 1
            found = world.table.read(row.slot)
            new = found.ids if found is not None and found.serial == world.serial else []
            chain = [*row.drafted, *new]
            for rank in range(1, 1 + SIDES):
                side = world.table.read(row.slot, rank)
                if side is None or side.serial != world.serial:
                    continue
                before = [*texts[row.slot], *chain[: side.place]]
                assert side.place <= row.at_stake
                assert side.ids[0] != chain[side.place]
                assert side.ids == [side.ids[0], *alone([*before, side.ids[0]], row.beside - 1)]
                beside_checked += 1
    assert checked > 60
    assert beside_checked > 40
    world.commit(closed=tuple(range(SLOTS)))
    assert world.pool.held == 0


def test_nothing_is_drafted_behind_an_end() -> None:
    first, second, third = alone([3, 4, 5], 3)
    assert third not in (first, second)
    world = World(ends=frozenset({second}))
    world.commit(Row(0, -1, [3, 4, 5], [], 6))
    world.work()
    assert world.drafted(0).ids == [first, second]


def test_a_full_pool_leaves_texts_out_and_takes_them_up_again() -> None:
    """Blocks go to those that work, from those that do not; a text that had none is read afresh."""
    world = World(blocks=8)  # seven of them, for 28 tokens
    world.commit(Row(0, -1, [3] * 10, [], 2))
    world.work()
    world.commit(Row(1, -1, [4] * 18, [], 2))
    world.work()
    assert world.drafted(1).ids == alone([4] * 18, 2)  # the first has given its blocks up
    world.commit(Row(2, -1, [5] * 60, [], 2))
    world.work()
    found = world.table.read(2)
    assert found is None or found.serial != world.serial  # no room at all
    world.commit(Row(0, 10, [6], [], 2))
    world.work()
    assert world.drafted(0).ids == alone([3] * 10 + [6], 2)
    world.commit(closed=(0, 1, 2))
    assert world.pool.held == 0
