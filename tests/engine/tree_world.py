# SPDX-License-Identifier: Apache-2.0
"""A toy drafter that drafts trees without an engine. The target is the same model."""

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tape_graphs import TapeGraphs
from toy_drafter import BLOCKS, SIZE, VOCAB, ToyDrafterModel, drafter_of

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.sampling import DraftSampling, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter.draft_batch import DraftBatchRunner
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable, KVPool
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.drafter.token_healing import TokenHealing
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView, TreeRoom
from vllm_hetero_spec.engine.trees.control import TreePolicy
from vllm_hetero_spec.engine.trees.forks import TreeBranches
from vllm_hetero_spec.lookahead.controllers import Controller, Fixed
from vllm_hetero_spec.options import DEFAULT_TREE_WIDTH
from vllm_hetero_spec.text.bridge import IdentityBridge
from vllm_hetero_spec.text.context import IdentityContext
from vllm_hetero_spec.trees.values import TreeValues
from vllm_hetero_spec.trees.walk import TreeBatch, greedy_walk
from vllm_hetero_spec.verify.race import race

LOOKAHEAD, KNOWN = 4, 5
ROOM = TreeRoom(nodes=8, rows=40, branches=6)
TEXTS = {"a": [3, 4, 5], "b": [6, 4, 9, 2], "c": [8, 8]}
RECORDED = (1, 4, 16)


