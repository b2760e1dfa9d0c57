# SPDX-License-Identifier: Apache-2.0
"""The server of the drafter process on a toy model, with requests that begin, change and end."""

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from goodness import MISSED, follows, missed
from tape_graphs import TapeGraphs
from toy_drafter import SIZE, VOCAB, ToyDrafterModel, drafter_of

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K, unpack_rows
from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.ahead.messages import (
    RequestUpdate,
    UpdateBatch,
    encode,
    update_batch_of,
)
from vllm_hetero_spec.engine.ahead.server import RIVALS, DraftingServer
from vllm_hetero_spec.engine.ahead.table import DraftRecord, DraftTable, make_file
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.method import first_token_sampling
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.parallel import make_parallel

SLOTS, LONGEST, BUDGET, SIDES = 6, 12, 24, 4
SHAPE = SLOTS, LONGEST, SIDES, LONGEST
MASK = 0  # of a parallel drafter; it is never drafted

ROWS = 2 * SLOTS
SHAPES = [(size, width) for size in (1, 2, 4, 8, ROWS) for width in (1, 4)]
# Target token that each drafter token proposes, or -1. Some target tokens are proposed by several
# drafter tokens.
TARGETS = 20
PROPOSES = torch.tensor([i % TARGETS if i % 7 else -1 for i in range(VOCAB)])


class World:
    """A server with a pool of `blocks` KV blocks. Its forwards are eager, or recorded as graphs."""

    def __init__(
        self,
        blocks: int = 128,
        ends: frozenset[int] = frozenset(),
        *,
        recorded: bool = False,
        parallel: bool = False,
    ) -> None:
        file = make_file(*SHAPE)
        self.table = DraftTable(file, *SHAPE)
        os.close(file)
        self.model = ToyDrafterModel()
        model: Any = self.model
        sampling = first_token_sampling(TokenMap(PROPOSES, TARGETS), model.device)
        rules: Any = {"sampling": sampling, "confidences": True, "beside": RIVALS}
        drafter = drafter_of(model, 3, ROWS, **rules)
        if parallel:
            make_parallel(drafter, MASK, places=LONGEST)
        if recorded:
            drafter.record(TapeGraphs().capture, SHAPES, GraphSupport(True, several_tokens=True))
        self.pool = KVPool(blocks, SIZE)
        self.server = DraftingServer(drafter, self.pool, self.table, ends, BUDGET, ROWS)
        self.serial = 0

    def commit(self, *rows: RequestUpdate, closed: tuple[int, ...] = ()) -> None:
        self.serial += 1
        self.server.take(
            update_batch_of(encode(UpdateBatch(self.serial, list(closed), list(rows))))
        )

    def work(self) -> int:
        """Run forwards until no work is left. Return their number."""
        count = 0
        while self.server.busy:
            self.server.advance()
            count += 1
            assert count < 200
        return count

    def drafted(self, slot: int) -> DraftRecord:
        found = self.table.read(slot)
        assert found is not None
        return found


@pytest.fixture
def world() -> World:
    return World()


def alone(text: list[int], count: int, *, parallel: bool = False) -> list[int]:
    """Return the draft after a text of a server that has no other request."""
    world = World(parallel=parallel)
    world.commit(RequestUpdate(0, -1, text, [], count))
    world.work()
    return world.drafted(0).ids


def test_each_forward_adds_a_token_to_every_text(world: World) -> None:
    world.commit(RequestUpdate(0, -1, [3, 4, 5], [], 4), RequestUpdate(1, -1, [6, 7], [8], 6))
    for count in range(1, 5):
        world.server.advance()
        assert len(world.drafted(0).ids) == len(world.drafted(1).ids) == count
    assert world.work() == 1  # for the second request: its `drafted` id counts as one of the six
    assert world.drafted(0).serial == world.drafted(1).serial == 1
    assert world.drafted(0).ids == alone([3, 4, 5], 4)
    assert world.drafted(1).ids == alone([6, 7, 8], 5)
    assert len(world.drafted(0).peaks) == 4


