# SPDX-License-Identifier: Apache-2.0
"""Draft trees, grown best-first.

The value of a node estimates the probability that the target emits its path. Values decrease along
paths, and their sum is the expected number of accepted tokens. So the best tree of n nodes has the
n largest values (ERSD's Algorithm 3, but all children are offered at once, because the first need
not be the best).

If the vocabularies differ, a tree of drafter tokens is grown. Its leaves partition the possible
continuations. Each leaf is translated as a whole, and the value of a target token is the sum over
all leaves whose translation begins with its path.

With exponential races the children of a node are the first arrivals of its race. The draft_probs of
a row race on the same clocks as the target's row will. After a child, the drafter is fed its most
likely token that proposes the child. Further target tokens that this token spells are certain.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.text.context import Context
from vllm_hetero_spec.trees.walk import ROOT


class Children(NamedTuple):
    """The m children of nodes and of the root.

    Attributes:
        parent: int64 [m], numbers of the parents; 0 for the root.
        rank: int64 [m], ranks among their siblings.
        depth: int64 [m], depths of the parents.
        shares: float64 [m], their values divided by the parents'.
    """

    parent: np.ndarray
    rank: np.ndarray
    depth: np.ndarray
    shares: np.ndarray


class ScoredTree(NamedTuple):
    """A tree of tokens; each one comes after its parent.

    Attributes:
        parents: Index of each token's parent; ROOT if it directly continues the request.
        values: Value of each token. Siblings sum to at most their parent's value.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]

    @classmethod
    def spelt(cls, texts: Sequence[Sequence[int]], masses: Sequence[float]) -> "ScoredTree":
        """Build the prefix tree of some continuations with their probabilities (sum at most 1)."""
        tree, known = cls([], [], []), dict[tuple[int, int], int]()
        for text, mass in zip(texts, masses, strict=True):
            node = ROOT
            for token in text:
                parent, node = node, known.setdefault((node, token), len(known))
                if node == len(tree.tokens):
                    tree.add(parent, token, 0.0)
                tree.values[node] += mass
        return tree

    @property
    def depths(self) -> list[int]:
        """Depth of each token, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return depths

    def children(self) -> Children:
        """Return all tokens as children; siblings have ranks in the order of the tree."""
        ranks, shares, born = list[int](), list[float](), [0] * (len(self.tokens) + 1)
        for parent, value in zip(self.parents, self.values, strict=True):
            ranks.append(born[parent])
            born[parent] += 1
            shares.append(value / (self.values[parent] or 1.0) if parent >= 0 else value)
        parents = np.array(self.parents, np.int64) + 1
        depths = np.array(self.depths, np.int64) - 1
        return Children(parents, np.array(ranks, np.int64), depths, np.array(shares))

    def revalued(self, shares: Sequence[float]) -> "ScoredTree":
        """Return the tree with new shares of the parents' values."""
        values: list[float] = []
        for parent, share in zip(self.parents, shares, strict=True):
            values.append(share * values[parent] if parent >= 0 else share)
        return self._replace(values=values)

    def tested(self, emitted: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Return the children of the nodes that the target visited.

        Also return for each child whether the target chose it; `emitted` are the chosen tokens.
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
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)

    def best(self, count: int) -> "ScoredTree":
        """Return the best tree of at most `count` tokens, in order of decreasing value."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.values[node], node))
        return self.only(order[:count])

    def only(self, nodes: Sequence[int]) -> "ScoredTree":
        """Return a tree of some nodes in this order; each must come after its parent."""
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return ScoredTree(
            [self.tokens[node] for node in nodes],
            [place[self.parents[node]] for node in nodes],
            [self.values[node] for node in nodes],
        )


class TreeCandidates(NamedTuple):
    """Candidate tokens of a request, from which its draft is selected.

    Attributes:
        leads: With races, log of the first arrival's lead over each token; None if the target is
            greedy.
        shares: With races, probability of each token in its row.
    """

    tree: ScoredTree
    leads: Sequence[float] | None = None
    shares: Sequence[float] = ()


class TreeBuilder:
    """Grows the tree of candidates of one request.

    The children of a fed node are known; unknown children have the rest of its value.
    """

    def __init__(self, ends: Collection[int] = ()) -> None:
        self.tree = ScoredTree([], [], [])
        self._ends = ends
        self._unfed = {ROOT}
        self._rest: dict[int, float] = {}  # value of each fed node minus that of its children

    def offer(self, node: int, tokens: Sequence[int], shares: Sequence[float]) -> list[int]:
        """Add and return children of a node (or ROOT) that was fed for the first time.

        Args:
            tokens: Different tokens.
            shares: Probability of each token after the node; their sum is at most 1.
        """
        tree, first = self.tree, len(self.tree.tokens)
        self._unfed.discard(node)
        self._rest[node] = value = 1.0 if node == ROOT else tree.values[node]
        for child, (token, share) in enumerate(zip(tokens, shares, strict=True), first):
            tree.add(node, token, value * min(share, 1.0))
            self._rest[node] -= tree.values[child]
            if token not in self._ends:
                self._unfed.add(child)
        return list(range(first, len(tree.tokens)))

    def offer_along(
        self,
        path: Sequence[int],
        tokens: Sequence[Sequence[int]],
        shares: Sequence[Sequence[float]],
        node: int = ROOT,
    ) -> None:
        """Offer the likely tokens of each row along a path that begins at a node.

        `tokens` are the most likely tokens of each row, including the path's.
        """
        for token, beside, probabilities in zip(path, tokens, shares, strict=False):
            node = self.offer(node, beside, probabilities)[beside.index(token)]

    def to_feed(self, path: Sequence[int], node: int | None = ROOT) -> int | None:
        """Return the descendant of a node by its path; None if it is unknown, fed or an end."""
        for token in path:
            node = None if node is None else self._child(node, token)
        return node if node in self._unfed else None

    def _child(self, node: int, token: int) -> int | None:
        edges = zip(self.tree.tokens, self.tree.parents, strict=True)
        return next((child for child, edge in enumerate(edges) if edge == (token, node)), None)

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root to a node."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.tree.tokens[node])
            node = self.tree.parents[node]
        return path[::-1]

    def leaves(self, most: int) -> Iterator[tuple[list[int], float]]:
        """Yield paths that partition the possible continuations, with decreasing probabilities.

        At most `most` nodes without children are included; others count as their parents.
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


