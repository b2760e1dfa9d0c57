# SPDX-License-Identifier: Apache-2.0
"""Tests of the drafter's branches of a draft tree: where they leave the chain, and their nodes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_drafter import SIZE, VOCAB
from tree_world import KNOWN, LOOKAHEAD, TEXTS, World, emitted, planned, step_of

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter import token_healing
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.trees import drafts as drafts_module
from vllm_hetero_spec.lookahead.controllers import Fixed
from vllm_hetero_spec.text.drafts import FirstToken
from vllm_hetero_spec.trees.growth import ScoredTree
from vllm_hetero_spec.verify.race import first_arrivals


@pytest.fixture(autouse=True)
def _translates_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "_LEAVES", 999)  # otherwise unlikely nodes are left out


def tree_of(draft: Draft) -> ScoredTree:
    assert draft.explored is not None
    return draft.explored.tree


def fed(draft: Draft) -> list[list[int]]:
    """Return, for each position of the chain, the ranks of the nodes there that have children.

    Outside the chain, only first children may have children.
    """
    tree, at, ranks = tree_of(draft), -1, []
    beside = set(tree.parents) - {-1}
    for token in draft.tokens:
        own = [node for node, parent in enumerate(tree.parents) if parent == at]
        ranks.append([rank for rank, node in enumerate(own) if node in tree.parents])
        at = next(node for node in own if tree.tokens[node] == token)
        beside -= set(own)
    assert not any(tree.children().rank[sorted(beside)])
    return ranks


def expected(paths: int, length: int = LOOKAHEAD) -> list[list[int]]:
    """Return `fed` if each path leaves one token later than the last, with the second child."""
    last = length - 1  # the drafter's row after the last token is not computed
    return [[0, 1] if place < paths - 1 else [0] for place in range(last)] + [[]]


def laws(world: World, text: Sequence[int], draft: Draft) -> torch.Tensor:
    """Return the drafter's distributions after a text and after each node, [1 + n, V]."""
    rows = world.rows(text, Draft(draft.req_id, *tree_of(draft)[:2])).clone()
    rows[:, 0] = -torch.inf  # banned
    return rows.float().softmax(-1)


@pytest.mark.parametrize("paths", [1, 2, 3, 4])
def test_nodes_of_raced_trees_are_the_first_arrivals(paths: int) -> None:
    """On every path, a node's children are the first arrivals of the race at its position."""
    world, texts = World(raced=True), {name: list(text) for name, text in TEXTS.items()}
    control = planned(step_of(texts, raced=True))
    for _ in range(3):
        drafts = world.draft(texts, control, paths=paths)
        for number, name in enumerate(texts):
            draft, tree = drafts[name], tree_of(drafts[name])
            law = laws(world, texts[name], draft)
            for node in sorted(set(tree.parents)):
                depth = 0 if node < 0 else int(tree.children().depth[node]) + 1
                at = torch.tensor([number]), torch.tensor([len(texts[name]) + depth])
                ids, _ = first_arrivals(law[node + 1][None], *at, KNOWN)
                own = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == node]
                assert own == ids[0].tolist()
            assert fed(draft) == expected(paths)
            texts[name] += [*draft.tokens[:2], 5]


@pytest.mark.parametrize("graphs", [False, True])
def test_clocks_go_by_what_tokens_spell(graphs: bool, monkeypatch: Any) -> None:
    """A branch's first token may spell more or fewer target tokens than the chain's token."""

    def spell(token: int) -> list[int]:
        return [token, 3, 9][: 1 + token % 3]

    world, found = World(raced=True, graphs=graphs, spell=spell), []
    raced = drafts_module.TreeDrafts.raced
    monkeypatch.setattr(
        drafts_module.TreeDrafts, "raced", lambda *of: found.append(of[1]) or raced(*of)
    )
    world.draft(TEXTS, planned(step_of(TEXTS, raced=True)), paths=4)
    differ = 0
    for tokens in found:
        name = tokens.task.req_id
        text, number = TEXTS[name], list(TEXTS).index(name)
        assert [fork.leaves for fork in tokens.forks] == [0, 1, 2]
        for path, rows, leaves in tokens.forks:
            assert path[:leaves] == tokens.chain[:leaves]
            differ += len(spell(path[leaves])) != len(spell(tokens.chain[leaves]))
            for known in range(leaves + 1, len(path)):
                row = world.row([*text, *path[:known]]).clone()
                row[0] = -torch.inf
                place = len(text) + sum(len(spell(token)) for token in path[:known])
                at = torch.tensor([number]), torch.tensor([place])
                ids, _ = first_arrivals(row.float().softmax(-1)[None], *at, KNOWN)
                assert rows.tokens[known].tolist() == ids[0].tolist()
    assert differ > 1


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("paths", [1, 2, 3, 4])
def test_values_are_the_rows_own(paths: int, graphs: bool) -> None:
    """They are products of probabilities. Texts end at and inside KV blocks, which are reused."""
    world, texts = World(graphs=graphs), {name: list(text) for name, text in TEXTS.items()}
    control = planned(step_of(texts))
    for number in range(3):
        drafts = world.draft(texts, control, paths=paths)
        for name, draft in drafts.items():
            tree, law = tree_of(draft), laws(world, texts[name], draft)
            for token, parent, value in zip(*tree, strict=True):
                above = tree.values[parent] if parent >= 0 else 1.0
                assert value == pytest.approx(above * float(law[parent + 1, token]), rel=1e-4)
            assert fed(draft) == expected(paths)
            inner = [node for node in set(tree.parents) if node >= 0]
            # Each path continues to the last position.
            assert len(inner) > (LOOKAHEAD - 2) * paths - (paths > 2)
            texts[name] += [*draft.tokens[: number + 1], 5]


