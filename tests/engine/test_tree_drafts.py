# SPDX-License-Identifier: Apache-2.0
"""Trees beside the drafter's usual chains, from its rows to what the target is fed."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tape_graphs import TapeGraphs
from toy_drafter import BLOCKS, SIZE, VOCAB, ToyDrafterModel

from vllm_hetero_spec import staging
from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.drawing import Draw, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter import tree_drafts
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.draft_batch import DraftBatchRunner
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable, KVPool
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.request_state import DraftSequence, RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView, TreeRoom
from vllm_hetero_spec.lookahead.controllers import Controller, Fixed
from vllm_hetero_spec.lookahead.tree_choice import Trees
from vllm_hetero_spec.lookahead.tree_values import RankValues, TreeValues
from vllm_hetero_spec.text.bridge import IdentityBridge
from vllm_hetero_spec.text.context import IdentityContext
from vllm_hetero_spec.verify import reference as ref
from vllm_hetero_spec.verify.race import first_arrivals
from vllm_hetero_spec.verify.trees import TreeBatch, greedy_walk, race_walk

LOOKAHEAD, KNOWN = 4, 5
ROOM = TreeRoom(nodes=8, rows=40, sides=6)
TEXTS = {"a": [3, 4, 5], "b": [6, 4, 9, 2], "c": [8, 8]}


class World:
    """A drafter of target tokens, with trees or without; the target is the same model."""

    def __init__(self, beside: int = KNOWN, *, raced: bool = False, graphs: bool = False) -> None:
        plain = SampledMethod(
            TokenMap(torch.arange(VOCAB), VOCAB), torch.ones(VOCAB).long(), lambda d: (d,)
        )
        self.model = ToyDrafterModel()
        self.drafter = Drafter(
            self.model,  # type: ignore[arg-type]
            {0},
            VOCAB,
            LOOKAHEAD,
            16,
            plain,
            confidences=True,
            beside=beside,
        )
        if graphs:
            shapes = [(size, width) for size in (1, 4, 16) for width in (1, 4, 8)]
            self.drafter.record(TapeGraphs(), shapes, GraphSupport(True, several_tokens=True))
        self.pool, self.raced = KVPool(BLOCKS, SIZE), raced
        special: Any = SimpleNamespace(drafter_eos=frozenset(), banned=frozenset(), proposed={})
        stats = DraftStats()
        self.rounds = DraftBatchRunner(IdentityBridge(special), self.drafter, self.pool, stats, 999)
        self.states: dict[str, RequestState] = {}

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
            draw = Draw(1.0, seed=number, place=len(text), races=True) if self.raced else None
            tasks.append(DraftTask(state, LOOKAHEAD, draw=draw, paths=paths))
        return tasks

    def draft(
        self, texts: dict[str, list[int]], control: LookaheadControl, *, paths: int = 1
    ) -> dict[str, Draft]:
        """What is drafted behind the texts, before it is trimmed."""
        self.rounds.begin(self.tasks(texts, paths=paths), iter(()), control)
        return {draft.req_id: draft for draft in self.rounds.finish()}

    def rows(self, text: Sequence[int], tree: Draft) -> torch.Tensor:
        """The model's rows behind a text and behind each node of a tree, [1 + n, V]."""
        paths: list[list[int]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        return torch.stack([self.row([*text, *path]) for path in [[], *paths]])

    def row(self, text: Sequence[int]) -> torch.Tensor:
        sequence = DraftSequence(BlockTable())
        assert self.pool.grow(sequence.table, len(text))
        table = self.drafter._planner.table([sequence])
        feed = self.drafter._planner.ragged(table, [0], [list(text)])
        (row,) = self.drafter._feed(feed, table, np.array([len(text)], np.int32))
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
    """A step behind which the texts stand, so many of their tokens new."""
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


def planned(step: StepView, controller: Controller | None = None) -> LookaheadControl:
    control = LookaheadControl(controller or Fixed(LOOKAHEAD), can_stop_early=False)
    control.observe(step)
    assert control.plan(step, [0] * len(step.requests)).paths == 2 * (step.trees is not None)
    return control


def emitted(world: World, text: list[int], draft: Draft, number: int) -> list[int]:
    """What the target, which is the drafter, emits of a draft."""
    rows = world.rows(text, draft)
    tokens = torch.tensor([text[-1], *draft.tokens])
    batch = TreeBatch.of(tokens, [draft.parents], [number], [len(text)])
    if world.raced:
        verdict = race_walk(batch, rows.float().softmax(-1))
    else:
        verdict = greedy_walk(batch, rows.argmax(-1))
    return verdict.tokens[0, : int(verdict.accepted[0]) + 1].tolist()


@pytest.mark.parametrize("raced", [False, True])
def test_the_target_as_its_own_drafter_goes_down_the_main_path(raced: bool) -> None:
    """In several rounds, over KV that trees have left."""
    world, texts = World(raced=raced), {name: list(text) for name, text in TEXTS.items()}
    room = TreeRoom(64, 300, 60)
    control = planned(step_of(texts, room=room, raced=raced))
    for _ in range(4):
        drafts = world.draft(texts, control)
        trees = {draft.req_id: draft for draft in control.trim(list(drafts.values()))}
        news, nodes = {}, {}
        for place, (name, text) in enumerate(texts.items()):
            tree = trees[name]
            assert len(tree.tokens) > 2 * LOOKAHEAD
            assert tree.common(drafts[name].tokens) == drafts[name].tokens
            assert len(drafts[name].tokens) == LOOKAHEAD
            assert tree.rows is not None
            new = emitted(world, text, tree, place)
            assert new[:-1] == drafts[name].tokens
            text += new
            news[name], nodes[name] = len(new), len(tree.tokens)
        step = step_of(texts, news, nodes, room, raced=raced)
        control.observe(step)
        control.plan(step, [0] * 3)


@pytest.mark.parametrize("raced", [False, True])
def test_values_fall_along_paths_and_siblings_share(raced: bool) -> None:
    world, control = World(raced=raced), planned(step_of(TEXTS, raced=raced))
    for draft in world.draft(TEXTS, control).values():
        assert draft.explored is not None
        tree = draft.explored.tree
        left = [1.0, *tree.values]
        for token, parent, value in zip(tree.tokens, tree.parents, tree.values, strict=True):
            assert 0 <= token < VOCAB
            assert value <= (tree.values[parent] if parent >= 0 else 1.0) + 1e-6
            left[parent + 1] -= value
        assert min(left) > -1e-6
        assert len(tree.tokens) > 2 * LOOKAHEAD
        assert max(tree.children().depth) == LOOKAHEAD - 1


@pytest.mark.parametrize("paths", [1, 2, 3])
def test_nodes_of_raced_trees_are_the_first_arrivals(paths: int) -> None:
    """On every path, by the clocks of its places."""
    world, texts = World(raced=True), {name: list(text) for name, text in TEXTS.items()}
    control = planned(step_of(texts, raced=True))
    for _ in range(3):
        drafts = world.draft(texts, control, paths=paths)
        for number, name in enumerate(texts):
            draft = drafts[name]
            assert draft.explored is not None
            tree = draft.explored.tree
            rows = world.rows(texts[name], Draft(name, *tree[:2])).clone()
            rows[:, 0] = -torch.inf  # banned
            laws = rows.float().softmax(-1)
            inner = [-1, *sorted({parent for parent in tree.parents if parent >= 0})]
            for node in inner:
                depth = 0 if node < 0 else int(tree.children().depth[node]) + 1
                at = torch.tensor([number]), torch.tensor([len(texts[name]) + depth])
                ids, _ = first_arrivals(laws[node + 1][None], *at, KNOWN)
                own = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == node]
                assert own == ids[0].tolist()
            first = [node for node in inner if node >= 0 and tree.parents[node] == -1]
            assert first == list(range(paths))
            texts[name] += [*draft.tokens[:2], 5]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("paths", [1, 2, 4])
