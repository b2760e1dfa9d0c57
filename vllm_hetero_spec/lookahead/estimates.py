# SPDX-License-Identifier: Apache-2.0
"""Estimates for a pair of models on a machine; they can be saved for a later run."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_hetero_spec.lookahead.acceptance import Acceptance
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.draft_steps import DraftSteps

VERSION = 3  # of the result of `to_dict`
# By name of a part, the function that restores what its `to_dict` gave, or raises ValueError.
Parts = Mapping[str, Callable[[Any], Any]]


class Estimates(NamedTuple):
    """Estimates for a pair; updated in place.

    Attributes:
        costs: Costs of steps, in seconds.
        steps: Drafter steps per draft.
        acceptance: Statistics of past drafts.
        parts: Estimates of optional features, by name. They have `to_dict`.
    """

    costs: CostModel
    steps: DraftSteps
    acceptance: Acceptance
    parts: dict[str, Any]

    @classmethod
    def of(cls, costs: CostModel, positions: int, steps: DraftSteps | None = None) -> "Estimates":
        """Return estimates without any draft, for drafts of up to `positions` target tokens.

        Args:
            steps: Drafter steps per draft; None for one per token.
        """
        return cls(costs, steps or DraftSteps(), Acceptance(positions), {})

    def summary(self) -> str:
        """A few words for the log."""
        greedy, random = (
            " ".join(f"{rate:.2f}" for rate in self.acceptance.rates(kind)[:4])
            for kind in (False, True)
        )
        return f"{self.acceptance.drafts} drafts, acceptance {greedy} greedy, {random} random"

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates as JSON values."""
        return {name: part.to_dict() for name, part in self.parts.items()} | {
            "version": VERSION,
            "costs": self.costs.to_dict(),
            "steps": self.steps.to_dict(),
            "acceptance": self.acceptance.to_dict(),
        }

    @classmethod
    def from_dict(
        cls, saved: Mapping[str, Any], positions: int, parts: Parts | None = None
    ) -> "Estimates":
        """Restore the result of `to_dict`. Parts that are not saved are left out.

        Raises:
            ValueError: Invalid data.
        """
        try:
            if saved["version"] != VERSION:
                raise ValueError(f"version {saved['version']!r} instead of {VERSION}")
            restored = {
                name: part(saved[name]) for name, part in (parts or {}).items() if name in saved
            }
            return cls(
                CostModel.from_dict(saved["costs"]),
                DraftSteps.from_dict(saved["steps"]),
                Acceptance.from_dict(saved["acceptance"], positions),
                restored,
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"invalid saved estimates: {error!r}") from error
