# SPDX-License-Identifier: Apache-2.0
"""Draft trees where tokens are raced for: the children of a node are the first arrivals there.

The drafter's row, carried over to the target's tokens, is raced by the clocks that the target will
race its own by. Behind a child the drafter is fed a token of its own that the child begins, the
likeliest; what that spells further is certain.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.trees.growth import TreeBuilder
from vllm_hetero_spec.verify.race import first_arrivals

# P[each is next] of children of some nodes: their parents' numbers, their ranks and depths, by how
# much the first arrival leads each, in logarithms, and their probabilities under the row.
Chances = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Arrivals(NamedTuple):
    """What comes first in the races of some rows.

    Attributes:
        tokens: int64 [n, m], target ids.
        fed: int64 [n, m], the drafter token to be fed behind each; any where nothing arrives.
        speeds: float32 [n, m], 1 / the times of arrival, falling; 0 where nothing arrives.
        shares: float32 [n, m], probabilities of the tokens.
    """

    tokens: torch.Tensor
    fed: torch.Tensor
    speeds: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        tokens: TokenMap,
        psi: torch.Tensor,
        seeds: torch.Tensor,
        places: torch.Tensor,
        count: int,
    ) -> "Arrivals":
        """Races by a drafter's rows.

        Args:
            q: float32 [n, V_D] or wider, what the drafter would draw from.
            tokens: Which target token each drafter token proposes.
            psi: float32 [n, V_T], q carried over by it.
            seeds: int64 [n], of the rows' requests.
            places: int64 [n], index in the output of the token that is raced for.
            count: Arrivals that are looked at, m.
        """
        ids, speeds = first_arrivals(psi, seeds, places, count)
        fed = tokens.likeliest(q).gather(1, ids).clamp_max_(len(tokens.first) - 1)
        return cls(ids, fed, speeds, psi.gather(1, ids))


class RaceFeed(NamedTuple):
    """What gives the row behind a node.

    Attributes:
        token: The drafter's, to be fed,
        behind: and the node, or the ROOT, whose row it came from.
    """

    token: int
    behind: int


class RaceTreeBuilder(TreeBuilder):
    """A tree of target tokens under way.

    Args:
        spell: All target tokens that a drafter token proposes.
        chances: What values children.
        ends: Target tokens that nothing follows.

    Attributes:
        feeds: Of the nodes that may be fed.
        leads: Of each node, by how much the first arrival leads it, in logarithms.
        shares: Of each node, its probability in its row; 1 for what is certain.
    """

    def __init__(
        self,
        spell: Callable[[int], Sequence[int]],
        chances: Chances,
        ends: Collection[int] = (),
    ) -> None:
        super().__init__(ends)
        self._spell, self._chances = spell, chances
        self.feeds: dict[int, RaceFeed] = {}
        self.leads: list[float] = []
        self.shares: list[float] = []

    def arrived(self, node: int, arrivals: Sequence[np.ndarray]) -> None:
        """A node's children, and what their drafter tokens spell further.

        Args:
            node: Of the tree, or the ROOT; not fed before.
            arrivals: `Arrivals` of its row, [m] each, on the host.
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
        # Each of these is the only child of its parent.
        certain = self._chances(ahead, 0 * ahead, ahead + depth + 1, 0.0 * ahead, ahead**0.0)
        for child, rest, drafter_token in zip(children, spelt, fed.tolist(), strict=True):
            last = child
            for token, value in zip(rest, certain.tolist(), strict=False):
                (last,) = self.offer(last, [token], [value])
                self.leads.append(0.0)
                self.shares.append(1.0)
            self.feeds[last] = RaceFeed(drafter_token, node)

    def _child(self, node: int, token: int) -> int | None:
        """What a drafter token spells behind a node."""
        return next((child for child, feed in self.feeds.items() if feed == (token, node)), None)
