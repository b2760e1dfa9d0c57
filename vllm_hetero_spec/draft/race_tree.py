# SPDX-License-Identifier: Apache-2.0
"""Draft trees where tokens are raced for: the children of a node are the first arrivals there.

The drafter's row, carried over to the target's tokens, is raced by the clocks that the target will
race its own by. Behind a child the drafter is fed a token of its own that the child begins, the
likeliest; what that spells further is certain.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.draft.tree_growth import Growth
from vllm_hetero_spec.verify.race import first_arrivals

# P[each is next] of children of some nodes: their parents' numbers, their ranks and depths, by how
# much the first arrival leads each, in logarithms, and their probabilities under the row.
Chances = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Arrivals(NamedTuple):
    """What comes first in the races of some rows.

    Attributes:
        tokens: int64 [n, m], target ids.
        fed: int64 [n, m], the drafter token to be fed behind each.
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
        seeds: torch.Tensor,
        places: torch.Tensor,
        count: int,
    ) -> "Arrivals":
        """Races by a drafter's rows.

        Args:
            q: float32 [n, V_D] or wider, what the drafter would draw from.
            tokens: Which target token each drafter token proposes.
            seeds: int64 [n], of the rows' requests.
            places: int64 [n], index in the output of the token that is raced for.
            count: Arrivals that are looked at, m.
        """
        psi = tokens.draft_probs(q)
        ids, speeds = first_arrivals(psi, seeds, places, count)
        return cls(ids, tokens.likeliest(q).gather(1, ids), speeds, psi.gather(1, ids))


def offer_arrivals(
    growth: Growth,
    node: int,
    depth: int,
    arrivals: Sequence[np.ndarray],
    spell: Callable[[int], Sequence[int]],
    chances: Chances,
) -> dict[int, int]:
    """Give a node its children, and these what their drafter tokens spell further.

    Args:
        growth: A request's tree of target tokens.
        node: Of it, or the ROOT; not fed before.
        depth: Of the node.
        arrivals: `Arrivals` of its row, [m] each, on the host.
        spell: All target tokens that a drafter token proposes.
        chances: What values children.

    Returns:
        The drafter token to be fed behind each of the new nodes that may be fed.
    """
    count = int(np.count_nonzero(arrivals[2]))
    tokens, fed, speeds, shares = (column[:count] for column in arrivals)
    nought = np.zeros(count, np.int64)
    leads = np.log(speeds[:1] / speeds)
    values = chances(nought, np.arange(count), nought + depth, leads, shares)
    children = growth.offer(node, tokens.tolist(), values.tolist())
    spelt = [spell(token)[1:] for token in fed.tolist()]
    longest = max(map(len, spelt), default=0)
    nought, ahead = np.zeros(longest, np.int64), np.arange(longest)
    certain = chances(ahead, nought, depth + 1 + ahead, np.zeros(longest), np.ones(longest))
    carried = {}
    for child, rest, drafter_token in zip(children, spelt, fed.tolist(), strict=True):
        last = child
        for token, value in zip(rest, certain.tolist(), strict=False):
            (last,) = growth.offer(last, [token], [value])
        carried[last] = drafter_token
    return carried
