# SPDX-License-Identifier: Apache-2.0
"""Drafter steps that a draft of some target tokens takes.

A drafter step yields none, one or several target tokens, and a draft may end with a step that only
completes its last token: steps = extra + each * tokens, fitted to recent rounds.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import numbers

_KEEP = 0.995  # weight of a round relative to the next: texts change within some hundred
# Before any round: few rounds, but many squares, so that rounds of one length change `each`.
_PRIOR_ROUNDS, _PRIOR_SQUARES = 0.1, 4.0


class DraftSteps:
    """Least squares over recent rounds.

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
