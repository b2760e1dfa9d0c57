# SPDX-License-Identifier: Apache-2.0
"""What drafts bring that the target waits for, where others are made ahead.

They follow what the drafter did not foresee, and where a text has surprised it once it may well do
so again: fewer of their tokens tend to be accepted. None is waited for in the beginning: what was
made ahead costs next to nothing, and shows what the drafter is like.
"""

from vllm_hetero_spec.lookahead.acceptance import PositionRates

# Steps in a row in which drafts are not waited for until some are that would be worth it if they
# were like others: texts change, and a wait in vain takes half as long as a step or so.
_TRIED_EVERY = 16


class LateDrafts:
    """Their acceptance, and whether it is time to see it again.

    Args:
        positions: Longest draft, in target tokens.
    """

    def __init__(self, positions: int) -> None:
        self._counts = PositionRates(positions), PositionRates(positions)  # greedy, random
        self._rates = [[0.0] * positions for _ in self._counts]
        self._passed = 0

    @property
    def due(self) -> bool:
        """Whether they are to be taken for drafts like others, to learn from them."""
        return self._passed >= _TRIED_EVERY

    def decided(self, *, waits: bool) -> None:
        """Drafts of a step are waited for, or not."""
        self._passed = 0 if waits else self._passed + 1

    def observe(self, verified: int, accepted: int, random: bool) -> None:
        """One of a greedy or a random request was verified."""
        counts = self._counts[random]
        counts.observe([verified], [accepted])
        self._rates[random] = counts.rates().tolist()

    def rates(self, random: bool) -> list[float]:
        """Conditional acceptance of each position; 0 before any was seen."""
        rates: list[float] = self._rates[random]
        return rates
