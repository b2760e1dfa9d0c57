# SPDX-License-Identifier: Apache-2.0
"""The drafter's KV and drafts equal those that are computed anew from the ids of each text.

Requests start, end, pause, change their texts and share prefixes at random. The target accepts any
part of a draft, pools are small, and texts exceed the drafter's context. After each round the test
checks all KV of each request and each token that the toy drafter chose.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tape_graphs import TapeGraphs
from toy_drafter import BLOCKS, SIZE, VOCAB, ToyDrafterModel, drafter_of
from toys import toy

from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.draft.sampling import DraftSampling, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter.draft_batch import DraftBatchRunner
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.parallel import make_parallel
from vllm_hetero_spec.engine.drafter.requests import Requests
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.engine.drafter.token_healing import TokenHealing
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.engine.trees.forks import TreeBranches
from vllm_hetero_spec.text.bridge import make_bridge

LOOKAHEAD, REQUESTS, LENGTH = 3, 8, 96
MASK = VOCAB - 1  # of a parallel drafter; no token of its tokenizer
BYTES = [bytes([byte]) for byte in "ab c\u00e9".encode()]
TARGET = toy([*BYTES, b"ab", b" a", "\u00e9".encode(), b"aba", b" ab", b"ca", b"c ", b""], eos=13)
DRAFTER = toy(
    [*BYTES, b"ba", b"aa", b" b", b"bab", b"aab", b" ba", "\u00e9".encode(), b"cc", b" c", b""],
    eos=15,
)


class ToyOfTexts(ToyDrafterModel):
    """A toy drafter that can also compute KV and logits from the ids of a text alone."""

    @lru_cache(1 << 14)  # noqa: B019
    def anew(self, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KV [layers, 2, n, width] of a text, and logits [n, V] after each of its tokens."""
        hidden = self.embedding[list(ids)] + self.places[: len(ids)]
        seen = torch.ones(len(ids), len(ids)).tril().bool()
        kv = []
        for q, k, v, out in self.layers:
            keys, values = hidden @ k, hidden @ v
            kv.append(torch.stack([keys, values]))
            share = (hidden @ q @ keys.T).masked_fill(~seen, -torch.inf).softmax(-1)
            hidden = (hidden + share @ values @ out).tanh()
        return torch.stack(kv), hidden @ self.head