def test_a_text_that_goes_the_foreseen_way_costs_the_new_tokens_alone(world: World) -> None:
    world.commit(RequestUpdate(0, -1, [3, 4, 5], [], 4))
    world.work()
    ahead = world.drafted(0).ids
    fed = world.model.fed
    # Two draft tokens were accepted. The target verifies the rest.
    world.commit(RequestUpdate(0, 3, ahead[:2], ahead[2:], 6))
    assert world.work() == 4
    assert world.model.fed - fed == 4
    assert world.drafted(0) == DraftRecord(
        2, len(ahead[2:]), alone([3, 4, 5, *ahead], 4), world.drafted(0).peaks
    )


def test_a_guess_that_comes_true_costs_the_new_tokens_alone(world: World) -> None:
    """The branch's KV replaces that of the chain. KV blocks of all other tokens are freed."""
    world.commit(RequestUpdate(0, -1, [3, 4, 5], [], 4))
    world.work()
    ahead = world.drafted(0).ids
    world.commit(RequestUpdate(0, 3, [ahead[0]], ahead[1:], 9, at_stake=2, beside=4, guesses=SIDES))
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
    world.commit(RequestUpdate(0, 4, text[4:], likeliest.ids[2:], 4, at_stake=2))
    assert world.work() == 2
    assert world.model.fed - fed == 2
    assert world.drafted(0).ids == alone([*text, *likeliest.ids[2:]], 2)
    world.commit(closed=(0,))
    assert world.pool.held == 0


def test_a_parallel_drafter_writes_chains_in_one_forward_and_branches_in_another() -> None:
    """Branches need the guesses of the chain. Each reads its own tokens anew, behind the text."""
    world = World(parallel=True)
    texts = [3, 4, 5], [6, 7, 8, 9, 6, 7]
    world.commit(*(RequestUpdate(slot, -1, text, [], 6) for slot, text in enumerate(texts)))
    assert world.work() == 1
    for slot, text in enumerate(texts):
        assert world.drafted(slot).ids == alone(text, 6, parallel=True)
        assert len(world.drafted(slot).peaks) == 6
    ahead, fed = world.drafted(0).ids, world.model.fed
    told = RequestUpdate(0, 3, ahead[:1], ahead[1:4], 8, at_stake=2, beside=4, guesses=SIDES)
    world.commit(told)
    assert world.work() == 1
    assert world.model.fed - fed < 4 + 8 + SIDES * (3 + 4)
    whole = [3, 4, 5, *ahead[:4]]
    assert world.drafted(0).ids == alone(whole, 5, parallel=True)
    for rank in range(1, 1 + SIDES):
        side = world.table.read(0, rank)
        assert side is not None
        text = [*whole[: 4 + side.place], side.ids[0]]
        assert side.ids[1:] == alone(text, 3, parallel=True)
    likeliest = world.table.read(0, 1)
    assert likeliest is not None
    text = [*whole[: 4 + likeliest.place], likeliest.ids[0]]
    world.commit(RequestUpdate(0, 4, text[4:], [], 4, at_stake=2))
    world.work()
    assert world.drafted(0).ids == alone(text, 4, parallel=True)
    world.commit(closed=(0, 1))
    assert world.pool.held == 0


def test_what_was_drafted_while_a_commit_was_on_its_way_is_kept(world: World) -> None:
    """The update contains only the drafted tokens that the engine has read before."""
    told = alone([3, 4, 5], 9)
    world.commit(RequestUpdate(0, -1, [3, 4, 5], [], 8))
    for _ in range(4):
        world.server.advance()
    world.commit(RequestUpdate(0, 3, told[:1], told[1:3], 8, at_stake=2, beside=3, guesses=SIDES))
    assert world.drafted(0)[:3] == (2, 2, told[3:4])
    assert all(world.table.read(0, rank).serial == 2 for rank in range(1, 1 + SIDES))
    fed = world.model.fed
    assert world.work() == 5  # six more ids are needed, and one is there
    assert world.model.fed - fed < 5 + 2 * SIDES + 1
    assert world.drafted(0).ids == told[3:9]
    world.commit(RequestUpdate(0, 4, told[1:4], [], 2))
    assert world.drafted(0)[:3] == (3, 0, told[4:6])  # two ids, because two are wanted
    world.commit(RequestUpdate(0, 7, [1 + told[4] % (VOCAB - 1)], [], 2))
    world.work()
    assert world.drafted(0).ids != told[5:7]


