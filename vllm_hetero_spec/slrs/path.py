# SPDX-License-Identifier: Apache-2.0
"""State of one request's SLRS-n draft, and the interface of the drafter to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


class SlrsFeed(Protocol):
    """Forward of the drafter."""

    def __call__(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        """Feed ids to paths, after their `written` tokens.

        Args:
            indices: Indices of the paths, [n].
            ids: At least one per path, [n].
            side_branches: Number of last entries that are side branches: they do not change the KV
                of their requests.

        Returns:
            Probabilities of the next drafter token, float32 [n, V_D].
        """


@dataclass
class SlrsPath:
    """Draft of one request.

    Attributes:
        steps: Number of drafter tokens that may still be drawn.
        wanted: Draft length in target tokens at which drafting stops.
        side_branches: Number of tokens that can be fed in one step beside the chain.
        fed: Number of leading tokens of `drafted` with KV.
        ahead: Number of undrawn tokens of the chain with KV, after the `fed` ones.
        row_of: Row of `draft_probs` of each target id; -1 if it was certain.
        numbers: Count of random numbers already used.
    """

    steps: int
    wanted: int
    side_branches: int = 0
    drafted: list[int] = field(default_factory=list)
    fed: int = 0
    ahead: int = 0
    proposal: list[int] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    seed: int = 0
    place: int = 0
    numbers: int = 0

    @property
    def written(self) -> int:
        """Number of tokens of the draft and its chain with KV."""
        return self.fed + self.ahead

    @property
    def unfed(self) -> list[int]:
        """Last tokens of the draft, which have no KV yet."""
        return self.drafted[self.fed :]

    @property
    def draws(self) -> int:
        """Largest number of target tokens that a new path may draw."""
        return max(0, min(self.steps, self.wanted))
