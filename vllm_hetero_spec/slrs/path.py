# SPDX-License-Identifier: Apache-2.0
"""One request's draft by SLRS-n, and how the drafter is fed along it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


class SlrsFeed(Protocol):
    """The drafter, as a path sees it."""

    def __call__(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        """Feed ids to paths, behind the `written` ones.

        Args:
            indices: Of the paths, [n].
            ids: At least one for each.
            side_branches: The last so many of these leave nothing behind.

        Returns:
            float32 [n, V_D], the rows that follow, as probabilities.
        """


@dataclass
class SlrsPath:
    """One request's draft.

    Attributes:
        steps: Drafter tokens that it may still draw.
        wanted: Target tokens after which it stops.
        side_branches: Tokens that can be fed in one step beside the chain, leaving nothing behind.
        drafted: Drafter ids; the KV of the first `fed` is written.
        ahead: Tokens of the chain whose KV is written behind those, not drawn yet.
        proposal: Target ids.
        row_of: Row of `draft_probs` of each target id, -1 where it was certain.
        seed: From which its random choices follow.
        place: Index in the request's output of the first token to be proposed.
        numbers: Random numbers that it has used up.
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
        """Tokens of the draft and its chain whose KV is written."""
        return self.fed + self.ahead

    @property
    def unfed(self) -> list[int]:
        """The end of the draft that has no KV yet."""
        return self.drafted[self.fed :]

    @property
    def draws(self) -> int:
        """How many target tokens a new path may draw."""
        return max(0, min(self.steps, self.wanted))
