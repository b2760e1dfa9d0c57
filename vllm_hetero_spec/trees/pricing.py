# SPDX-License-Identifier: Apache-2.0
"""Selection of the tree nodes that are worth the rows that verify them.

A node gains its value in tokens and costs a row. One child of a node continues its sequence; every
other child opens a branch, which reads the context again and recomputes some tokens. The worth of a
node is the net gain of itself and of its best descendants.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_PRECISE = 0.002  # tokens; the search for a price stops at this precision


class PricedTree(NamedTuple):
    """A proposed tree; lists have one entry per token.

    Attributes:
        parents: Index of an earlier token; -1 if the token directly continues the request.
        values: Expected accepted tokens; at most the parent's.
        branch: Price, in tokens, to open a branch, without its rows.
        again: Rows that a branch recomputes if the token opens it.
    """

    parents: Sequence[int]
    values: Sequence[float]
    branch: float
    again: Sequence[int]


def trim(trees: Sequence[PricedTree], row_price: Callable[[int], float]) -> list[list[bool]]:
    """Return for each token of a batch whether to verify it; lossless if tokens are certain.

    `row_price` returns the price in tokens of the next row from the number of rows so far; it must
    not decrease.
    """

    def kept_at(row: float) -> tuple[list[list[bool]], int]:
        kept = [worth_their_rows(tree, row) for tree in trees]
        return kept, sum(map(rows_of, trees, kept))

    low = row_price(0)
    kept, rows = kept_at(low)
    high = min(row_price(max(rows - 1, 0)), 1.0)  # no token is worth more than one
    if high <= low:
        return kept
    # Invariant: kept tokens pay for the last row at price `high`, but not at `low`.
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
    """Return the number of rows of the kept tokens, including recomputed ones."""
    nodes = [node for node, keep in enumerate(kept) if keep]
    # The first child of a parent opens no branch, each further one does.
    first = {tree.parents[node]: node for node in reversed(nodes)}
    return len(nodes) + sum(tree.again[node] for node in nodes if first[tree.parents[node]] != node)


def worth_their_rows(tree: PricedTree, row: float) -> list[bool]:
    """Return for each token whether it is in the best tree, if a row costs `row` tokens.

    The worth of a child does not depend on which sibling opens no branch. So nodes are computed
    from the leaves up, and the child with the largest worth opens no branch.
    """
    size = len(tree.parents)
    worth = [value - row for value in tree.values]
    prices = [tree.branch + row * again for again in tree.again]
    free = [-1] * (size + 1)  # for each node and the root, the child that opens no branch
    for node in reversed(range(size)):
        # Children come after their parents, so the worth of all children of this node is known.
        if (best := free[node]) >= 0:  # opens no branch
            worth[node] += max(0.0, worth[best]) - max(0.0, worth[best] - prices[best])
        parent = tree.parents[node]
        if parent >= 0:  # as if the node opened a branch
            worth[parent] += max(0.0, worth[node] - prices[node])
        if free[parent] < 0 or worth[node] > worth[free[parent]]:
            free[parent] = node
    kept: list[bool] = []
    for node, parent in enumerate(tree.parents):
        price = 0.0 if free[parent] == node else prices[node]
        kept.append((parent < 0 or kept[parent]) and worth[node] > price)
    return kept
