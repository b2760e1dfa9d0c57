# SPDX-License-Identifier: Apache-2.0
"""Schedules of experiments, and of the steps to read while speculation is disabled.

An experiment is a short draft while speculation is off, a step without drafts while it is on, or a
tree that is found but not verified. It may lose a small share of the time. Experiments without
news become rarer.

Reading a step takes host time for each request, and without drafts no device work hides it. So only
some steps are read: two in a row, because the second one can be timed.
"""

PROBED_TIME = 0.01  # share of the time that experiments may lose: the price of noticing a change
_PAUSE = 1.0  # seconds; a longer gap between two steps is idle time, in which no budget is saved
_MOST = 0.2  # seconds that may be saved, or one experiment: news is followed by a few others
_FIRST_WAIT = 0.1  # seconds from the first experiment to the second, a few steps of the target
_LONGEST_WAIT = 4.0  # seconds between experiments without news; a change is noticed after about one
_MANY = 2  # steps; the first ones without drafts, which are read
_APART = 64  # steps; of so many later ones, the first two are read


def other_batch(requests: int, others: int) -> bool:
    """Return True if one batch has at least twice the requests of the other."""
    low, high = sorted((requests, others))
    return high >= 2 * low


class Prober:
    """Budget of experiments in seconds.

    Args:
        now: Seconds of a monotonic clock, here and below.
        share: Share of the time that experiments may lose.

    Attributes:
        budget: Seconds that experiments may lose at present.
        next: Time before which no experiment is due.
    """

    def __init__(self, now: float, share: float = PROBED_TIME) -> None:
        self._share, self.budget, self._batch = share, 0.0, 0
        self._seen, self.next, self._wait = now, now + _FIRST_WAIT, _FIRST_WAIT

    def due(self, now: float, loss: float, batch: int) -> bool:
        """Return True if an experiment that loses `loss` seconds is due, and charge it."""
        saved = self.budget + self._share * min(now - self._seen, _PAUSE)
        self.budget = min(saved, max(_MOST, loss))
        self._seen = now
        if self._batch and other_batch(batch, self._batch):
            self.hurry(now)
        self._batch = batch
        if now < self.next:
            return False
        if self.budget < loss:
            self.next = now + min((loss - self.budget) / self._share, _PAUSE)
            return False
        self.budget -= loss
        self.next, self._wait = now + self._wait, min(2.0 * self._wait, _LONGEST_WAIT)
        return True

    def hurry(self, now: float) -> None:
        """Make the next experiment due as soon as the budget allows it, after news."""
        self.next, self._wait = now, _FIRST_WAIT

    def charge(self, seconds: float) -> None:
        """Charge what the last experiment lost in addition; negative if it lost less."""
        self.budget = max(self.budget - seconds, -_MOST)


class UnreadSteps:
    """Counts steps without drafts, and chooses those that are not read."""

    def __init__(self) -> None:
        self._without = 0  # steps in a row
        self._batch = 0  # requests when they began

    def skips(self, without_drafts: bool, batch: int) -> bool:
        """Count a step. Return True to skip reading it.

        Args:
            without_drafts: True if the step verified no drafts and none will follow it.
            batch: Requests of the step. If their number changes much, drafts may pay again.
        """
        goes_on = without_drafts and not other_batch(batch, self._batch)
        self._without = self._without + 1 if goes_on else 0
        if not goes_on:
            self._batch = batch
        return self._without > _MANY and self._without % _APART > 1
