# SPDX-License-Identifier: Apache-2.0
"""Verification of draft trees: walk from the root as long as the target's choice is in the tree.

The target has computed a row after every node. Its choice there is its most likely token or the
winner of a race: a function of the row and of noise that is independent of the draft. So the output
is the target's own for any tree (`walk` in `tests/oracle/reference.py`).

Nodes of one depth race on the same clocks, because clocks depend only on the index in the output.
This is correct, because a walk visits each depth once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.drafts import FILLER, Verdict

# Parents of rows that directly continue the request, and of rows that are no nodes: recomputed
# tokens and padding of a draft.
ROOT, NO_NODE = -1, -2


class Walk(NamedTuple):
    """Result of following the trees of a batch.

    Attributes:
        trees: bool [B], True for requests with a tree.
        walks: bool [B], True for requests whose tree was followed.
        tokens: int64 [B, K + 1], as in `Verdict`; undefined if `walks` is False.
        accepted: int64 [B], as in `Verdict`; undefined if `walks` is False.
        order: int64 [R]. In rows reordered by it, a request's token i was chosen in its row i.
    """

    trees: torch.Tensor
    walks: torch.Tensor
    tokens: torch.Tensor
    accepted: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class TreeBatch:
    """Draft trees of B requests as R rows of the target; made by `of`.

    Each request has a row for its root (its last token), then one for each token of its draft.

    Attributes:
        tokens: int64 [R], the token fed in each row.
        lengths: Draft length of each request, [B], on the host.
        parents: int64 [R], the parent's row; the row itself if there is no parent.
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
        cls, tokens: torch.Tensor, parents: Sequence[Sequence[int]], send: Send = on_host
    ) -> "TreeBatch":
        """Build a batch from host data.

        Args:
            parents: Parent of each token of each draft: an earlier node of the draft, ROOT or
                NO_NODE. Children of one parent must be different tokens.
            send: Copies arrays to the device of `tokens`; called once.
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

    def walk(self, best: torch.Tensor, walks: torch.Tensor, place_of: torch.Tensor) -> Walk:
        """Follow the trees of a mixed batch.

        Args:
            best: int64 [R], the target's choice in each row: its likeliest token or the race's.
            walks: `Walk.walks`.
            place_of: int64 [R], index of each row in its request.
        """
        verdict = greedy_walk(self, best)
        visited = verdict.rows[self.request_of, place_of]
        counts = walks[self.request_of] & (visited >= 0)
        order = torch.where(counts, visited, torch.arange(len(best), device=best.device))
        deepest = torch.zeros_like(self.depths[: self.size])
        deepest = deepest.scatter_reduce(0, self.request_of, self.depths, "amax")
        return Walk(deepest > 0, walks, verdict.tokens, verdict.accepted, order)


@dataclass(frozen=True)
class TreeVerdict(Verdict):
    """Emitted tokens, and `rows` int64 [B, K + 1]: the row that chose each token, then FILLER."""

    rows: torch.Tensor


def greedy_walk(trees: TreeBatch, best: torch.Tensor) -> TreeVerdict:
    """Walk each tree while it contains the target's choice in each row, `best` int64 [R]."""
    parents, width = trees.parents, trees.width
    reached = (trees.depths == 0) | (trees.tokens == best[parents])
    for _ in range(width.bit_length()):  # pointer doubling: twice as many ancestors each time
        reached = reached & reached[parents]
        parents = parents[parents]
    # At most one row per depth is reached. All other rows go to the last column, which is removed.
    rows = best.new_full((trees.size, width + 2), FILLER)
    columns = torch.where(reached, trees.depths, width + 1)
    rows[trees.request_of, columns] = torch.arange(len(best), device=best.device)
    rows = rows[:, :-1]
    is_reached = rows >= 0
    tokens = torch.where(is_reached, best[rows.clamp_min(0)], FILLER)
    return TreeVerdict(tokens, is_reached.sum(1) - 1, rows)
