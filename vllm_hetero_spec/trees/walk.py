# SPDX-License-Identifier: Apache-2.0
"""Verification of draft trees: from its root on, a tree is followed as far as the target goes it.

The target has computed a row behind every node. What it chooses there is its first choice or the
winner of a race, a function of the row and of noise that no draft can change: so the output is the
target's own, whatever the tree is, and whatever it was made of (`walk` in
`tests/oracle/reference.py`).

Nodes of one depth are raced for by the same clocks, as these depend on the place in the output
alone; a walk comes by each depth once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.drafts import FILLER, Verdict

# Parents of rows that are fed behind the text itself, and of rows that are no nodes: a token that
# is fed a second time, or that fills a draft up.
ROOT, NO_NODE = -1, -2


@dataclass(frozen=True)
class TreeBatch:
    """Draft trees of B requests as rows of the target, R in all; made by `of`.

    Each request has a row behind its text, the root, then one for each token of its draft.

    Attributes:
        tokens: int64 [R], the token fed in each row.
        lengths: Tokens of each request's draft, [B], on the host.
        parents: int64 [R], row of the token before; the row itself where there is none.
        depths: int64 [R], 0 for a root, -1 for a row that is no node.
        request_of: int64 [R], the request of each row.
    """

    tokens: torch.Tensor
    lengths: Sequence[int]
    parents: torch.Tensor
    depths: torch.Tensor
    request_of: torch.Tensor

    @classmethod
    def of(
        cls,
        tokens: torch.Tensor,
        parents: Sequence[Sequence[int]],
        send: Send = on_host,
    ) -> "TreeBatch":
        """A batch of what is known on the host; see the attributes.

        Args:
            tokens: int64 [R].
            parents: Of each token of each request's draft: an earlier one of it that is a node,
                ROOT or NO_NODE. Children of one parent are different tokens.
            send: Brings arrays to where `tokens` is; called once.
        """
        rows: list[int] = []
        depths: list[int] = []
        for draft in parents:
            start = len(rows)
            rows.append(start)
            depths.append(0)
            for parent in draft:
                is_node = parent != NO_NODE
                rows.append(start + 1 + parent if is_node else len(rows))
                depths.append(depths[rows[-1]] + 1 if is_node else -1)
        lengths = [len(draft) for draft in parents]
        arrays = {
            "parents": np.array(rows, np.int64),
            "depths": np.array(depths, np.int64),
            "request_of": np.arange(len(parents)).repeat(np.array(lengths, np.int64) + 1),
        }
        there = zip(arrays, send(*arrays.values()), strict=True)
        return cls(tokens, lengths, **dict(there))

    @property
    def size(self) -> int:
        """Number of requests, B."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Length of the longest draft, K."""
        return max(self.lengths, default=0)


@dataclass(frozen=True)
class TreeVerdict(Verdict):
    """What a batch of trees emits.

    Attributes:
        rows: int64 [B, K + 1], where each token was chosen, index into the R rows; then FILLER.
    """

    rows: torch.Tensor


def greedy_walk(trees: TreeBatch, best: torch.Tensor) -> TreeVerdict:
    """Follow each tree while what the target itself chooses is in it.

    Args:
        trees: R rows of B requests.
        best: int64 [R], what the target chooses in each row: its first choice, or a race's winner.
    """
    parents, width = trees.parents, trees.width
    reached = (trees.depths == 0) | (trees.tokens == best[parents])
    for _ in range(width.bit_length()):  # each asks twice as many ancestors as the one before
        reached = reached & reached[parents]
        parents = parents[parents]
    # At each depth one row is reached at most. The last column, which is -1 too, takes all others.
    rows = best.new_full((trees.size, width + 2), FILLER)
    columns = torch.where(reached, trees.depths, width + 1)
    rows[trees.request_of, columns] = torch.arange(len(best), device=best.device)
    rows = rows[:, :-1]
    is_reached = rows >= 0
    tokens = torch.where(is_reached, best[rows.clamp_min(0)], FILLER)
    return TreeVerdict(tokens, is_reached.sum(1) - 1, rows)
