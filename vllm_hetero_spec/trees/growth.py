# SPDX-License-Identifier: Apache-2.0
"""Draft trees, grown best-first.

A node's value is the probability that the target goes on with it, as far as the drafter knows. So
values fall along paths, and the expected number of accepted tokens is their sum over the tree: the
best tree of so many nodes is that of the largest values (ERSD's Algorithm 3, with all children
offered at once: the first of them need not be the best).

Where the drafter has another vocabulary, what grows is a tree of its own tokens. Its leaves share
out all that may be written; each is translated as a whole, and a target token is worth all leaves
whose translation begins with its path.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.trees.walk import ROOT


class Children(NamedTuple):
    """Of nodes and the root, as arrays over the m children.

    Attributes:
        parent: int64 [m], numbers of the nodes before them.
        rank: int64 [m], their places among their siblings.
        depth: int64 [m], of the nodes before them.
        shares: float64 [m], their values behind these.
    """

    parent: np.ndarray
    rank: np.ndarray
    depth: np.ndarray
    shares: np.ndarray


class ScoredTree(NamedTuple):
    """A tree of tokens, each behind its parent.

    Attributes:
        tokens: Ids.
        parents: Index of each token's parent, ROOT for one that continues the text itself.
        values: Of each token: at most its parent's, as is the sum of siblings.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]

    @classmethod
    def spelt(cls, texts: Sequence[Sequence[int]], masses: Sequence[float]) -> "ScoredTree":
        """The beginnings of some texts, each worth all the texts that begin with it.

        Args:
            texts: Target ids.
            masses: Probability of each; at most 1 together.
        """
        tree, known = cls([], [], []), dict[tuple[int, int], int]()
        for text, mass in zip(texts, masses, strict=True):
            node = ROOT
            for token in text:
                parent, node = node, known.setdefault((node, token), len(known))
                if node == len(tree.tokens):
                    tree.add(parent, token, 0.0)
                tree.values[node] += mass
        return tree

    def children(self) -> Children:
        """All tokens as children; of siblings, those in front are taken for the likelier ones."""
        ranks: list[int] = []
        depths: list[int] = []
        shares: list[float] = []
        born = [0] * (len(self.tokens) + 1)
        for parent, value in zip(self.parents, self.values, strict=True):
            ranks.append(born[parent])
            born[parent] += 1
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            shares.append(value / (self.values[parent] or 1.0) if parent >= 0 else value)
        numbers = np.array(self.parents, np.int64) + 1
        return Children(
            numbers, np.array(ranks, np.int64), np.array(depths, np.int64), np.array(shares)
        )

    def revalued(self, shares: Sequence[float]) -> "ScoredTree":
        """The same tokens, each with another share of its parent's value."""
        values: list[float] = []
        for parent, share in zip(self.parents, shares, strict=True):
            values.append(share * values[parent] if parent >= 0 else share)
        return self._replace(values=values)

    def tested(self, emitted: Sequence[int]) -> tuple[list[int], list[bool]]:
        """What the target has said of the tree: the children of the nodes that it came by.

        Args:
            emitted: Tokens behind the text, chosen by the target.

        Returns:
            The children, and which of them were next.
        """
        children, taken, at = list[int](), list[bool](), ROOT
        for token in emitted:
            own = [node for node, parent in enumerate(self.parents) if parent == at]
            right = [self.tokens[node] == token for node in own]
            children += own
            taken += right
            if not any(right):
                break
            at = own[right.index(True)]
        return children, taken

    def add(self, parent: int, token: int, value: float) -> None:
        """A token more."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)

    def best(self, count: int) -> "ScoredTree":
        """The best tree of so many tokens, or all of them, the most valuable first."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.values[node], node))
        return self.only(order[:count])

    def only(self, nodes: Sequence[int]) -> "ScoredTree":
        """Some of the tokens, in this order: each behind its parent, which is one of them."""
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return ScoredTree(
            [self.tokens[node] for node in nodes],
            [place[self.parents[node]] for node in nodes],
            [self.values[node] for node in nodes],
        )


class TreeCandidates(NamedTuple):
    """What was found of a request's continuation; its draft is a part of it.

    Attributes:
        tree: In target tokens.
        leads: Where they are raced for, by how much the first arrival leads each, in logarithms;
            None where the target takes the likeliest.
        shares: Where they are raced for, the probability of each in its row.
    """

    tree: ScoredTree
    leads: Sequence[float] | None = None
    shares: Sequence[float] = ()


class TreeBuilder:
    """A tree under way: what is known of a request's continuation.

    Behind a node that was fed its children are known, and what they leave is that of all others.

    Args:
        ends: Tokens that nothing follows.

    Attributes:
        tree: All nodes, whether they will be in a draft or not.
    """

    def __init__(self, ends: Collection[int] = ()) -> None:
        self.tree = ScoredTree([], [], [])
        self._ends = ends
        self._unfed = {ROOT}
        self._rest: dict[int, float] = {}  # of each fed node, what its children leave

    def offer(self, node: int, tokens: Sequence[int], shares: Sequence[float]) -> list[int]:
        """A node, or the ROOT, was fed: some of its children.

        Args:
            node: Not fed before.
            tokens: Different ones.
            shares: Probability of each behind the node; at most 1 together.

        Returns:
            The children.
        """
        tree, first = self.tree, len(self.tree.tokens)
        self._unfed.discard(node)
        self._rest[node] = value = self._value(node)
        for child, (token, share) in enumerate(zip(tokens, shares, strict=True), first):
            tree.add(node, token, value * min(share, 1.0))
            self._rest[node] -= tree.values[child]
            if token not in self._ends:
                self._unfed.add(child)
        return list(range(first, len(tree.tokens)))

    def to_feed(self, path: Sequence[int], node: int | None = ROOT) -> int | None:
        """Where tokens behind a node lead; None where that is not known, was fed, or is an end."""
        for token in path:
            node = None if node is None else self._child(node, token)
        return node if node in self._unfed else None

    def _child(self, node: int, token: int) -> int | None:
        """The child of a node that a token leads to."""
        edges = zip(self.tree.tokens, self.tree.parents, strict=True)
        return next((child for child, edge in enumerate(edges) if edge == (token, node)), None)

    def _value(self, node: int) -> float:
        return 1.0 if node == ROOT else self.tree.values[node]

    def path(self, node: int) -> list[int]:
        """The tokens up to a node."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.tree.tokens[node])
            node = self.tree.parents[node]
        return path[::-1]

    def leaves(self, most: int) -> Iterator[tuple[list[int], float]]:
        """Paths that share out all that may follow, and their masses, the likeliest first.

        Args:
            most: Nodes without children at most; smaller ones count with what they continue.
        """
        tree, rest = self.tree, dict(self._rest)
        childless = [node for node in range(len(tree.tokens)) if node not in rest]
        childless.sort(key=lambda node: (-tree.values[node], node))
        for node in childless[most:]:
            rest[tree.parents[node]] += tree.values[node]
        masses = [(node, tree.values[node]) for node in childless[:most]] + list(rest.items())
        for node, mass in sorted(masses, key=lambda leaf: -leaf[1]):
            if mass > 0 and node != ROOT:
                yield self.path(node), mass