def test_an_end_that_came_while_a_commit_was_on_its_way_is_one() -> None:
    told = alone([3, 4, 5], 3)
    world = World(ends=frozenset({told[2]}))
    world.commit(RequestUpdate(0, -1, [3, 4, 5], [], 8))
    world.work()
    world.commit(RequestUpdate(0, 3, told[:1], told[1:2], 8))
    world.work()
    assert world.drafted(0).ids == told[2:3]


@pytest.mark.parametrize("recorded", [pytest.param(False, marks=pytest.mark.full), True])
def test_random_texts_are_drafted_as_if_each_were_alone(recorded: bool) -> None:
    """This holds with graphs and with eager forwards. The server of `alone` is always eager."""
    chance = random.Random(3)
    world = World(recorded=recorded)
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
                RequestUpdate(
                    slot, keep, ids, drafted, chance.randint(0, 8), at_stake, beside, SIDES
                )
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


def test_the_engine_is_told_what_was_read_reused_and_replayed() -> None:
    """Catch-up counts each token of a text once. Drafted tokens do not count as catch-up."""
    world, text = World(recorded=True), [3] * 60
    world.commit(RequestUpdate(0, -1, text, [], 4))
    world.work()
    counts = world.table.counts
    assert (counts.caught_up, counts.reused) == (60, 0)
    assert 0 < counts.replays <= counts.forwards
    ahead = world.drafted(0).ids
    world.commit(RequestUpdate(0, 60, [*ahead[:2], 1 + ahead[2] % (VOCAB - 1)], [], 4))
    world.commit(RequestUpdate(1, -1, text, [], 4))
    world.work()
    counts = world.table.counts
    assert counts.reused == 28
    assert counts.caught_up == 60 + 1 + 60 - 28


def test_prefixes_are_shared_within_a_salt_alone(world: World) -> None:
    text = random.Random(1).choices(range(1, VOCAB), k=60)

    def reused(slot: int, salt: str | None) -> bool:
        before = world.pool.reused_tokens
        world.commit(RequestUpdate(slot, -1, text, [], 1, salt=salt))
        world.work()
        return world.pool.reused_tokens > before

    assert not reused(0, None)
    assert reused(1, None)
    assert not reused(2, "None")
    assert reused(3, "None")


def test_nothing_is_drafted_behind_an_end() -> None:
    first, second, third = alone([3, 4, 5], 3)
    assert third not in (first, second)
    world = World(ends=frozenset({second}))
    world.commit(RequestUpdate(0, -1, [3, 4, 5], [], 6))
    world.work()
    assert world.drafted(0).ids == [first, second]


def test_a_full_pool_leaves_texts_out_and_takes_them_up_again() -> None:
    """Requests with work take KV blocks from those without. A text without blocks is read again."""
    world = World(blocks=8)  # seven are usable, for 28 tokens
    world.commit(RequestUpdate(0, -1, [3] * 10, [], 2))
    world.work()
    world.commit(RequestUpdate(1, -1, [4] * 18, [], 2))
    world.work()
    assert world.drafted(1).ids == alone([4] * 18, 2)  # with the KV blocks of the first request
    world.commit(RequestUpdate(2, -1, [5] * 60, [], 2))
    world.work()
    found = world.table.read(2)
    assert found is None or found.serial != world.serial  # its text does not fit into the pool
    world.commit(RequestUpdate(0, 10, [6], [], 2))
    world.work()
    assert world.drafted(0).ids == alone([3] * 10 + [6], 2)
    world.commit(closed=(0, 1, 2))
    assert world.pool.held == 0


def rows_of(drafted: DraftRecord) -> torch.Tensor:
    """Return the `draft_probs` [sampled tokens, TARGETS] of a line."""
    ints = torch.frombuffer(bytearray(b"".join(drafted.rows)), dtype=torch.int32)
    return unpack_rows(ints.view(-1, 2, SPARSE_TOP_K), TARGETS)