@pytest.mark.parametrize("paths", [1, 2, 3])
def test_races_in_which_one_token_runs(paths: int) -> None:
    """With `top_p` 0.01 no branch leaves the chain. Tokens without a proposal are not fed."""
    world = World(raced=True)
    ids = torch.arange(VOCAB)
    drafter, sampling = world.drafter, world.drafter.rules.sampling
    assert sampling is not None
    half = TokenMap(torch.where(ids % 2 > 0, ids, -1), VOCAB)
    drafter.rules = replace(drafter.rules, sampling=replace(sampling, tokens=half))
    tasks = world.tasks(TEXTS, paths=paths)
    draws = [replace(task.draw, top_p=0.01) for task in tasks if task.draw]
    tasks = [task._replace(draw=draw) for task, draw in zip(tasks, draws, strict=True)]
    world.rounds.begin(tasks, iter(()), planned(step_of(TEXTS, raced=True)))
    for draft in world.rounds.finish():
        assert tree_of(draft)[:2] == (draft.tokens, [-1, 0, 1, 2])


class Stopping(Fixed):
    """Controller that stops a round after `length` tokens."""

    def __init__(self, length: int) -> None:
        super().__init__(LOOKAHEAD)
        self.length = length

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        return [len(request) < self.length for request in confidences]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_rounds_that_end_early(length: int) -> None:
    """Tokens that were not fed have no children. A path that has just left was not fed."""
    control = planned(step_of(TEXTS), Stopping(length), can_stop_early=True)
    for draft in World().draft(TEXTS, control, paths=3).values():
        assert len(draft.tokens) == length
        assert fed(draft) == expected(3, length)


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("second", [False, True])
def test_nothing_follows_an_end(place: int, second: bool, raced: bool) -> None:
    """The end token is in the chain, or is a branch's first token. Other paths continue."""
    control, seen = planned(step_of(TEXTS, raced=raced)), 0
    for draft in World(raced=raced).draft(TEXTS, control, paths=3).values():
        tree = tree_of(draft)
        at = tree.tokens.index(draft.tokens[0]) if place else -1
        own = [t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent == at]
        end = own[1] if second else draft.tokens[place]
        if end in draft.tokens[: len(draft.tokens) if second else place]:
            continue
        seen, world = seen + 1, World(raced=raced, ends=[end])
        ended = world.draft(TEXTS, control, paths=3)[draft.req_id]
        ends = [node for node, token in enumerate(tree_of(ended).tokens) if token == end]
        assert ends
        assert not set(ends) & set(tree_of(ended).parents)
        if second:
            assert ended.tokens == draft.tokens
            assert fed(ended) == [
                [0] if at == place else ranks for at, ranks in enumerate(fed(draft))
            ]
        else:
            assert ended.tokens == draft.tokens[: place + 1]
            assert fed(ended) == [[0, 1]] * place + [[1]]
    assert seen