class World:
    """A drafter, its requests, and a target that generates random tokens."""

    def __init__(
        self, seed: int, *, graphs: bool, sampled: bool, beside: int, parallel: bool = False
    ) -> None:
        self.chance = chance = random.Random(seed)
        self.model = ToyOfTexts(LENGTH)
        first = [(TARGET.encode_bytes(data) or [13])[0] for data in DRAFTER.token_bytes]
        ids = torch.tensor([*first, *[13] * (VOCAB - len(first))])
        tokens = TokenMap(ids[: DRAFTER.vocab_size], TARGET.vocab_size)
        lengths = torch.ones(DRAFTER.vocab_size).long()
        method = SampledMethod(tokens, lengths, lambda d: ids[d : d + 1].tolist())
        self.bridge = make_bridge(TARGET, DRAFTER, mode="text")
        self.drafter = drafter_of(
            self.model,
            LOOKAHEAD,
            REQUESTS * (3 if beside else 1),
            banned=self.bridge.banned,
            vocab_size=DRAFTER.vocab_size,
            sampling=method if sampled else None,
            ends=self.bridge.drafter_eos,
            confidences=True,
            beside=beside,
            back=True,
        )
        if parallel:
            make_parallel(self.drafter, MASK, places=6)
        if graphs:
            shapes = [(size, width) for size in (1, 4, 8) for width in (1, 4, 8)]
            support = GraphSupport(chance.random() < 0.5, several_tokens=True)
            self.drafter.record(TapeGraphs().capture, shapes, support)
            self.drafter.waits = True
            self.drafter.may_wait = chance.random() < 0.5
        self.pool = KVPool(BLOCKS if seed % 2 else chance.choice((12, 25, 40)), SIZE)
        self.stats = DraftStats()
        budget = chance.choice((9, 40, 400))
        self.healing = TokenHealing(self.drafter, self.bridge)
        self.drafter.extensions.append(self.healing)
        self.may_heal = set[str]()  # requests of a round
        chances: Any = None  # no tree is raced
        self.trees = TreeBranches(self.drafter, self.pool, self.bridge, self.stats, chances)
        if beside:
            self.drafter.extensions.append(self.trees)
        self.rounds = DraftBatchRunner(self.bridge, self.drafter, self.pool, self.stats, budget)
        longest = LENGTH - self.drafter.most_steps
        self.requests = Requests(self.bridge, self.pool, self.stats, longest)
        self.sampled, self.beside = sampled, beside
        self.texts: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.salts: dict[str, str | None] = {}
        self.started: dict[str, str | None] = {}
        self.drafts: dict[str, list[int]] = {}
        self.number = 0
        self.seen = Counter[str]()
        self.run: list[tuple[Sequence[DraftRow], list[list[int]]]] = []
        self._watch()

    def _watch(self) -> None:
        """Record the rows of each call of the decode loop, and check its drafts."""
        begin, finish = self.drafter.begin, self.drafter.finish

        def begun(rows: Sequence[DraftRow], control: Any = None) -> None:
            before = [[*row.sequence.kv_ids, *row.pending] for row in rows]
            self.run.append((rows, before))
            self.may_heal = set(self.healing.choosers)
            begin(rows, control)

        def finished() -> list[DrafterTokens]:
            drafted = finish()
            rows, before = self.run[-1]
            for row, text, tokens in zip(rows, before, drafted, strict=True):
                self.check(row, text, tokens)
            return drafted

        self.drafter.begin = begun  # type: ignore[method-assign]
        self.drafter.finish = finished  # type: ignore[method-assign]

    def check(self, row: DraftRow, text: list[int], tokens: DrafterTokens) -> None:
        """Check the draft of one row."""
        state = row.task.state
        known = len(state.context.ids) - (state.req_id not in self.may_heal)
        assert text[:known] == state.context.ids[:known] or not row.steps
        if not row.steps or not tokens.finite:
            assert row.sequence.kv_ids[: len(text)] == text[: len(row.sequence.kv_ids)]
            return
        base = text[:-1] if tokens.known else text
        drafted = tokens.tokens
        assert 0 < len(drafted) <= row.steps
        parallel = self.drafter.parallel
        assert row.sequence.kv_ids == ([*base] if parallel else [*base, *drafted[:-1]])
        self.seen["drafts"] += 1
        self.seen["in the place of the last"] += bool(tokens.known)
        self.seen["rounds that go on"] += text != state.context.ids
        if row.task.penalty is not None or tokens.proposal is not None:
            self.seen["own picks"] += 1
            return
        if parallel:
            best = self.best((*text, *[MASK] * (row.steps - 1)))
            assert drafted[1:] == best[len(text) :]
            self.forks_share_the_chain(state.req_id, drafted)
            return
        self.greedy(base, drafted, 1)
        trees = self.trees._found if text == state.context.ids else {}  # first round only
        for fork in trees[state.req_id].forks if state.req_id in trees else ():
            self.seen["forks"] += 1
            assert fork.tokens[: fork.leaves] == drafted[: fork.leaves]
            self.greedy(base, fork.tokens, fork.leaves + 1)

    def forks_share_the_chain(self, req_id: str, drafted: list[int]) -> None:
        """Check the forks of a parallel draft: each has one other token."""
        found = self.trees._found.get(req_id)
        for fork in found.forks if found is not None else ():
            self.seen["forks"] += 1
            other = [*drafted]
            other[fork.leaves] = fork.beside.tokens[fork.leaves, 1]
            assert fork.tokens == other != drafted

    def greedy(self, base: list[int], drafted: list[int], first: int) -> None:
        best = self.best((*base, *drafted))
        assert drafted[first:] == best[len(base) + first - 1 : -1]

    def best(self, ids: tuple[int, ...]) -> list[int]:
        """Return the likeliest token after each one of a text, computed anew."""
        _, logits = self.model.anew(ids)
        rows = logits[:, : DRAFTER.vocab_size].clone()
        rows[:, sorted(self.bridge.banned)] = -torch.inf
        return rows.argmax(-1).tolist()

    def check_kv(self) -> None:
        """Check all KV of the requests and the block counts of the pool."""
        refs = Counter[int]()
        for state in self.requests._states.values():
            if state.sequence is None:
                continue
            table, ids = state.sequence.table, state.sequence.kv_ids
            refs.update(table.blocks)
            assert table.row[: len(table.blocks)].tolist() == table.blocks
            assert ids[: state.num_kv_valid] == state.context.ids[: state.num_kv_valid]
            if not ids:
                continue
            places = np.arange(len(ids))
            slots = np.array(table.blocks)[places // SIZE] * SIZE + places % SIZE
            kept = self.model.cache[:, :, slots]
            anew, _ = self.model.anew(tuple(ids))
            assert torch.allclose(kept, anew, atol=1e-9), state.req_id
            self.seen["texts"] += 1
        assert refs == {block: n for block, n in enumerate(self.pool._refs) if n}
        self._check_findable()
        free, cached = set(self.pool._free), set(self.pool._cached)
        assert not free & cached
        assert not (free | cached) & refs.keys()
        assert len(free) + len(cached) + len(refs) == self.pool.capacity

    def _check_findable(self) -> None:
        """Check that a block that is found by a text contains the KV of that text."""
        named = {uid: self.pool._name_of[block] for block, uid in self.pool._uid_of.items()}
        for name, block in self.pool._by_name.items():
            parent, ids = name
            while parent in named:
                parent, before = named[cast(int, parent)]
                ids = before + ids
            if isinstance(parent, tuple):  # otherwise a block before it was evicted
                kept = self.model.cache[:, :, block * SIZE : (block + 1) * SIZE]
                assert torch.allclose(kept, self.model.anew(ids)[0][:, :, -SIZE:], atol=1e-9)

    def step(self) -> None:
        """Run a step of the target and the drafting round after it."""
        chance = self.chance
        self._come_and_go()
        batch = chance.sample(sorted(self.texts), chance.randint(1, len(self.texts)))
        views, number = [], self.number
        for name in batch:
            text, before = self.texts[name], len(self.texts[name])
            if chance.random() < 0.95:
                draft = self.drafts.get(name, [])
                text += draft[: chance.randint(0, len(draft))]
                text += chance.choices(range(TARGET.vocab_size - 1), k=1)
            if chance.random() < 0.02:  # a request continues with another text
                text[len(text) // 2] = chance.randrange(TARGET.vocab_size - 1)
                del text[-3:-1]
                before = len(text)
            prompt = min(self.prompts[name], len(text))
            random_one = self.sampled and chance.random() < 0.5
            params = RequestParams(number, float(random_one))
            ids = np.array(text, np.int64)
            views.append(RequestView(name, params, ids, prompt, text[before:]))
        step = StepView(views, self.started, set(self.texts), LOOKAHEAD, 10**6, len(views))
        self.started = {}
        self.requests.forget(step)
        tasks = self._tasks(step)
        control = SimpleNamespace(
            can_stop_early=not self.drafter.waits and chance.random() < 0.3,
            continue_drafting=lambda _: chance.random() < 0.7,
            drafted=lambda *_: None,
        )
        self.rounds.begin(tasks, self.requests.outside(step), cast(Any, control))
        drafts = {draft.req_id: draft for draft in self.rounds.finish()}
        self.drafts |= {name: [] for name in batch}
        for name, draft in drafts.items():
            path = draft.tokens
            self.drafts[name] = list(path) if draft.rows is None else list(path[:1])

    def _tasks(self, step: StepView) -> list[DraftTask]:
        chance, tasks = self.chance, []
        together = chance.choice((1, 2, 3))
        for index, state in self.requests.read(step, range(len(step.requests))):
            useful = chance.choice((0, together, together))
            draw = None
            if step.requests[index].params.random and useful and not state.context.held:
                draw = DraftSampling(1.0, seed=self.number, place=step.requests[index].num_tokens)
            penalty = Penalty(0.5, 0.2, 1.3) if useful and chance.random() < 0.15 else None
            paths = 3 if self.beside and useful and draw is None and chance.random() < 0.6 else 0
            penalty = None if paths else penalty
            tasks.append(DraftTask(state, useful, penalty, draw, paths))
        return tasks

    def _come_and_go(self) -> None:
        chance = self.chance
        for name in [*self.texts]:
            if len(self.texts) > 1 and chance.random() < 0.06:
                for known in (self.texts, self.prompts, self.salts, self.drafts):
                    known.pop(name, None)
        while len(self.texts) < chance.randint(1, REQUESTS):
            self.number += 1
            name = str(self.number)
            like = chance.choice([*self.texts.values(), []])
            text = like[: chance.choice((0, 60, 60))]
            length = chance.choice((1, 2, SIZE - 1, SIZE, SIZE + 1, 20, 40, LENGTH, 150))
            text = text + chance.choices(range(TARGET.vocab_size - 1), k=length)
            self.texts[name], self.prompts[name] = text, len(text)
            self.salts[name] = self.started[name] = chance.choice((None, None, "salt"))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("sampled", "beside", "parallel"),
    [
        (False, 0, False),
        (True, 0, False),
        (False, 5, False),
        (False, 0, True),
        (True, 0, True),
        (False, 5, True),
    ],
)
def test_kv_is_that_of_the_text(graphs: bool, sampled: bool, beside: int, parallel: bool) -> None:
    seen = Counter[str]()
    for seed in range(2):
        world = World(seed, graphs=graphs, sampled=sampled, beside=beside, parallel=parallel)
        for _ in range(40):
            world.step()
            world.check_kv()
        seen += world.seen + Counter(world.stats.skipped)
        states = world.requests._states.values()
        seen["dropped"] += sum(state.context.num_dropped for state in states)
    assert min(seen["drafts"], seen["texts"], seen["dropped"], seen["catching_up"]) > 10, seen
    assert not beside or seen["forks"] > 10
    assert not parallel or beside or seen["in the place of the last"] > 10


def test_ranks_keep_the_same_blocks() -> None:
    """Ranks have different hash seeds, and have to free and evict blocks in the same order."""
    program = """if True:
        from test_kv_of_texts import World

        world = World(0, graphs=False, sampled=False, beside=0)
        for _ in range(120):
            world.step()
        print(list(world.pool._cached), world.pool._free, world.pool.reused_tokens)
    """

    def blocks(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert blocks("1") == blocks("2")