def test_values_are_the_rows_own(paths: int, graphs: bool, monkeypatch: Any) -> None:
    """Of greedy trees, before anything is learnt: the product of probabilities, on every path; for
    texts that end with a block or inside one, over what the round before has left."""
    monkeypatch.setattr(tree_drafts, "_LEAVES", 999)  # else what is unlikely is not told apart
    world, texts = World(graphs=graphs), {name: list(text) for name, text in TEXTS.items()}
    control = planned(step_of(texts))
    for number in range(3):
        drafts = world.draft(texts, control, paths=paths)
        for name, draft in drafts.items():
            assert draft.explored is not None
            tree = draft.explored.tree
            rows = world.rows(texts[name], Draft(name, *tree[:2])).clone()
            rows[:, 0] = -torch.inf  # banned
            laws = rows.softmax(-1)
            for token, parent, value in zip(*tree, strict=True):
                above = tree.values[parent] if parent >= 0 else 1.0
                assert value == pytest.approx(above * float(laws[parent + 1, token]), rel=1e-4)
            inner = [node for node in set(tree.parents) if node >= 0]
            first = [node for node in inner if tree.parents[node] == -1]
            assert len(first) == paths  # each of them goes on
            assert len(inner) > (LOOKAHEAD - 2) * paths
            texts[name] += [*draft.tokens[: number + 1], 5]


