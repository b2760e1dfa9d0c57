# SPDX-License-Identifier: Apache-2.0
"""Best-first growth finds the best tree for given probabilities of the drafter."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import reference as ref
import torch
from goodness import follows
from test_layout import paths_of
from toy_worlds import World, worlds

from vllm_hetero_spec.draft.sampling import Arrivals
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.trees.growth import RaceTreeBuilder, ScoredTree, TreeBuilder
from vllm_hetero_spec.trees.walk import ROOT, TreeBatch, greedy_walk
from vllm_hetero_spec.verify.race import first_arrivals, race

Path = tuple[int, ...]
RANKS = 3


def best_of_all(value: Callable[[Path], float], count: int) -> float:
    """Return the largest sum of values over all trees of `count` paths of ranks."""
    trees: set[frozenset[Path]] = {frozenset()}
    for _ in range(count):
        trees = {
            tree | {(*head, rank)}
            for tree in trees
            for head in [(), *tree]
            for rank in range(RANKS)
            if (*head, rank) not in tree
        }
    return max(sum(map(value, tree)) for tree in trees)


def next_siblings(value: Callable[[Path], float], count: int) -> float:
    """Algorithm 3 as printed: a taken path adds its first child and its next sibling."""
    heap: list[tuple[float, Path]] = [(-value((0,)), (0,))]
    total = 0.0
    for _ in range(count):
        gain, path = heapq.heappop(heap)
        total -= gain
        after = [(*path, 0)] + [(*path[:-1], path[-1] + 1)] * (path[-1] + 1 < RANKS)
        for other in after:
            heapq.heappush(heap, (-value(other), other))
    return total


def random_values(generator: np.random.Generator, *, ordered: bool) -> Callable[[Path], float]:
    shares: dict[Path, np.ndarray] = {}

    def value(path: Path) -> float:
        if not path:
            return 1.0
        if path[:-1] not in shares:
            law = generator.dirichlet([0.5] * (RANKS + 1))[:RANKS]
            shares[path[:-1]] = np.sort(law)[::-1] if ordered else law
        return value(path[:-1]) * float(shares[path[:-1]][path[-1]])

    return value


def grow(
    growth: TreeBuilder, rows: int, children: Callable[[int], tuple[Sequence[int], Sequence[float]]]
) -> None:
    """Feed the likeliest node, `rows` times."""
    waiting = [ROOT]
    for _ in range(rows):
        node = max(waiting, key=lambda node: 1.0 if node == ROOT else growth.tree.values[node])
        waiting.remove(node)
        waiting += growth.offer(node, *children(node))


def grown(value: Callable[[Path], float], count: int) -> ScoredTree:
    """Return the best tree of `count` nodes, grown with `count` rows of the drafter."""

    def children(node: int) -> tuple[Sequence[int], Sequence[float]]:
        path = tuple(growth.path(node))
        return range(RANKS), [value((*path, rank)) / value(path) for rank in range(RANKS)]

    growth = TreeBuilder()
    grow(growth, count, children)
    return growth.tree.best(count)


@pytest.mark.parametrize("ordered", [True, False])
def test_the_best_tree(ordered: bool) -> None:
    """Each node needs one row of the drafter. The corrected reference finds the best tree too."""
    generator = np.random.default_rng(0)
    short = 0
    for _ in range(40):
        value, count = random_values(generator, ordered=ordered), int(generator.integers(2, 6))
        best = best_of_all(value, count)
        tree = grown(value, count)
        assert sum(tree.values) == pytest.approx(best, abs=1e-12)
        assert len(tree.tokens) == count
        assert all(parent < node for node, parent in enumerate(tree.parents))
        named = ref.best_tree(value, RANKS, count)
        assert sum(map(value, named)) == pytest.approx(best, abs=1e-12)
        short += next_siblings(value, count) < best - 1e-9
    assert short == 0 if ordered else short > 30


def test_nothing_follows_an_end() -> None:
    growth = TreeBuilder(ends={2})
    first, _ = growth.offer(ROOT, [1, 2], [0.3, 0.6])
    assert (growth.to_feed([1]), growth.to_feed([2])) == (first, None)
    assert growth.to_feed([]) is None  # it has been fed already


# ------------------------------------------------------------------------------- text


def explored(world: World, length: int) -> TreeBuilder:
    """Return all drafts of `length` tokens, without those that begin with drafter token 0."""
    growth, q, nodes = TreeBuilder(), world.q_after(()), [ROOT]
    for _ in range(length):
        rows = [q(tuple(growth.path(node))) for node in nodes]
        offered = [
            growth.offer(node, range(1, len(row)), row[1:].tolist())
            for node, row in zip(nodes, rows, strict=True)
        ]
        nodes = [child for children in offered for child in children]
    return growth


def test_values_of_translated_text() -> None:
    """The value of a path is the probability of all texts that begin with it, in all spellings."""
    for world in worlds(4):
        growth = explored(world, 3)
        paths, masses = zip(*growth.leaves(10_000), strict=True)
        first = float(world.q_after(())(())[0])
        assert sum(masses) == pytest.approx(1 - first)
        texts = [world.pair.tau(world.pair.spell(path)) for path in paths]
        tree = ScoredTree.spelt(texts, masses)
        spelt = paths_of(tree.tokens, tree.parents)
        assert len(set(spelt)) == len(spelt)
        for path, value in zip(spelt, tree.values, strict=True):
            starts = [text[: len(path)] == path for text in texts]
            assert value == pytest.approx(float(np.dot(masses, starts)))
        check_shares(tree)
        # Nodes too unlikely to be translated count for the node that they continue.
        few = list(growth.leaves(5))
        assert sum(mass for _, mass in few) == pytest.approx(1 - first)
        assert sum(len(path) == 3 for path, _ in few) == 5


def check_shares(tree: ScoredTree) -> None:
    """Siblings have at most their parent's value together; first tokens have at most 1."""
    sums = [0.0] * (len(tree.tokens) + 1)
    for parent, value in zip(tree.parents, tree.values, strict=True):
        sums[parent] += value
    assert all(a <= b + 1e-9 for a, b in zip(sums, [*tree.values, 1.0], strict=True))


