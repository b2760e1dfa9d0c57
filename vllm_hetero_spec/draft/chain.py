# SPDX-License-Identifier: Apache-2.0
"""A chain of drafter tokens laid before anything is drawn, and all that is known along it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


class Link(NamedTuple):
    """A token of a chain, and what is known behind it.

    Attributes:
        token: Drafter id.
        follow: Probability that draws follow the chain up to here.
        longest: Target token, the longest found along the chain up to here.
        used: Tokens of the chain that it takes.
        row: float32 [V_D], law of the next drafter token.
        e_ids: int64 [n], next drafter tokens that merge with the chain.
        t_ids: int64 [n], the target tokens that they make together, and
        shares: float32 [n], with what probability the draws follow the chain to them.
    """

    token: int
    follow: float
    longest: int
    used: int
    row: torch.Tensor
    e_ids: np.ndarray
    t_ids: np.ndarray
    shares: np.ndarray

    def merged(self, e: int) -> int | None:
        """The target token that the chain makes with e, if any."""
        found = np.flatnonzero(self.e_ids == e)
        return int(self.t_ids[found[0]]) if len(found) else None

    def unmerged(self) -> torch.Tensor:
        """float32 [V_D], the law of a next token that does not merge; 0 where there is none."""
        row = self.row.clone()
        row[torch.from_numpy(self.e_ids).to(row.device)] = 0.0
        return row / row.sum().clamp_min(torch.finfo(row.dtype).tiny)


@dataclass
class Chain:
    """What is known of a path before its next tokens are drawn.

    Attributes:
        row: float32 [V_D], law of the next drafter token.
        links: The chain.
        heir: The drafter token that may prolong it and its probability in the last row; None where
            the chain has to end.
    """

    row: torch.Tensor
    links: list[Link] = field(default_factory=list)
    heir: tuple[int, float] | None = None

    @property
    def tokens(self) -> list[int]:
        """Drafter ids of the chain."""
        return [link.token for link in self.links]

    @property
    def rows(self) -> list[torch.Tensor]:
        """The laws of the next draws: of the first, then behind each link."""
        return [self.row, *(link.row for link in self.links)]

    def prolong(
        self,
        first: int,
        row: torch.Tensor,
        e_ids: np.ndarray,
        t_ids: np.ndarray,
        shares: np.ndarray,
    ) -> None:
        """Add the heir as a link; there is none then.

        Args:
            first: Target token that the heir begins if it is the first of the chain.
            row: float32 [V_D], the law behind it.
            e_ids: int64 [n], next tokens that may merge, with
            t_ids: int [n], what they make, -1 where they do not merge, and
            shares: float32 [n], their probabilities in the row.
        """
        assert self.heir is not None
        token, follow = self.heir
        longest, used = first, 1
        if self.links:
            last = self.links[-1]
            follow *= last.follow
            longest, used = self.found(last.merged(token), len(self.links))
        merges = t_ids >= 0
        merging = e_ids[merges], t_ids[merges].astype(np.int64), shares[merges] * np.float32(follow)
        self.links.append(Link(token, follow, longest, used, row, *merging))
        self.heir = None

    def found(self, merged: int | None, followed: int) -> tuple[int, int]:
        """The longest target token along so many links and one more token, and what it takes.

        Args:
            merged: What the token makes with the links.
            followed: At least 1.
        """
        if merged is not None:
            return merged, followed + 1
        return self.links[followed - 1].longest, self.links[followed - 1].used

    def followed(self, drawn: Sequence[int]) -> list[int]:
        """Draws from `rows` up to the first that leaves the chain."""
        for place, link in enumerate(self.links):
            if drawn[place] != link.token:
                return list(drawn[: place + 1])
        return list(drawn)