@pytest.mark.parametrize("paths", [1, 2])
def test_races_in_which_one_token_runs(paths: int) -> None:
    """A second path begins with nothing that could be: of half of all tokens nothing is fed."""
    world = World(raced=True)
    drafter, ids = world.drafter, torch.arange(VOCAB)
    assert drafter.sampling is not None
    half = TokenMap(torch.where(ids % 2 > 0, ids, -1), VOCAB)
    drafter.sampling = replace(drafter.sampling, tokens=half)
    drafter._rules = replace(drafter._rules, sampling=drafter.sampling)
    tasks = world.tasks(TEXTS, paths=paths)
    draws = [replace(task.draw, top_p=0.01) for task in tasks if task.draw]
    tasks = [task._replace(draw=draw) for task, draw in zip(tasks, draws, strict=True)]
    world.rounds.begin(tasks, iter(()), planned(step_of(TEXTS, raced=True)))
    for draft in world.rounds.finish():
        assert draft.explored is not None
        assert draft.explored.tree[:2] == (draft.tokens, [-1, 0, 1, 2])


class Stopping(Fixed):
    """Lets the drafter stop behind so many tokens."""

    def __init__(self, length: int) -> None:
        super().__init__(LOOKAHEAD)
        self.length = length

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        return [len(request) < self.length for request in confidences]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_rounds_with_a_second_path_that_end_early(length: int) -> None:
    """What was not fed is not looked for."""
    control = LookaheadControl(Stopping(length), can_stop_early=True)
    control.observe(step_of(TEXTS))
    control.plan(step_of(TEXTS), [0] * 3)
    for draft in World().draft(TEXTS, control, paths=2).values():
        assert len(draft.tokens) == length
        assert draft.explored is not None
        inner = {parent for parent in draft.explored.tree.parents if parent >= 0}
        first = [node for node in inner if draft.explored.tree.parents[node] == -1]
        assert len(first) == (2 if length > 1 else 0)


def test_races_beside_forks(monkeypatch: Any) -> None:
    """A batch of greedy requests with forks, and drawn ones that draft less far: each as alone."""
    drafts = []
    for paths in (0, 3):
        world = World()
        raced, tasks = World(raced=True).tasks(TEXTS), world.tasks(TEXTS, paths=paths)
        tasks[1] = tasks[1]._replace(draw=raced[1].draw, lookahead=2)
        world.rounds.begin(tasks, iter(()), planned(step_of(TEXTS)))
        drafts.append({draft.req_id: draft for draft in world.rounds.finish()})
    for name, draft in drafts[0].items():
        assert drafts[1][name].tokens == draft.tokens
        assert (drafts[1][name].explored is None) is (draft.explored is not None)
    assert len(drafts[1]["b"].tokens) == 2
    rows = [of["b"].draft_probs.rows[list(of["b"].draft_probs.row_of)] for of in drafts]
    assert len(rows[0]) == 2
    torch.testing.assert_close(*rows)


