# SPDX-License-Identifier: Apache-2.0
"""Trimming of trees finds the most valuable choice of nodes."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from vllm_hetero_spec.trees.pricing import PricedTree, rows_of, trim, worth_their_rows


def random_tree(
    generator: np.random.Generator, size: int, side: float, *, again: bool
) -> PricedTree:
    """Values fall along paths; siblings have at most their parent's value together."""
    parents: list[int] = []
    values: list[float] = []
    depths: list[int] = []
    for node in range(size):
        parent = int(generator.integers(-1, node))
        taken = sum(v for v, p in zip(values, parents, strict=True) if p == parent)
        left = (values[parent] if parent >= 0 else 1.0) - taken
        parents.append(parent)
        values.append(left * float(generator.uniform(0.2, 0.9)))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    fed = [depth + 1 if again else 0 for depth in depths]
    return PricedTree(parents, values, side, fed)


def worth(tree: PricedTree, kept: list[bool], cost: Callable[[int], float]) -> float:
    """Return the expected tokens of a choice minus its cost."""
    nodes = [node for node, keep in enumerate(kept) if keep]
    branches = len(nodes) - len({tree.parents[node] for node in nodes})
    brought = sum(tree.values[node] for node in nodes)
    return brought - cost(rows_of(tree, kept)) - tree.branch * branches


def choices(tree: PricedTree) -> list[list[bool]]:
    """Return all sets of nodes that include their ancestors."""
    size = len(tree.parents)
    found = []
    for count in range(size + 1):
        for nodes in map(set, combinations(range(size), count)):
            kept = [node in nodes for node in range(size)]
            if with_ancestors(tree, kept):
                found.append(kept)
    return found


def with_ancestors(tree: PricedTree, kept: list[bool]) -> bool:
    pairs = zip(tree.parents, kept, strict=True)
    return all(parent < 0 or kept[parent] for parent, keep in pairs if keep)


@pytest.mark.parametrize("again", [False, True])
def test_the_best_tree_at_given_prices(again: bool) -> None:
    generator = np.random.default_rng(1)
    for _ in range(150):
        row, side = generator.uniform(0, 0.2, size=2)
        tree = random_tree(generator, 8, side, again=again)
        kept = worth_their_rows(tree, row)
        assert kept in choices(tree)
        best = max(worth(tree, other, lambda rows: rows * row) for other in choices(tree))  # noqa: B023
        assert worth(tree, kept, lambda rows: rows * row) == pytest.approx(best, abs=1e-12)  # noqa: B023


def test_expensive_branches() -> None:
    tree = PricedTree([-1, -1, 0, 1], [0.5, 0.4, 0.3, 0.3], 1.0, [1] * 4)
    assert worth_their_rows(tree, 0.1) == [True, False, True, False]
    assert worth_their_rows(tree._replace(branch=0.1), 0.1) == [True] * 4
    # The child with the most valuable subtree continues its parent's sequence, not the likeliest
    # one.
    deeper = tree._replace(values=[0.5, 0.45, 0.01, 0.44])
    assert worth_their_rows(deeper, 0.1) == [False, True, False, True]


def test_the_most_valuable_nodes_of_a_batch_are_kept() -> None:
    """If each further row costs more, the most valuable nodes are kept until they no longer pay."""
    generator = np.random.default_rng(2)
    for _ in range(50):
        trees = [random_tree(generator, 12, 0.0, again=False) for _ in range(5)]
        start, rise = generator.uniform(0, 0.1), generator.uniform(0, 0.02)
        kept = trim(trees, lambda rows: start + rise * rows)  # noqa: B023
        queue = sorted((value for tree in trees for value in tree.values), reverse=True)
        expected = sum(v >= start + rise * rows for rows, v in enumerate(queue))
        found = sum(map(sum, kept))
        assert expected - 1 <= found <= expected
        chosen = sorted(
            (v for t, k in zip(trees, kept, strict=True) for v in np.array(t.values)[k]),
            reverse=True,
        )
        assert chosen == queue[:found]
        assert all(map(with_ancestors, trees, kept))


def test_prices_of_branches_and_rising_prices_of_rows() -> None:
    """The choice is near the best one, and never worse than keeping nothing."""
    generator = np.random.default_rng(3)
    lost = gained = 0.0
    for _ in range(100):
        tree = random_tree(generator, 8, float(generator.uniform(0, 0.2)), again=True)
        start, rise = generator.uniform(0, 0.1), generator.uniform(0, 0.05)

        def cost(rows: int) -> float:
            return sum(start + rise * row for row in range(rows))  # noqa: B023

        (kept,) = trim([tree], lambda rows: start + rise * rows)  # noqa: B023
        found, best = worth(tree, kept, cost), max(worth(tree, k, cost) for k in choices(tree))
        assert found >= -1e-12
        lost += best - found
        gained += best
    assert lost < 0.01 * gained


def test_prices_of_rows_shorten_trees() -> None:
    """Trees become chains if rows are expensive, and stay whole if rows are free."""
    generator = np.random.default_rng(4)
    tree = random_tree(generator, 12, 0.0, again=False)
    assert all(trim([tree], lambda rows: 0.0)[0])
    kept = trim([tree], lambda rows: 0.51)[0]
    parents = [parent for parent, keep in zip(tree.parents, kept, strict=True) if keep]
    assert len(set(parents)) == len(parents)
    assert not any(trim([tree], lambda rows: 1.0)[0])
