# SPDX-License-Identifier: Apache-2.0
"""Drafter tokens laid before anything is drawn, and all that is known along them.

A tree of paths: a chain of likely tokens, and beside its first a few others, one token each.
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
        share: Probability of the last in the row before it.
    """

    path: tuple[int, ...]
    share: float


class Node(NamedTuple):
    """A path of a tree, and what is known behind it.

    Attributes:
        path: Drafter ids from the root on.
        side_branch: Whether it is one, so that its KV is not in the request's own blocks.
        follow: Probability that draws follow it to its end.
        longest: Target token, the longest found along it.
        used: Tokens of the path that it takes.
        row: float32 [V_D], probabilities of the next drafter token.
        e_ids: int64 [n], next drafter tokens that merge with the path.
        t_ids: int64 [n], the target tokens that they make together, and
        shares: float32 [n], with what probability the draws follow the path to them.
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
        """The longest target token along the path and e, and how many of these it takes."""
        merged = np.flatnonzero(self.e_ids == e)
        if len(merged):
            return int(self.t_ids[merged[0]]), len(self.path) + 1
        return self.longest, self.used

    def unmerged(self, row: torch.Tensor) -> torch.Tensor:
        """A row [V_D] behind the path without what merges; 0 where nothing else is in it."""
        row = row.clone()
        row[torch.from_numpy(self.e_ids).to(row.device)] = 0.0
        return row / row.sum().clamp_min(torch.finfo(row.dtype).tiny)


@dataclass
class SlrsTree:
    """What is known of a request before its next tokens are drawn.

    Attributes:
        row: float32 [V_D], probabilities of the next drafter token.
        nodes: By path.
        candidates: Paths that may be added; the first prolongs the chain.
    """

    row: torch.Tensor
    nodes: dict[tuple[int, ...], Node] = field(default_factory=dict)
    candidates: list[SlrsCandidate] = field(default_factory=list)

    @property
    def rows(self) -> list[torch.Tensor]:
        """What the next draws are from: at the root, then behind each node."""
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
            candidate: One of them.
            first: Target token that the first token of the path begins.
            row: float32 [V_D], probabilities of the next drafter token behind it.
            e_ids: int64 [n], next tokens that may merge, with
            t_ids: int [n], what they make, -1 where they do not merge, and
            shares: float32 [n], their probabilities in the row.
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
        """Draws from `rows` up to the first that leaves the tree."""
        of_node = dict(zip(self.nodes, drawn[1:], strict=True))
        path: tuple[int, ...] = (drawn[0],)
        while path in of_node:
            path += (of_node[path],)
        return path
