# SPDX-License-Identifier: Apache-2.0
"""Switch between drafting and the target alone, and the budget of probes.

A different batch size switches at once, changed estimates with hysteresis. While speculation is
disabled, probes may lose a small share of the time; idle time does not count, and earned tokens
are credited. Probes become rarer while they show nothing new. A probe with news is followed by
others within the saved budget.
"""

BEGIN = 1.02  # gain at which drafting begins: above 1 by about what a forecast may be off
_END = 0.99  # gain at which it ends: below 1, or the two would take turns on the edge
_STAY_OFF = 8  # steps off at least: probes and forecasts need some to say anything new
_OTHER_BATCH = 1.25  # larger or smaller by this is another batch: no need to settle

_SHARE = 0.01  # of the time off that probes may lose: the price of noticing a change
_PAUSE = 1.0  # seconds; more without a step is idle, or spent drafting
_SAVED = 8  # probes that may be saved up for, enough to follow up news
_FIRST_WAIT = 0.1  # seconds between the first probes, a few steps of the target
_LONGEST_WAIT = 4.0  # seconds between probes without news: changes are seen within some
_LONGEST_DEFERRAL = 1.0  # seconds until the price of a dear probe is looked at again
_FREE = 0.1  # seconds that the first probe may lose at once, instead of being saved up for


def other_batch(requests: int, others: int) -> bool:
    """Return True if two batch sizes differ so much that hysteresis does not apply."""
    low, high = sorted((requests, others))
    return high > _OTHER_BATCH * low


class OnOff:
    """Decides with hysteresis whether to draft; initially off."""

    def __init__(self) -> None:
        self._off = True
        self._since = _STAY_OFF  # steps
        self._batch = 0

    def update(self, gain: float, batch: int) -> bool:
        """Return True if this step is off; `gain` is the rate of drafting over the target alone."""
        self._since += 1
        settled = other_batch(batch, self._batch) or self._since >= _STAY_OFF
        if (settled and gain > BEGIN) if self._off else gain < _END:
            self._off = not self._off
            self._since, self._batch = 0, batch
        return self._off


class ProbeBudget:
    """Budget of probes in seconds.

    Args:
        now: Seconds of the caller's clock, here and below.

    Attributes:
        probing: True during a probe.
        verified: True if drafts of the present or last probe were verified.
    """

    def __init__(self, now: float) -> None:
        self.probing = self.verified = False
        self._probed = False  # ever
        self._credit = self._lost = 0.0
        self._counted = self._next = now
        self._wait = _FIRST_WAIT

    def early(self, now: float) -> bool:
        """Return True if no probe is due yet."""
        self._credit += _SHARE * min(now - self._counted, _PAUSE)
        self._counted = now
        return now < self._next

    def affords(self, cost: float, *, free: bool = False) -> bool:
        """Return True if the budget allows a probe.

        Args:
            cost: Seconds that the probe is expected to lose.
            free: True if no drafts were observed: the first probe may exceed the budget.
        """
        if free and not self._probed and cost <= _FREE:
            return True
        self._credit = min(self._credit, _SAVED * cost)
        return self._credit >= cost

    def defer(self, now: float, cost: float) -> None:
        """Defer the next probe until the budget may allow this cost."""
        self._next = now + min((cost - self._credit) / _SHARE, _LONGEST_DEFERRAL)

    def begin(self) -> None:
        """Begin a probe."""
        self.probing, self.verified, self._lost = True, False, 0.0

    def charge(self, seconds: float) -> None:
        """Add lost seconds to the present probe."""
        self._lost += seconds

    def earn(self, verified: int, seconds: float) -> None:
        """Record verified draft tokens; the accepted ones are worth `seconds`."""
        self._lost -= seconds
        self.verified = self.verified or verified > 0

    def end(self) -> bool:
        """Charge the present probe to the budget; return True if there was one."""
        ended, self.probing = self.probing, False
        if ended:
            self._probed = True
            self._credit -= self._lost
        return ended

    def finish_probe(self, now: float, *, news: bool) -> None:
        """Set the time of the next probe: at once after news, otherwise after a longer wait."""
        self._wait = _FIRST_WAIT if news else min(2 * self._wait, _LONGEST_WAIT)
        self._next = now if news else now + self._wait
