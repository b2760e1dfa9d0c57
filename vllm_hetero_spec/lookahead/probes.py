# SPDX-License-Identifier: Apache-2.0
"""When to look again whether drafting pays, while the target works alone.

Probes may lose a small share of that time, pauses not counted; what they earn in tokens is set off.
Their turn comes less and less often while they show nothing new; one that does is followed by
others as far as the share saved up allows.
"""

_SHARE = 0.01  # of the time
_PAUSE = 1.0  # seconds; more without a step is idle, or spent drafting
_SAVED = 8  # probes that may be saved up for
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 4.0  # seconds
_LONGEST_THRIFT = 1.0  # seconds; costs change meanwhile
_FREE = 0.1  # seconds that the first one may lose at once


class ProbeBudget:
    """Seconds to spend; the first probe need not be saved up for unless it is dear.

    Args:
        now: Seconds of the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self.count = 0
        self._credit = 0.0
        self._counted = now
        self._next = now
        self._wait = _FIRST_WAIT

    def early(self, now: float) -> bool:
        """Whether it is not yet time to think of a probe."""
        self._credit += _SHARE * min(now - self._counted, _PAUSE)
        self._counted = now
        return now < self._next

    def affords(self, cost: float) -> bool:
        """Whether a probe that is expected to lose so many seconds may be made."""
        if not self.count and cost <= _FREE:
            return True
        self._credit = min(self._credit, _SAVED * cost)
        return self._credit >= cost

    def defer(self, now: float, cost: float) -> None:
        """Nothing was affordable, the cheapest being so dear: think of it again when it may be."""
        self._next = now + min((cost - self._credit) / _SHARE, _LONGEST_THRIFT)

    def spend(self, cost: float) -> None:
        """A probe was made and lost so many seconds; below 0 where it won some."""
        self.count += 1
        self._credit -= cost

    def settle(self, now: float, *, news: bool) -> None:
        """What it showed is known: the next one waits longer, or not at all after news."""
        self._wait = _FIRST_WAIT if news else min(2 * self._wait, _LONGEST_WAIT)
        self._next = now if news else now + self._wait
