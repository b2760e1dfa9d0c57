# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafts that the target waits for, if drafts are normally precomputed.

Such drafts follow tokens that the drafter did not predict, so fewer of their tokens tend to be
accepted. Initially the target waits for none: precomputed drafts cost next to nothing, and show how
good the drafter is.
"""

from vllm_hetero_spec.lookahead.acceptance import PositionRates

# Steps in a row in which drafts are not waited for until some are that would be worth it if they
# were like others: texts change, and a wait in vain takes half as long as a step or so.
_TRIED_EVERY = 16


class LateDrafts:
    """Acceptance rates of late drafts, and when to measure them again.

    Args:
        positions: Longest draft, in target tokens.
    """

    def __init__(self, positions: int) -> None:
        self._counts = PositionRates(positions), PositionRates(positions)  # greedy, random
        self._rates = [[0.0] * positions for _ in self._counts]
        self._passed = 0

    @property
    def due(self) -> bool:
        """True if late drafts are treated like others, to measure them again."""
        return self._passed >= _TRIED_EVERY

    def decided(self, *, waits: bool) -> None:
        """Record whether the target waits for the drafts of a step."""
        self._passed = 0 if waits else self._passed + 1

    def observe(self, verified: int, accepted: int, random: bool) -> None:
        """Add a verified late draft of a greedy or sampled request."""
        counts = self._counts[random]
        counts.observe([verified], [accepted])
        self._rates[random] = counts.rates().tolist()

    def rates(self, random: bool) -> list[float]:
        """Return the conditional acceptance of each position; 0 before any observation."""
        rates: list[float] = self._rates[random]
        return rates
