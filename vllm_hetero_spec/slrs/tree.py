# SPDX-License-Identifier: Apache-2.0
"""Tree of drafter tokens that SLRS-n builds before it draws.

Its paths are a chain of likely tokens, and side branches of one token beside the chain's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


class SlrsCandidate(NamedTuple):
    """A path that may be added to a tree.

    Attributes:
        path: Drafter ids from the root on.
        share: Probability of the last id, given the ids before it.
    """

    path: tuple[int, ...]
    share: float


class Node(NamedTuple):
    """A path of a tree and the drafter's row after it.

    Attributes:
        side_branch: True if the path is a side branch: its KV is not in the request's own blocks.
        follow: Probability that draws follow the path to its end.
        longest: The longest target token along the path.
        used: Number of tokens of the path that `longest` takes.
        row: float32 [V_D], probabilities of the next drafter token.
        e_ids: int64 [n], next drafter tokens that merge with the path.
        t_ids: int64 [n], the merged target tokens.
        shares: float32 [n], probabilities that draws follow the path and then `e_ids`.
    """

    path: tuple[int, ...]
    side_branch: bool
    follow: float
    longest: int
    used: int
    row: torch.Tensor
    e_ids: np.ndarray
    t_ids: np.ndarray
    shares: np.ndarray

    def longest_with(self, e: int) -> tuple[int, int]:
        """Return the longest target token along the path and e, and the tokens that it takes."""
        merged = np.flatnonzero(self.e_ids == e)
        if len(merged):
            return int(self.t_ids[merged[0]]), len(self.path) + 1
        return self.longest, self.used

    def unmerged(self, row: torch.Tensor) -> torch.Tensor:
        """Return a row [V_D] after the path without merging tokens; 0 if nothing remains."""
        row = row.clone()
        row[torch.from_numpy(self.e_ids).to(row.device)] = 0.0
        return row / row.sum().clamp_min(torch.finfo(row.dtype).tiny)


@dataclass
class SlrsTree:
    """Tree of one request before its next tokens are drawn.

    Attributes:
        row: float32 [V_D], probabilities of the next drafter token.
        candidates: Paths that may be added; the first one extends the chain.
    """

    row: torch.Tensor
    nodes: dict[tuple[int, ...], Node] = field(default_factory=dict)
    candidates: list[SlrsCandidate] = field(default_factory=list)

    @property
    def rows(self) -> list[torch.Tensor]:
        """Rows to draw from: at the root, then after each node."""
        return [self.row, *(node.row for node in self.nodes.values())]

    def add(
        self,
        candidate: SlrsCandidate,
        first: int,
        row: torch.Tensor,
        e_ids: np.ndarray,
        t_ids: np.ndarray,
        shares: np.ndarray,
    ) -> None:
        """Add a path.

        Args:
            first: First target token of the path's first drafter token.
            row: float32 [V_D], probabilities of the next drafter token after the path.
            e_ids: int64 [n], next drafter tokens that may merge.
            t_ids: int [n], the merged target tokens; -1 if `e_ids` does not merge.
            shares: float32 [n], probabilities of `e_ids` in the row.
        """
        follow, longest, used = candidate.share, first, 1
        parent = self.nodes.get(candidate.path[:-1])
        if parent is not None:
            follow *= parent.follow
            longest, used = parent.longest_with(candidate.path[-1])
        side_branch = candidate != self.candidates[0]
        merges = t_ids >= 0
        merging = e_ids[merges], t_ids[merges].astype(np.int64), shares[merges] * np.float32(follow)
        self.nodes[candidate.path] = Node(
            candidate.path, side_branch, follow, longest, used, row, *merging
        )

    def path_taken(self, drawn: Sequence[int]) -> tuple[int, ...]:
        """Return the draws, one from each of `rows`, up to the first that leaves the tree."""
        of_node = dict(zip(self.nodes, drawn[1:], strict=True))
        path: tuple[int, ...] = (drawn[0],)
        while path in of_node:
            path += (of_node[path],)
        return path
