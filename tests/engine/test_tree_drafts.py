# SPDX-License-Identifier: Apache-2.0
"""Tests of draft trees, from the drafter's rows to the rows that the target computes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference as ref
from toy_drafter import transfers
from tree_world import KNOWN, LOOKAHEAD, ROOM, TEXTS, World, controlled, emitted, planned, step_of

from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.step_view import StepView, TreeRoom
from vllm_hetero_spec.engine.trees import drafts as drafts_module
from vllm_hetero_spec.engine.trees.control import TreePolicy
from vllm_hetero_spec.lookahead.controllers import Controller, Fixed, Trees
from vllm_hetero_spec.options import DEFAULT_TREE_WIDTH
from vllm_hetero_spec.trees.values import GREEDY_PRIOR, ChildChances, TreeValues


@pytest.mark.parametrize("raced", [False, True])
def test_the_target_as_its_own_drafter_goes_down_the_main_path(raced: bool) -> None:
    """The chain in each tree is accepted. Later rounds use KV that earlier trees have left."""
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
            chain = tree.common(drafts[name].tokens)
            assert len(chain) >= LOOKAHEAD - 1  # the last target token may be incomplete
            assert len(drafts[name].tokens) == LOOKAHEAD
            assert tree.rows is not None
            new = emitted(world, text, tree, place)
            assert new[: len(chain)] == chain
            assert len(new) > len(chain)
            text += new
            news[name], nodes[name] = len(new), len(tree.tokens)
        step = step_of(texts, news, nodes, room, raced=raced)
        control.observe(step)
        control.plan(step, [0] * 3)


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_chains_are_those_without_trees(raced: bool, graphs: bool) -> None:
    """Trees do not change the drafter's steps. A tree with one child per node is the chain."""
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


def test_what_the_target_emits_is_learnt(monkeypatch: Any) -> None:
    """The target always continues with the second child, so its value exceeds the first one's."""
    monkeypatch.setattr(drafts_module, "_LEAVES", 24)
    values = TreeValues.unknown()
    world, texts = World(), {name: list(text) for name, text in TEXTS.items()}
    control = planned(step_of(texts), values=values)

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