def test_forks_give_their_blocks_back(monkeypatch: Any) -> None:
    """And where there are none left, there are fewer of them, or none."""
    monkeypatch.setattr(tree_drafts, "_LEAVES", 999)
    held = []
    for paths in (1, 3):
        world = World()
        world.draft(TEXTS, planned(step_of(TEXTS)), paths=paths)
        held.append(world.pool.held)
    assert held[0] == held[1]
    world = World()
    while world.pool.available > held[0] + 3:
        assert world.pool.grow(BlockTable(), SIZE)
    drafts = world.draft(TEXTS, planned(step_of(TEXTS)), paths=3)
    assert {name: draft.tokens for name, draft in drafts.items()} == {
        name: draft.tokens for name, draft in World().draft(TEXTS, planned(step_of(TEXTS))).items()
    }
    inner = [
        len({p for p in d.explored.tree.parents if p >= 0}) for d in drafts.values() if d.explored
    ]
    assert max(inner) > LOOKAHEAD - 1
    assert min(inner) == LOOKAHEAD - 1


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_chains_are_those_without_trees(raced: bool, graphs: bool) -> None:
    """The drafter's steps are the same; and a tree of one child each is the chain itself."""
    chains = {}
    for beside in (0, 1, KNOWN):
        world = World(beside, raced=raced, graphs=graphs)
        control = planned(step_of(TEXTS, raced=raced))
        drafts = world.draft(TEXTS, control, paths=min(beside, 2))
        chains[beside] = {name: (d.tokens, d.confidences) for name, d in drafts.items()}
        for draft in control.trim(list(drafts.values())) if beside < 2 else ():
            assert draft.rows is None
            assert draft.tokens == drafts[draft.req_id].tokens
            assert list(draft.parents) == list(range(-1, LOOKAHEAD - 1))
    for beside in (1, KNOWN):
        for name, (tokens, confidences) in chains[0].items():
            assert chains[beside][name][0] == tokens
            assert chains[beside][name][1] == pytest.approx(confidences)


@pytest.mark.parametrize("raced", [False, True])
def test_graphs_find_the_same_trees(raced: bool) -> None:
    """On two paths."""
    trees = []
    for graphs in (False, True):
        world = World(raced=raced, graphs=graphs)
        drafts = world.draft(TEXTS, planned(step_of(TEXTS, raced=raced)), paths=2)
        trees.append([draft.explored for draft in drafts.values()])
    for one, other in zip(*trees, strict=True):
        assert one is not None
        assert other is not None
        assert one.tree[:2] == other.tree[:2]
        assert one.tree.values == pytest.approx(other.tree.values)


@pytest.mark.parametrize("raced", [False, True])
def test_a_round_still_crosses_once_each_way(raced: bool, monkeypatch: Any) -> None:
    sent, fetched = [], []
    send, fetch = staging.Sender.send, staging.Receiver.fetch
    monkeypatch.setattr(
        staging.Sender, "send", lambda self, *of: sent.append(len(of)) or send(self, *of)
    )
    monkeypatch.setattr(
        staging.Receiver, "fetch", lambda self, of: fetched.append(of.shape) or fetch(self, of)
    )
    world, control = World(raced=raced, graphs=True), planned(step_of(TEXTS, raced=raced))
    world.drafter.waits = True
    drafts = world.draft(TEXTS, control)
    assert all(draft.explored is not None for draft in drafts.values())
    assert len(sent) == 1 + raced  # how tokens are drawn
    assert fetched == [(LOOKAHEAD, 3 + 4 * KNOWN, 16)]
    sent.clear()
    fetched.clear()
    world.draft(TEXTS, control, paths=2)
    assert len(sent) == 1 + raced
    assert len(fetched) == 1


