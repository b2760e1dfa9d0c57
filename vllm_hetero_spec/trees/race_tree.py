# SPDX-License-Identifier: Apache-2.0
"""Draft trees with exponential races: the children of a node are the first arrivals of its race.

The draft_probs of a row race on the same clocks as the target's row will. After a child, the
drafter is fed its most likely token that proposes the child. Further target tokens that this token
spells are certain.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from vllm_hetero_spec.trees.growth import TreeBuilder

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