class ByRank(ChildChances):
    """Chances by the rank of a child alone, for which ERSD proves which tree is the best."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__(GREEDY_PRIOR)
        self._rates = np.array([*rates, 0.0])

    def shares(self, parent: Any, rank: np.ndarray, depth: Any, evidence: Any) -> np.ndarray:
        found: np.ndarray = self._rates[np.minimum(rank, len(self._rates) - 1)]
        return found


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("rates", [(0.6, 0.2, 0.1), (0.2, 0.5, 0.1)])
def test_trees_by_rank_are_those_of_algorithm_3(rates: Sequence[float], raced: bool) -> None:
    """The tree has the largest sum of products of rates among all trees of the candidates."""
    by_rank = ByRank(rates)
    values, room = TreeValues(by_rank, by_rank), TreeRoom(nodes=6, rows=40, branches=6)
    control = planned(step_of(TEXTS, room=room, raced=raced), values=values)
    drafts = World(raced=raced).draft(TEXTS, control)
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
    """Return the tokens from the root to each node of a tree, keyed by the ranks on that path."""
    paths: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    born = [0] * (len(tokens) + 1)
    for parent, token in zip(parents, tokens, strict=True):
        ranks, text = paths[parent] if parent >= 0 else ((), ())
        paths.append(((*ranks, born[parent]), (*text, token)))
        born[parent] += 1
    return dict(paths)


class Priced(Fixed):
    """Controller with given prices.

    In a step of `rows` rows, one more row costs `price + rise * rows` tokens. A branch costs `side`
    tokens per context token.
    """

    def __init__(self, price: float, rise: float = 0.0, side: float = 0.0) -> None:
        super().__init__(LOOKAHEAD)
        self.price, self.rise, self.tokens_per_second = price, rise, 1.0
        self.told: list[tuple[Any, ...]] = []
        self.found: list[tuple[Any, ...]] = []
        self.trees = 0
        self.branches: Any = SimpleNamespace(
            read_seconds=side,
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

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        self.told.append((batch, rows, again))

    def observe_acceptance(self, *figures: Any) -> None:
        self.told.append(figures[:2])


def test_dear_rows_are_not_verified() -> None:
    """With higher prices of rows or branches, trees are smaller."""
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
    (alone,) = step_of({"a": TEXTS["a"]}).requests
    asking = alone._replace(params=RequestParams(0, lookahead=2))
    step = StepView([asking], {}, {"a"}, LOOKAHEAD, 100, 1, trees=ROOM)
    control = planned(step, Priced(2.0))
    (draft,) = control.trim(list(World().draft({"a": TEXTS["a"]}, control).values()))
    assert len(draft.tokens) == ROOM.nodes


def test_the_controller_is_told_of_the_drafters_chain_and_of_sides() -> None:
    """The observed acceptance is that of the chain, whatever other nodes the tree has."""
    controller, world = Priced(0.0), World()
    texts = {"a": list(TEXTS["a"])}
    control, policy = controlled(controller)
    step = step_of(texts, room=TreeRoom(64, 300, 60))
    control.observe(step)
    control.plan(step, [0])
    (chain,) = world.draft(texts, control).values()
    (tree,) = control.trim([chain])
    assert tree.rows is not None
    side = next(
        node
        for node, parent in enumerate(tree.parents)
        if parent == 0 and tree.tokens[node] != chain.tokens[1]
    )
    texts["a"] += [chain.tokens[0], tree.tokens[side], 7]
    control.learn()
    controller.told.clear()
    step = step_of(texts, {"a": 3}, {"a": len(tree.tokens)})
    padding = len(tree.rows.tokens) - len(tree.tokens)
    request = step.requests[0]._replace(num_padding=padding)
    rows = 1 + len(tree.rows.tokens)
    control.observe(StepView([request], {}, {"a"}, LOOKAHEAD, 100, rows, 0.1, 0.1, trees=ROOM))
    control.learn()
    again = (len(tree.rows.counts) - 1) * len(TEXTS["a"])
    assert controller.told == [(LOOKAHEAD, 1), (1, rows, again)]
    assert policy.side_tokens_accepted == 1
    assert tree.depth == LOOKAHEAD


def test_rows_are_asked_for_where_steps_are_scheduled_ahead() -> None:
    """As many as the last trees used, and more if these used all rows of their step."""
    control, _ = controlled(Fixed(LOOKAHEAD))
    world, buckets = World(), (0, 8, 16)

    def asked(rows: int, nodes: int) -> int:
        room = TreeRoom(nodes, rows, 6) if rows else None
        step = replace(step_of(TEXTS, room=room), buckets=buckets, lookahead=min(rows, LOOKAHEAD))
        control.observe(step)
        control.plan(step, [0] * 3)
        asks = control.requested_length
        if rows:
            control.trim(list(world.draft(TEXTS, control).values()))
        return asks

    assert asked(0, 8) == 8  # the bucket of the lookahead
    assert asked(8, 8) == 16
    assert asked(16, 3) == 16  # the last trees used all rows
    assert asked(16, 3) == 8
    assert asked(8, 3) == 8


def test_where_there_is_little_room_the_best_of_it_is_taken() -> None:
    """If branches or rows are few, other nodes replace those that do not fit."""
    world, control = World(), planned(step_of(TEXTS))
    drafts = list(world.draft(TEXTS, control).values())
    values = {}
    for room in (ROOM, TreeRoom(8, 40, 2), TreeRoom(8, 12, 6), TreeRoom(8, 5, 1)):
        control.observe(step_of(TEXTS, room=room))
        control.plan(step_of(TEXTS, room=room), [0] * 3)
        for draft in control.trim(drafts):
            rows = len(draft.fed)
            assert rows <= room.rows
            assert len(draft.rows.counts if draft.rows else [0]) <= room.branches + 1
            assert len(draft.tokens) >= min(8, room.rows) - 3
            values.setdefault(room, []).append(len(draft.tokens))
    assert set(values[ROOM]) == {8}


def test_the_controller_is_told_what_is_beside_the_chain() -> None:
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


@pytest.mark.parametrize(
    "change", [{"probe": True}, {"trees": Trees(DEFAULT_TREE_WIDTH, looks=True)}]
)
def test_trees_that_are_looked_at_are_verified_as_chains(change: dict[str, Any]) -> None:
    """The emitted tokens still update the values of their nodes."""

    class Looking(Priced):
        def plan(self, *of: Any) -> Any:
            return super().plan(*of)._replace(**change)

    world, controller, values = World(), Looking(0.0), TreeValues.unknown()
    control, policy = controlled(controller, values)
    step = step_of(TEXTS)
    control.observe(step)
    assert control.plan(step, [0] * 3).paths == DEFAULT_TREE_WIDTH
    drafts = world.draft(TEXTS, control)
    for draft in control.trim(list(drafts.values())):
        assert draft.rows is None
        assert draft.tokens == drafts[draft.req_id].tokens
    assert len(controller.found) == controller.trees == 3
    assert controller.trimmed == []
    control.observe(step_of(TEXTS, {}, {name: len(d.tokens) - 1 for name, d in drafts.items()}))
    assert values.to_dict() == TreeValues.unknown().to_dict()  # the drafts were cut
    control.plan(step, [0] * 3)
    control.trim(list(drafts.values()))
    control.observe(step_of(TEXTS, {}, {name: len(d.tokens) for name, d in drafts.items()}))
    assert values.greedy.to_dict()["nodes"] == 3
    assert policy.side_tokens_accepted == 0


def test_requests_that_keep_chains_are_counted() -> None:
    """Each request counts one reason; its own reasons come first. Without a draft none counts."""
    world, stats = World(), DraftStats()
    policy = TreePolicy(TreeValues.unknown(), None, stats)
    step = step_of(TEXTS)
    parameters = [RequestParams(0), RequestParams(1, 0.9), RequestParams(2, structured=True)]
    views = zip(step.requests, parameters, strict=True)
    step = replace(step, requests=[view._replace(params=params) for view, params in views])

    def paths(step: StepView, planned: int, **changes: Any) -> list[int]:
        policy.observe(step)
        tasks = [task._replace(**changes) for task in world.tasks(TEXTS)]
        return [policy.paths_of(task, planned) for task in tasks]

    assert paths(step, 2) == [2, 0, 0]
    assert stats.chains == {"drawn": 1, "grammar": 1}
    raced = DraftSampling(1.0, seed=0, place=0, races=True)
    assert paths(step, 2, draw=raced) == [2, 2, 0]
    assert paths(step, 0, draw=raced) == [0, 0, 0]
    assert paths(replace(step, trees=ROOM._replace(branches=0)), 2, draw=raced) == [0, 0, 0]
    assert stats.chains == {"drawn": 1, "grammar": 4, "not_worth_it": 2, "no_room": 2}
    assert paths(step, 2, lookahead=0) == paths(replace(step, trees=None), 2) == [0, 0, 0]
    assert stats.chains.total() == 9


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_round_crosses_once_each_way(raced: bool, graphs: bool, monkeypatch: Any) -> None:
    """In an engine with trees, a round of chains does not compute or fetch candidates of trees."""
    sent, fetched = transfers(monkeypatch)
    world, control = World(raced=raced, graphs=graphs), planned(step_of(TEXTS, raced=raced))
    packet, world.drafter.waits = world.drafter.steps.picked.packet, True
    trees = 3 + 4 * KNOWN
    for number, (paths, lines) in enumerate(((2, trees), (0, 3), (1, trees), (2, trees))):
        packet[:, 3:] = -7
        sent.clear()
        drafts = world.draft(TEXTS, control, paths=paths)
        assert fetched == [(LOOKAHEAD, lines, 16)]
        assert bool((packet[:, 3:] == -7).all()) is (paths == 0)
        assert all((draft.explored is None) is (paths == 0) for draft in drafts.values())
        if graphs and number > 1:  # races have one more packet, the sampling parameters
            assert len(sent) == 1 + raced
        fetched.clear()
