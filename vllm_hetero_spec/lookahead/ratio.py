# SPDX-License-Identifier: Apache-2.0
"""A ratio of two sums in which old terms count less and less."""


class Ratio:
    """Discounted ratio with a prior.

    Args:
        weight: Divisor that the prior counts for; it is discounted like an observation.
        value: The ratio before any observation.
        keep: Weight of an observation relative to the next one.
    """

    def __init__(self, weight: float, value: float, keep: float) -> None:
        self.weight, self._total, self._keep = weight, weight * value, keep

    @property
    def value(self) -> float:
        """The ratio; never below 0. It is 0 without any observation or prior."""
        return max(self._total, 0.0) / self.weight if self.weight else 0.0

    def observe(self, divisor: float, dividend: float) -> None:
        """Add an observation."""
        self.weight = self._keep * self.weight + divisor
        self._total = self._keep * self._total + dividend