def lines_of(
    world: World, text: Sequence[int], draw: DraftSampling, wanted: int = 5
) -> list[DraftRecord]:
    """Return the sampled chain and branches after a text that is new to the server."""
    told = [*text[:-1]], [text[-1]]
    world.commit(RequestUpdate(0, -1, *told, 1 + wanted, 1, 3, SIDES, draw=draw), closed=(0,))
    world.work()
    found = [world.table.read(0, rank) for rank in range(1 + SIDES)]
    return [of for of in found if of is not None and of.serial == world.serial]


@pytest.mark.parametrize("recorded", [False, True])
def test_drawn_tokens_come_with_the_rows_they_were_drawn_from(recorded: bool) -> None:
    """This also holds for branches, which continue in a fork of the chain's KV."""
    world = World(recorded=recorded)
    draw = DraftSampling(0.7, top_k=9, seed=3, place=2)
    lines = lines_of(world, [3, 4, 5], draw)
    assert len(lines) == 1 + SIDES
    assert [len(of.ids) - len(of.rows) for of in lines] == [0, *[1] * SIDES]
    for of in lines:
        text = [3, 4, 5, *lines[0].ids[: of.place - 1]] if of is not lines[0] else [3, 4, 5]
        if of.place == 0:
            text = [3, 4]
        certain = len(of.ids) - len(of.rows)
        rows = rows_of(of)
        assert ((rows.sum(1) - 1).abs() < 1e-6).all()
        for count, (row, drawn) in enumerate(zip(rows, of.ids[certain:], strict=True), certain):
            other = World()
            again = lines_of(
                other, [*text, *of.ids[:count]], DraftSampling(0.7, 9, seed=8), wanted=1
            )[0]
            assert (rows_of(again)[0] - row).abs().max() < 1e-6
            assert row[PROPOSES[drawn]] > 0


@pytest.mark.full
def test_the_law_of_what_is_drawn_is_its_row() -> None:
    """Also for branches, whose law does not depend on the chain's sampled tokens."""
    world, samples = World(), 1500
    drawn = Counter[int]()
    beside: dict[tuple[int, int], tuple[Counter[int], dict]] = {}
    for seed in range(samples):
        chain, side = lines_of(world, [3, 4, 5], DraftSampling(1.0, seed=seed), wanted=1)[:2]
        drawn[int(PROPOSES[chain.ids[0]])] += 1
        if side.place == 1:  # the branch leaves the chain at its first sampled token
            law = dict(enumerate(rows_of(side)[0].tolist()))
            counts, _ = beside.setdefault((chain.ids[0], side.ids[0]), (Counter(), law))
            counts[int(PROPOSES[side.ids[1]])] += 1
    law = dict(enumerate(rows_of(chain)[0].tolist()))
    assert follows(drawn, law)
    assert missed(law, dict.fromkeys(law, 1 / TARGETS), samples) < MISSED
    counts, law = max(beside.values(), key=lambda of: of[0].total())
    assert counts.total() > samples // 10
    assert follows(counts, law)


def test_what_is_drawn_follows_from_seed_place_and_line(world: World) -> None:
    """Other requests and their timing do not matter. Another seed or place gives other tokens."""
    draw = DraftSampling(1.0, seed=11, place=4)
    lines = lines_of(world, [3, 4, 5], draw)
    for other in (DraftSampling(1.0, seed=12, place=4), DraftSampling(1.0, seed=11, place=5)):
        assert lines_of(world, [3, 4, 5], other)[0].ids != lines[0].ids
    world.commit(
        RequestUpdate(1, -1, [7] * 9, [], 8),
        RequestUpdate(2, -1, [6] * 9, [], 8, draw=DraftSampling(1.3)),
    )
    world.server.advance()
    again = lines_of(world, [3, 4, 5], draw)
    assert [of.ids for of in again] == [of.ids for of in lines]
    # The first tokens are now in `drafted`. The others must be the same as before.
    ahead = lines[0].ids
    world.commit(RequestUpdate(0, 2, [], [5, *ahead[:2]], 6, draw=draw))
    world.work()
    assert world.drafted(0).ids == ahead[2:]