@pytest.mark.parametrize(("waits", "few"), [(False, 2), (True, 9), (True, 2)])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("choice", [1, 2])
def test_paths_leave_the_chain_whose_first_token_was_overruled(
    choice: int, waits: bool, few: int, graphs: bool, monkeypatch: Any
) -> None:
    """If it is chosen after the steps of a large round, the draft ends with it."""
    world = World(graphs=graphs)
    world.drafter.waits = waits
    monkeypatch.setattr(token_healing, "_FEW", few)
    monkeypatch.setattr(token_healing, "_OFTEN", 2.0)
    monkeypatch.setattr(world.bridge, "identity", False)
    monkeypatch.setattr(
        world.bridge, "first_choice", lambda context, ids, last: FirstToken(ids[choice])
    )
    monkeypatch.setattr(world.bridge, "first_choices", lambda context, ids: list(ids[1:]))
    for name, draft in world.draft(TEXTS, planned(step_of(TEXTS)), paths=3).items():
        row = world.row(TEXTS[name]).clone()
        row[0] = -torch.inf
        assert draft.tokens[0] == row.topk(3).indices[choice]
        if waits and few < len(TEXTS):
            assert len(draft.tokens) == 1
        else:
            assert fed(draft) == [[0] if choice == 1 else [0, 1], [0, 1], [0], []]


def test_races_beside_forks() -> None:
    """Greedy drafts with branches and a shorter raced one are the same as without branches."""
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


@pytest.mark.parametrize("raced", [False, True])
def test_output_is_that_without_other_paths(raced: bool) -> None:
    """The number of paths does not change the output; with races it changes the trees."""
    outputs = []
    for paths in (0, 1, 2, 3):
        world, texts = World(raced=raced), {name: list(text) for name, text in TEXTS.items()}
        control = planned(step_of(texts, raced=raced))
        accepted = 0
        for _ in range(5):
            drafts = world.draft(texts, control, paths=paths)
            shown = control.trim(list(drafts.values())) if paths else list(drafts.values())
            for number, (name, draft) in enumerate(zip(texts, shown, strict=True)):
                new = emitted(world, texts[name], draft, number)
                accepted += len(new) - 1
                texts[name] += new
            control.plan(step_of(texts, raced=raced), [0] * 3)
        outputs.append(texts)
        assert accepted > 0
    for texts in outputs[1:]:
        for name, text in texts.items():
            length = min(len(text), len(outputs[0][name]))
            assert text[:length] == outputs[0][name][:length]


def test_forks_give_their_blocks_back() -> None:
    """If too few blocks are free, there are fewer branches, and the missing ones are counted."""
    held = []
    for paths in (1, 3):
        world = World()
        world.draft(TEXTS, planned(step_of(TEXTS)), paths=paths)
        held.append(world.pool.held)
        assert world.stats.paths_without_room == 0
    assert held[0] == held[1]
    chains = world.draft(TEXTS, planned(step_of(TEXTS)))
    given = []
    for left in (0, 3, 5, 99):
        world = World()
        while world.pool.available > held[0] + left:
            assert world.pool.grow(BlockTable(), SIZE)
        drafts = world.draft(TEXTS, planned(step_of(TEXTS)), paths=3)
        for name, draft in drafts.items():
            assert draft.tokens == chains[name].tokens
        given.append(sum(len(ranks) > 1 for draft in drafts.values() for ranks in fed(draft)))
        assert world.stats.paths_without_room == 6 - given[-1]
    assert given == sorted(set(given))
    assert given[0] == 0
    assert given[-1] == 6


@pytest.mark.parametrize(("recorded", "paths"), [((1, 16), 3), ((1, 8), 2), ((1, 4), 1)])
def test_where_few_places_were_recorded_all_have_fewer_paths(
    recorded: Sequence[int], paths: int
) -> None:
    world = World(graphs=True, recorded=recorded)
    drafts = world.draft(TEXTS, planned(step_of(TEXTS)), paths=3)
    assert all(fed(draft) == expected(paths) for draft in drafts.values())
    assert world.stats.paths_without_room == 3 * (3 - paths)
    assert world.drafter.steps.replays > 0


@pytest.mark.parametrize("raced", [False, True])
def test_graphs_find_the_same_trees(raced: bool) -> None:
    """CUDA graphs do not change trees with three paths. Each drafter token is counted once."""
    trees = []
    for graphs in (False, True):
        world = World(raced=raced, graphs=graphs)
        drafts = world.draft(TEXTS, planned(step_of(TEXTS, raced=raced)), paths=3)
        trees.append([tree_of(draft) for draft in drafts.values()])
        assert world.stats.drafter_tokens == 3 * (3 * LOOKAHEAD - 1)
    for one, other in zip(*trees, strict=True):
        assert one[:2] == other[:2]
        assert one.values == pytest.approx(other.values)