def test_what_the_target_emits_is_learnt(monkeypatch: Any) -> None:
    """A target that always goes on with the second child: its value rises above the first's."""
    monkeypatch.setattr(tree_drafts, "_LEAVES", 24)
    values = TreeValues.unknown()
    control = LookaheadControl(Fixed(LOOKAHEAD), can_stop_early=False, values=values)
    world, texts = World(), {name: list(text) for name, text in TEXTS.items()}
    control.observe(step_of(texts))
    control.plan(step_of(texts), [0] * 3)

    def shares() -> np.ndarray:
        nought, evidence = np.zeros(2, np.int64), np.log(np.array([[0.5, 0.5], [0.4, 0.6]]))
        return values.greedy.shares(nought, np.arange(2), nought, evidence)

    before = shares()
    assert before[0] > before[1]
    for _ in range(25):
        drafts = list(world.draft(texts, control).values())
        trees = {draft.req_id: draft for draft in control.trim(drafts)}
        news = {}
        for draft in drafts:
            assert draft.explored is not None
            parents = draft.explored.tree.parents
            second = [node for node, parent in enumerate(parents) if parent == -1][1]
            texts[draft.req_id].append(draft.explored.tree.tokens[second])
            news[draft.req_id] = 1
        nodes = {name: len(tree.tokens) for name, tree in trees.items()}
        control.observe(step_of(texts, news, nodes))
        control.plan(step_of(texts), [0] * 3)
    after = shares()
    assert after[1] > after[0]
    assert values.race.to_dict() == TreeValues.unknown().race.to_dict()


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("rates", [(0.6, 0.2, 0.1), (0.2, 0.5, 0.1)])
def test_trees_by_rank_are_those_of_algorithm_3(rates: Sequence[float], raced: bool) -> None:
    """The largest sum of products of rates, of all trees that are in what was found."""
    values, room = RankValues.unknown(), TreeRoom(nodes=6, rows=40, sides=6)
    for of_kind in values:
        of_kind._taken[:] = 0.0
        of_kind._taken[: len(rates)] = np.array(rates) * of_kind._nodes
    control = LookaheadControl(Fixed(LOOKAHEAD), can_stop_early=False, values=values)
    step, world = step_of(TEXTS, room=room, raced=raced), World(raced=raced)
    control.observe(step)
    control.plan(step, [0] * 3)
    drafts = world.draft(TEXTS, control)
    for tree in control.trim(list(drafts.values())):
        explored = drafts[tree.req_id].explored
        assert explored is not None
        found = by_ranks(explored.tree.parents, explored.tree.tokens)
        worth = defaultdict[tuple[int, ...], float](float)
        for ranks in found:
            worth[ranks] = float(np.prod([dict(enumerate(rates)).get(r, 0.0) for r in ranks]))
        best = ref.best_tree(worth.__getitem__, KNOWN, room.nodes)
        texts = {text: ranks for ranks, text in found.items()}
        own = [worth[texts[text]] for text in by_ranks(tree.parents, tree.tokens).values()]
        assert len(own) == room.nodes
        assert sum(own) == pytest.approx(sum(map(worth.__getitem__, best)))


def by_ranks(parents: Sequence[int], tokens: Sequence[int]) -> dict[tuple[int, ...], Any]:
    """The text of each node of a tree, by its path of ranks."""
    paths: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    born = [0] * (len(tokens) + 1)
    for parent, token in zip(parents, tokens, strict=True):
        ranks, text = paths[parent] if parent >= 0 else ((), ())
        paths.append(((*ranks, born[parent]), (*text, token)))
        born[parent] += 1
    return dict(paths)


def test_trees_that_were_cut_teach_nothing() -> None:
    values = TreeValues.unknown()
    control = LookaheadControl(Fixed(LOOKAHEAD), can_stop_early=False, values=values)
    world = World()
    control.observe(step_of(TEXTS))
    control.plan(step_of(TEXTS), [0] * 3)
    (*_, tree) = control.trim(list(world.draft(TEXTS, control).values()))
    cut = {name: len(tree.tokens) - 1 for name in TEXTS}
    control.observe(step_of(TEXTS, {}, cut))
    assert values.to_dict() == TreeValues.unknown().to_dict()


class Priced(Fixed):
    """Rows at a price that rises, side sequences at one for each token of context."""

    def __init__(self, price: float, rise: float = 0.0, side: float = 0.0) -> None:
        super().__init__(LOOKAHEAD)
        self.price, self.rise, self.dear = price, rise, side
        self.told: list[tuple[Any, ...]] = []
        self.found: list[tuple[Any, ...]] = []
        self.trees = 0
        self.sides: Any = SimpleNamespace(
            add=lambda *figures: self.found.append(figures),
            found=self._took,
            trimmed=lambda trees, seconds: self.trimmed.append(trees),
        )
        self.trimmed: list[int] = []

    def _took(self, trees: int, seconds: float) -> None:
        assert seconds > 0
        self.trees += trees

    def row_price(self, rows: int) -> float:
        return self.price + self.rise * rows

    def side_price(self, context: int) -> float:
        return self.dear * context

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        self.told.append((batch, rows, again))

    def observe_acceptance(self, *figures: Any) -> None:
        self.told.append(figures[:2])