class World:
    """A drafter with all objects that a round of drafting needs.

    Args:
        beside: Number of the likeliest tokens of each row that trees use.
        raced: True if its tokens are sampled by races.
        graphs: True if it runs simulated CUDA graphs.
        recorded: Numbers of requests for which graphs exist.
        ends: Tokens that end a text.
        spell: Target tokens of each drafter token, in races.
    """

    def __init__(
        self,
        beside: int = KNOWN,
        *,
        raced: bool = False,
        graphs: bool = False,
        recorded: Sequence[int] = RECORDED,
        ends: Collection[int] = (),
        spell: Callable[[int], Sequence[int]] = lambda d: (d,),
    ) -> None:
        lengths = torch.tensor([len(spell(d)) for d in range(VOCAB)])
        method = SampledMethod(TokenMap(torch.arange(VOCAB), VOCAB), lengths, spell)
        self.model = ToyDrafterModel()
        self.drafter = drafter_of(
            self.model,
            LOOKAHEAD,
            16,
            sampling=method,
            ends=frozenset(ends),
            confidences=True,
            beside=beside,
        )
        if graphs:
            shapes = [(size, width) for size in recorded for width in (1, 4, 8)]
            self.drafter.record(
                TapeGraphs().capture, shapes, GraphSupport(True, several_tokens=True)
            )
        self.pool, self.raced = KVPool(BLOCKS, SIZE), raced
        special: Any = SimpleNamespace(
            drafter_eos=frozenset(ends), banned=frozenset(), proposed={end: end for end in ends}
        )
        self.bridge, self.stats = IdentityBridge(special), DraftStats()
        self.drafter.extensions.append(TokenHealing(self.drafter, self.bridge))
        self.policy, chances = TreePolicy(TreeValues.unknown(), None, self.stats), self._chances
        trees = TreeBranches(self.drafter, self.pool, self.bridge, self.stats, chances)
        self.drafter.extensions.append(trees)
        self.rounds = DraftBatchRunner(self.bridge, self.drafter, self.pool, self.stats, 999)
        self.states: dict[str, RequestState] = {}

    def _chances(self, *children: np.ndarray) -> np.ndarray:
        return self.policy.race_chances(*children)

    def tasks(self, texts: dict[str, list[int]], *, paths: int = 1) -> list[DraftTask]:
        tasks = []
        for number, (name, text) in enumerate(texts.items()):
            context = IdentityContext()
            context.ids = list(text)
            old = self.states.get(name)
            state = self.states[name] = RequestState(name, context, num_prompt=2)
            if old is not None:
                state.sequence, state.num_kv_valid = old.sequence, old.num_kv_valid
            state.align(self.pool, 0)
            draw = (
                DraftSampling(1.0, seed=number, place=len(text), races=True) if self.raced else None
            )
            tasks.append(DraftTask(state, LOOKAHEAD, draw=draw, paths=paths))
        return tasks

    def draft(
        self, texts: dict[str, list[int]], control: LookaheadControl, *, paths: int = 1
    ) -> dict[str, Draft]:
        """Return the drafts that follow the texts, before the controller trims them."""
        assert isinstance(control._policy, TreePolicy)
        self.policy = control._policy
        self.rounds.begin(self.tasks(texts, paths=paths), iter(()), control)
        return {draft.req_id: draft for draft in self.rounds.finish()}

    def rows(self, text: Sequence[int], tree: Draft) -> torch.Tensor:
        """Return the model's logits after a text and after each node of a tree, [1 + n, V]."""
        paths: list[list[int]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        return torch.stack([self.row([*text, *path]) for path in [[], *paths]])

    def row(self, text: Sequence[int]) -> torch.Tensor:
        sequence = DraftSequence(BlockTable())
        assert self.pool.grow(sequence.table, len(text))
        table = self.drafter.planner.table([sequence])
        feed = self.drafter.planner.ragged(table, [0], [list(text)])
        (row,) = self.drafter.feed(feed, table, np.array([len(text)], np.int32))
        self.pool.close(sequence.table)
        return row


def step_of(
    texts: dict[str, list[int]],
    news: dict[str, int] | None = None,
    drafted: dict[str, int] | None = None,
    room: TreeRoom | None = ROOM,
    *,
    raced: bool = False,
) -> StepView:
    """Return the step after which the requests have these texts, with `news` (or 1) new tokens."""
    news, drafted = news or {}, drafted or {}
    requests = [
        RequestView(
            name,
            RequestParams(number, float(raced)),
            np.array(text),
            1,
            text[len(text) - news.get(name, 1) :],
            num_drafted=drafted.get(name, 0),
        )
        for number, (name, text) in enumerate(texts.items())
    ]
    return StepView(requests, {}, texts, LOOKAHEAD, 100, len(texts), 0.1, 0.1, trees=room)


def controlled(
    controller: Controller, values: TreeValues | None = None, *, can_stop_early: bool = False
) -> tuple[LookaheadControl, TreePolicy]:
    """Return both controls of a step. Statistics come from `controller.branches`, if it exists."""
    branches = getattr(controller, "branches", None)
    trees = TreePolicy(values or TreeValues.unknown(), branches, DraftStats())
    return LookaheadControl(controller, can_stop_early=can_stop_early, policy=trees), trees


def planned(
    step: StepView,
    controller: Controller | None = None,
    values: TreeValues | None = None,
    *,
    can_stop_early: bool = False,
) -> LookaheadControl:
    """Return the controls of a step for which trees are planned."""
    controller = controller or Fixed(LOOKAHEAD)
    control, _ = controlled(controller, values, can_stop_early=can_stop_early)
    control.observe(step)
    paths = control.plan(step, [0] * len(step.requests)).paths
    assert paths == DEFAULT_TREE_WIDTH * (step.trees is not None)
    return control


def emitted(world: World, text: list[int], draft: Draft, number: int) -> list[int]:
    """Return the tokens that the target emits for a draft. The target is the drafter's model."""
    rows = world.rows(text, draft)
    tokens = torch.tensor([text[-1], *draft.tokens])
    batch, best = TreeBatch.of(tokens, [draft.parents]), rows.argmax(-1)
    if world.raced:
        places = len(text) + batch.depths.clamp_min(0)
        best = race(rows.float().softmax(-1), torch.full_like(places, number), places)
    verdict = greedy_walk(batch, best)
    return verdict.tokens[0, : int(verdict.accepted[0]) + 1].tolist()
