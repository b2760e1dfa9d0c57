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
# Before any round: one step per token, rather than extra steps if all rounds have one length.
_PRIOR = np.array([0.1, 0.0, 4.0, 0.0, 4.0])
_LEAST = 0.05  # steps per token: a step of 20 tokens is beyond any drafter
_SAVED = 32.0  # rounds that all earlier ones count for in a later run


class DraftSteps:
    """Least squares over recent rounds.

    Attributes:
        each: Steps that one target token more takes.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # rounds, tokens, tokens squared, steps, steps * tokens
        self._extra, self.each = 0.0, 1.0

    def observe(self, tokens: int, steps: float) -> None:
        """Add a round: target tokens of its longest draft, and its drafter steps."""
        if tokens > 0 and steps >= 0:
            self._sums = _KEEP * self._sums + [1.0, tokens, tokens**2, steps, steps * tokens]
            self._fit()

    def expected(self, tokens: float) -> float:
        """Return the steps of a draft of so many target tokens."""
        return self._extra + self.each * tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, with the weight of at most `_SAVED` rounds."""
        return {"sums": (self._sums * min(1.0, _SAVED / max(self._sums[0], 1.0))).tolist()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "DraftSteps":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: Invalid data.
        """
        steps = cls()
        steps._sums = numbers(saved["sums"], steps._sums.shape)
        if (steps._sums < 0).any():
            raise ValueError("sums below 0")
        steps._fit()
        return steps

    def _fit(self) -> None:
        rounds, total, squares, taken, products = (self._sums + _PRIOR).tolist()
        determinant = rounds * squares - total**2
        self._extra = max((squares * taken - total * products) / determinant, 0.0)
        self.each = max((products - total * self._extra) / squares, _LEAST)