def test_dear_rows_are_not_verified() -> None:
    world = World()

    def nodes(controller: Controller) -> int:
        control = planned(step_of(TEXTS), controller)
        drafts = control.trim(list(world.draft(TEXTS, control).values()))
        return sum(len(draft.tokens) for draft in drafts)

    counts = [nodes(Priced(price)) for price in (0.0, 0.03, 0.1, 0.3, 1.1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 3 * ROOM.nodes
    assert counts[-1] == 0
    assert len(set(counts)) > 3
    assert nodes(Priced(0.03, rise=0.01)) < counts[1]
    control = planned(step_of(TEXTS), Priced(0.0, side=1.0))
    assert all(d.rows is None for d in control.trim(list(world.draft(TEXTS, control).values())))


def test_a_request_of_its_own_lookahead_is_not_trimmed_by_price() -> None:
    control = LookaheadControl(Priced(2.0), can_stop_early=False)
    step = step_of({"a": TEXTS["a"]})
    asking = step.requests[0]._replace(params=RequestParams(0, lookahead=2))
    control.plan(StepView([asking], {}, {"a"}, LOOKAHEAD, 100, 1, trees=ROOM), [0])
    world = World()
    (draft,) = control.trim(list(world.draft({"a": TEXTS["a"]}, control).values()))
    assert len(draft.tokens) == ROOM.nodes


def test_the_controller_is_told_of_the_drafters_chain_and_of_sides() -> None:
    """A chain's acceptance stays that of a chain, whatever the tree had besides."""
    controller, world = Priced(0.0), World()
    texts = {"a": list(TEXTS["a"])}
    control = planned(step_of(texts, room=TreeRoom(64, 300, 60)), controller)
    (chain,) = world.draft(texts, control).values()
    (tree,) = control.trim([chain])
    assert tree.rows is not None
    side = next(
        node
        for node, parent in enumerate(tree.parents)
        if parent == 0 and tree.tokens[node] != chain.tokens[1]
    )
    texts["a"] += [chain.tokens[0], tree.tokens[side], 7]
    controller.told.clear()
    step = step_of(texts, {"a": 3}, {"a": len(tree.tokens)})
    padding = len(tree.rows.tokens) - len(tree.tokens)
    request = step.requests[0]._replace(num_padding=padding)
    rows = 1 + len(tree.rows.tokens)
    control.observe(StepView([request], {}, {"a"}, LOOKAHEAD, 100, rows, 0.1, 0.1, trees=ROOM))
    again = (len(tree.rows.counts) - 1) * len(TEXTS["a"])
    assert controller.told == [(LOOKAHEAD, 1), (1, rows, again)]
    assert control.side_tokens_accepted == 1
    assert tree.depth == LOOKAHEAD


def test_rows_are_asked_for_where_steps_are_scheduled_ahead() -> None:
    """As many as the last trees had use for; more, if those had no more room."""
    control = LookaheadControl(Fixed(LOOKAHEAD), can_stop_early=False)
    world, tiers = World(), (0, 8, 16)

    def asked(rows: int, nodes: int) -> int:
        room = TreeRoom(nodes, rows, 6) if rows else None
        step = replace(step_of(TEXTS, room=room), tiers=tiers, lookahead=min(rows, LOOKAHEAD))
        control.observe(step)
        control.plan(step, [0] * 3)
        asks = control.asks
        if rows:
            control.trim(list(world.draft(TEXTS, control).values()))
        return asks

    assert asked(0, 8) == 8  # the lookahead
    assert asked(8, 8) == 16
    assert asked(16, 3) == 16  # the last trees had no more room
    assert asked(16, 3) == 8
    assert asked(8, 3) == 8


def test_where_there_is_little_room_the_best_of_it_is_taken() -> None:
    """Few side sequences, or few rows: other nodes take the place of those that have none."""
    world, control = World(), planned(step_of(TEXTS))
    drafts = list(world.draft(TEXTS, control).values())
    values = {}
    for room in (ROOM, TreeRoom(8, 40, 2), TreeRoom(8, 12, 6), TreeRoom(8, 5, 1)):
        control.plan(step_of(TEXTS, room=room), [0] * 3)
        for draft in control.trim(drafts):
            rows = len(draft.fed)
            assert rows <= room.rows
            assert len(draft.rows.counts if draft.rows else [0]) <= room.sides + 1
            assert len(draft.tokens) >= min(8, room.rows) - 3
            values.setdefault(room, []).append(len(draft.tokens))
    assert set(values[ROOM]) == {8}


def test_the_controller_is_told_what_is_beside_the_chain() -> None:
    """Its nodes are those of the tree that are not the chain's, each at its depth."""
    world, controller = World(), Priced(0.0)
    control = planned(step_of(TEXTS), controller)
    drafts = world.draft(TEXTS, control)
    trees = {draft.req_id: draft for draft in control.trim(list(drafts.values()))}
    assert len(controller.found) == controller.trees == 3
    assert controller.trimmed == [3]
    for (name, tree), (depths, values, again, context, random) in zip(
        trees.items(), controller.found, strict=True
    ):
        on_chain = len(tree.common(drafts[name].tokens))
        assert len(depths) == len(values) == len(again) == len(tree.tokens) - on_chain
        assert all(1 <= depth <= LOOKAHEAD for depth in depths)
        assert sum(again) == sum(parent == -2 for parent in tree.rows.parents if tree.rows)
        assert random is False
        assert context == len(TEXTS[name])


@pytest.mark.parametrize("change", [{"probe": True}, {"trees": Trees(2, looks=True)}])
def test_trees_that_are_looked_at_are_verified_as_chains(change: dict[str, Any]) -> None:
    """And what is emitted behind them teaches what their nodes are worth."""

    class Looking(Priced):
        def plan(self, *of: Any) -> Any:
            return super().plan(*of)._replace(**change)

    world, controller, values = World(), Looking(0.0), TreeValues.unknown()
    control = LookaheadControl(controller, can_stop_early=False, values=values)
    step = step_of(TEXTS)
    control.observe(step)
    assert control.plan(step, [0] * 3).paths == 2
    drafts = world.draft(TEXTS, control)
    for draft in control.trim(list(drafts.values())):
        assert draft.rows is None
        assert draft.tokens == drafts[draft.req_id].tokens
    assert len(controller.found) == controller.trees == 3
    assert controller.trimmed == []
    control.observe(step_of(TEXTS, {}, {name: len(d.tokens) - 1 for name, d in drafts.items()}))
    assert values.to_dict() == TreeValues.unknown().to_dict()  # they were cut
    control.plan(step, [0] * 3)
    control.trim(list(drafts.values()))
    control.observe(step_of(TEXTS, {}, {name: len(d.tokens) for name, d in drafts.items()}))
    assert values.greedy.to_dict()["nodes"] == 3
    assert control.side_tokens_accepted == 0


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_rounds_of_chains_do_not_look_beside_their_tokens(
    raced: bool, graphs: bool, monkeypatch: Any
) -> None:
    """Where drafts may be trees: nothing of it is computed, nor fetched."""
    fetched, fetch = [], staging.Receiver.fetch
    monkeypatch.setattr(
        staging.Receiver, "fetch", lambda self, of: fetched.append(of.shape) or fetch(self, of)
    )
    world, control = World(raced=raced, graphs=graphs), planned(step_of(TEXTS, raced=raced))
    packet, world.drafter.waits = world.drafter._steps.picked.packet, True
    for paths, lines in ((2, 3 + 4 * KNOWN), (0, 3), (1, 3 + 4 * KNOWN)):
        packet[:, 3:] = -7
        drafts = world.draft(TEXTS, control, paths=paths)
        assert fetched == [(LOOKAHEAD, lines, 16)]
        assert bool((packet[:, 3:] == -7).all()) is (paths == 0)
        assert all((draft.explored is None) is (paths == 0) for draft in drafts.values())
        fetched.clear()