def test_only_some_of_a_tree() -> None:
    tree = ScoredTree.spelt([[1, 2, 3], [1, 4], [5]], [0.5, 0.2, 0.1])
    assert tree == ScoredTree([1, 2, 3, 4, 5], [-1, 0, 1, 0, -1], [0.7, 0.5, 0.5, 0.2, 0.1])
    assert tree.best(2) == ScoredTree([1, 2], [-1, 0], [0.7, 0.5])
    assert tree.only([4, 0, 3]) == ScoredTree([5, 1, 4], [-1, -1, 1], [0.1, 0.7, 0.2])


# ------------------------------------------------------------------------------- races


def test_first_arrivals() -> None:
    """Tokens of rate 0 come last. The second arrival has the distribution of the other tokens."""
    p = torch.tensor([0.5, 0.0, 0.3, 0.2]).repeat(20_000, 1)
    seeds, places = torch.arange(20_000), torch.full((20_000,), 3)
    ids, speeds = first_arrivals(p, seeds, places, 4)
    assert torch.equal(ids[:, 0], race(p, seeds, places))
    assert (speeds[:, :-1] >= speeds[:, 1:]).all()
    assert (ids[:, 3] == 1).all()
    assert not speeds[:, 3].any()
    pairs = Counter(map(tuple, ids[:, :2].tolist()))
    law = {
        (a, b): float(p[0, a] * p[0, b] / (1 - p[0, a]))
        for a, b in product(range(4), repeat=2)
        if a != b
    }
    assert follows(pairs, law)


def test_the_likeliest_token_is_fed_after_an_arrival() -> None:
    """It is the likeliest of the drafter tokens that propose the target token."""
    first = torch.tensor([2, 0, 2, -1, 0, 4])
    q = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2, 0.0], [0.4, 0.0, 0.1, 0.1, 0.3, 0.1]])
    found = TokenMap(first, 5).likeliest(q)
    assert found[:, [0, 2, 4]].tolist() == [[1, 2, 5], [4, 0, 5]]
    assert (found[:, [1, 3]] == 6).all()


def test_a_race_tree_of_the_target_itself() -> None:
    """If the drafter is the target, the whole main path is accepted."""
    size, depth, seed, place = 6, 4, 11, 5
    generator = np.random.default_rng(2)
    rows: dict[Path, torch.Tensor] = {}

    def row(path: Path) -> torch.Tensor:
        return rows.setdefault(path, torch.tensor(generator.dirichlet([0.5] * size)).float())

    growth, node = RaceTreeBuilder(lambda d: [d], by_lead), ROOT
    for _ in range(depth):
        path, first = tuple(growth.path(node)), len(growth.tree.tokens)
        at = torch.tensor([seed]), torch.tensor([place + len(path)])
        probs = row(path)[None]
        ids, speeds = first_arrivals(probs, *at, 3)
        arrivals = Arrivals(ids, ids, speeds, probs.gather(1, ids))
        on_host = [column[0].numpy() for column in arrivals]
        growth.arrived(node, on_host)
        node = first
    tree = growth.tree.best(12)
    check_shares(tree)
    for feed, node in growth.feeds.items():
        assert feed == (growth.tree.tokens[node], growth.tree.parents[node])
    batch = TreeBatch.of(torch.tensor([0, *tree.tokens]), [tree.parents])
    paths = [(), *paths_of(tree.tokens, tree.parents)]
    places = torch.tensor([place + len(path) for path in paths])
    won = race(torch.stack(list(map(row, paths))), torch.full_like(places, seed), places)
    verdict = greedy_walk(batch, won)
    assert verdict.accepted.tolist() == [depth]


def by_lead(
    parent: np.ndarray, rank: np.ndarray, depth: np.ndarray, leads: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    return np.where(rank == 0, 0.9, 0.04)


def test_later_tokens_of_a_spelling_are_certain() -> None:
    spellings = {0: [7], 1: [8, 9, 7]}
    columns = [np.array([8, 7, 3]), np.array([1, 0, 5]), np.array([2.0, 1.0, 0.0])]
    columns.append(np.array([0.5, 0.4, 0.1]))
    growth = RaceTreeBuilder(spellings.__getitem__, by_lead)
    growth.arrived(ROOT, columns)
    assert [tuple(growth.path(node)) for node in growth.feeds.values()] == [(8, 9, 7), (7,)]
    assert list(growth.feeds) == [(1, ROOT), (0, ROOT)]
    assert [growth.to_feed([token]) for token in (1, 0)] == list(growth.feeds.values())
    assert growth.tree.tokens == [8, 7, 9, 7]
    assert growth.leads == pytest.approx([0.0, np.log(2.0), 0.0, 0.0])
    assert growth.shares == [0.5, 0.4, 1.0, 1.0]
    check_shares(growth.tree)
