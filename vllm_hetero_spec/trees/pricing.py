# SPDX-License-Identifier: Apache-2.0
"""Which nodes of proposed trees are worth the rows that verify them.

A node brings its value in tokens and costs a row. Each child of a node but one opens a side
sequence besides, which reads the text anew and feeds some tokens again. A node's worth is what it
and the best of what is behind it bring beyond that.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_PRECISE = 0.002  # tokens: a price is found as well as it is known


class PricedTree(NamedTuple):
    """A proposed tree.

    Attributes:
        parents: Of each token, one before it, -1 for one that continues the text itself.
        values: In tokens; at most the parent's.
        branches: Tokens that it costs to open a side sequence with the token, beside its rows.
        again: Rows that this feeds again.
    """

    parents: Sequence[int]
    values: Sequence[float]
    branches: Sequence[float]
    again: Sequence[int]


def trim(trees: Sequence[PricedTree], row_price: Callable[[int], float]) -> list[list[bool]]:
    """Which tokens of a batch to verify; lossless where they are certain.

    Args:
        trees: Of its requests.
        row_price: Tokens that one row more has to bring, given those before it; not falling.
    """

    def kept_at(row: float) -> tuple[list[list[bool]], int]:
        kept = [worth_their_rows(tree, row) for tree in trees]
        return kept, sum(map(rows_of, trees, kept))

    low = row_price(0)
    kept, rows = kept_at(low)
    high = min(row_price(max(rows - 1, 0)), 1.0)  # no token is worth more than one
    if high <= low:
        return kept
    # At `high` all that is kept pays for the last row too, at `low` it does not.
    kept, _ = kept_at(high)
    while high - low > _PRECISE:
        middle = (low + high) / 2
        found, rows = kept_at(middle)
        if row_price(max(rows - 1, 0)) > middle:
            low = middle
        else:
            high, kept = middle, found
    return kept


def rows_of(tree: PricedTree, kept: Sequence[bool]) -> int:
    """Rows that the kept tokens take, with what is fed again."""
    nodes = [node for node, keep in enumerate(kept) if keep]
    # The first child of a parent opens no side sequence, each further one does.
    first = {tree.parents[node]: node for node in reversed(nodes)}
    return len(nodes) + sum(tree.again[node] for node in nodes if first[tree.parents[node]] != node)


def worth_their_rows(tree: PricedTree, row: float) -> list[bool]:
    """Which tokens are in the best tree where a row costs so many tokens.

    By induction from the leaves: what a child is worth does not depend on which of its siblings
    opens no side sequence, so the one that is worth most does not.
    """
    size = len(tree.parents)
    worth = [value - row for value in tree.values]
    prices = [side + row * again for side, again in zip(tree.branches, tree.again, strict=True)]
    free = [-1] * (size + 1)  # of each node and the root, the child that opens no side sequence
    for node in reversed(range(size)):
        # All children come behind: those of `node` have been added to what it is worth.
        parent = tree.parents[node]
        best = free[parent]
        if best < 0 or worth[node] > worth[best]:
            free[parent] = node
        if parent >= 0:
            worth[parent] += _paid(worth[node], prices[node])
            was = _saved(worth[best], prices[best]) if best >= 0 else 0.0
            now = free[parent]
            worth[parent] += _saved(worth[now], prices[now]) - was
    kept: list[bool] = []
    for node, parent in enumerate(tree.parents):
        price = 0.0 if free[parent] == node else prices[node]
        kept.append((parent < 0 or kept[parent]) and worth[node] > price)
    return kept


def _paid(worth: float, price: float) -> float:
    """What a child brings that opens a side sequence."""
    return max(0.0, worth - price)


def _saved(worth: float, price: float) -> float:
    """What it brings more if it opens none."""
    return max(0.0, worth) - _paid(worth, price)