def text_trees(
    growths: Sequence[TreeBuilder],
    contexts: Sequence[Context],
    limits: Sequence[int],
    to_target: Callable[..., list[list[int]]],
    leaves: int,
) -> list[ScoredTree]:
    """Translate trees of drafter tokens, one per request, to trees in order of decreasing value.

    Args:
        limits: Largest depth of each tree, in target tokens.
        to_target: `Bridge.to_target`; translates all paths in one call.
        leaves: Largest number of unfed nodes to translate per request, in addition to its fed ones.
    """
    found = [list(growth.leaves(leaves)) for growth in growths]
    owners = [place for place, own in enumerate(found) for _ in own]
    texts = iter(
        to_target(
            [contexts[place] for place in owners],
            [path for own in found for path, _ in own],
            [limits[place] for place in owners],
        )
    )
    trees = [
        ScoredTree.spelt([next(texts) for _ in own], [mass for _, mass in own]) for own in found
    ]
    return [tree.best(len(tree.tokens)) for tree in trees]


# P[the child is next] of each child, from parents' numbers, ranks, depths, log leads of the first
# arrival, and probabilities in the row.
Chances = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class RaceTreeBuilder(TreeBuilder):
    """Grows a tree of target tokens for a request with races.

    Attributes:
        feeds: Nodes that may be fed, by (drafter token, the node or ROOT whose row it comes from).
        leads: Log of the first arrival's lead over each node.
        shares: Probability of each node in its row; 1 for a certain token.
    """

    def __init__(
        self, spell: Callable[[int], Sequence[int]], chances: Chances, ends: Collection[int] = ()
    ) -> None:
        super().__init__(ends)
        self._spell, self._chances = spell, chances
        self.feeds: dict[tuple[int, int], int] = {}
        self.leads: list[float] = []
        self.shares: list[float] = []

    def arrived(self, node: int, arrivals: Sequence[np.ndarray]) -> None:
        """Add a node's children, and the further target tokens of their drafter tokens.

        `arrivals` are the fields of `Arrivals` for the node's row, [m] each, on the host.
        """
        count = int(np.count_nonzero(arrivals[2]))
        tokens, fed, speeds, shares = (column[:count] for column in arrivals)
        leads = np.log(speeds[:1] / speeds)
        numbers, depth = np.arange(count), len(self.path(node))
        values = self._chances(0 * numbers, numbers, 0 * numbers + depth, leads, shares)
        children = self.offer(node, tokens.tolist(), values.tolist())
        self.leads += leads.tolist()
        self.shares += shares.tolist()
        spelt = [self._spell(token)[1:] for token in fed.tolist()]
        ahead = np.arange(max(map(len, spelt), default=0))
        # Each of these tokens is the only child of its parent.
        certain = self._chances(ahead, 0 * ahead, ahead + depth + 1, 0.0 * ahead, ahead**0.0)
        for child, rest, drafter_token in zip(children, spelt, fed.tolist(), strict=True):
            last = child
            for token, value in zip(rest, certain.tolist(), strict=False):
                (last,) = self.offer(last, [token], [value])
                self.leads.append(0.0)
                self.shares.append(1.0)
            self.feeds.setdefault((drafter_token, node), last)

    def _child(self, node: int, token: int) -> int | None:
        return self.feeds.get((token, node))
