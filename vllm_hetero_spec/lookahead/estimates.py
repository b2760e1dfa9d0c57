# SPDX-License-Identifier: Apache-2.0
"""Estimates for a pair of models on a machine; they can be saved for a later run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import Acceptance, numbers
from vllm_hetero_spec.lookahead.costs import CostModel

VERSION = 3  # of the result of `to_dict`
USUAL = 256.0  # tokens of an output, before any has been seen
_NEW = 0.02  # weight of a step: the last 50 or so count
_KEEP = 0.995  # weight of a round relative to the next: texts change within some hundred
# Before any round: few rounds, but many squares, so that rounds of one length change `each`.
_PRIOR_ROUNDS, _PRIOR_SQUARES = 0.1, 4.0
# By name of a part, the function that restores what its `to_dict` gave, or raises ValueError.
Parts = Mapping[str, Callable[[Any], Any]]


class DraftSteps:
    """Drafter steps that a draft of some target tokens takes; least squares over recent rounds.

    A drafter step yields none, one or several target tokens, and a draft may end with a step that
    only completes its last token: steps = extra + each * tokens.

    Args:
        extra: Steps of a draft beside those of its tokens, before any round.
        each: Steps of a target token, before any round.

    Attributes:
        each: Steps that one target token more takes.
    """

    def __init__(self, extra: float = 0.0, each: float = 1.0) -> None:
        self._sums = np.zeros(5)  # rounds, tokens, tokens squared, steps, steps * tokens
        self._initial = extra, each
        steps, products = _PRIOR_ROUNDS * extra, _PRIOR_SQUARES * each
        self._prior = np.array([_PRIOR_ROUNDS, 0.0, _PRIOR_SQUARES, steps, products])
        self._extra, self.each = extra, each

    def observe(self, tokens: int, steps: float) -> None:
        """Add a round: target tokens of its longest draft, and its drafter steps."""
        if tokens > 0 and steps >= 0:
            self._sums = _KEEP * self._sums + [1.0, tokens, tokens**2, steps, steps * tokens]
            self._fit()

    def expected(self, tokens: float) -> float:
        """Return the steps of a draft of so many target tokens."""
        return self._extra + self.each * tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"sums": self._sums.tolist(), "initial": self._initial}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "DraftSteps":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: Invalid data.
        """
        initial = numbers(saved["initial"], (2,))
        steps = cls(*initial.tolist())
        steps._sums = numbers(saved["sums"], steps._sums.shape)
        if (steps._sums < 0).any() or (initial < 0).any():
            raise ValueError("steps below 0")
        steps._fit()
        return steps

    def _fit(self) -> None:
        rounds, total, squares, taken, products = (self._sums + self._prior).tolist()
        determinant = rounds * squares - total**2
        self._extra = max((squares * taken - total * products) / determinant, 0.0)
        self.each = max((products - total * self._extra) / squares, 0.0)


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


class OutputLengths:
    """Expected length of outputs: a context is worth reading only for one that is long enough.

    Running requests have on average emitted half of their outputs.
    """

    def __init__(self) -> None:
        self._mean = USUAL

    def expected(self, emitted: Sequence[int], room: Sequence[int]) -> list[float]:
        """Learn from a step, and return the expected length of each request's output in tokens.

        Args:
            emitted: Output tokens of each request.
            room: Output tokens that each request may still emit. Its length is at most these.
        """
        running = [own for own in emitted if own]  # the others still read their prompts
        if running:
            self._mean += _NEW * (2.0 * sum(running) / len(running) - self._mean)
        return [min(self._mean, most) for most in room]
