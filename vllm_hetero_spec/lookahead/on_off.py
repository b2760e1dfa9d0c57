# SPDX-License-Identifier: Apache-2.0
"""Drafting or the target alone: when to change over, and when to look again whether to.

Another batch changes it at once, mere estimates with inertia. While the target works alone, probes
may lose a small share of the time, pauses not counted; what they earn in tokens is set off. They
come less and less often while they show nothing new; one that does is followed by others as far as
the share saved up allows.
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
    """Whether two batches of so many requests differ by more than estimates have inertia for."""
    low, high = sorted((requests, others))
    return high > _OTHER_BATCH * low


class OnOff:
    """Off in the beginning."""

    def __init__(self) -> None:
        self._off = True
        self._since = _STAY_OFF  # steps
        self._batch = 0

    def update(self, gain: float, batch: int) -> bool:
        """Whether to be off in this step; `gain` is the rate of drafting over the target alone."""
        self._since += 1
        settled = other_batch(batch, self._batch) or self._since >= _STAY_OFF
        if (settled and gain > BEGIN) if self._off else gain < _END:
            self._off = not self._off
            self._since, self._batch = 0, batch
        return self._off


class ProbeBudget:
    """Seconds to spend on probes.

    Args:
        now: Seconds of the caller's clock, here and below.

    Attributes:
        probing: A probe is under way.
        verified: Whether drafts of it were, or, if none is, of the last one.
    """

    def __init__(self, now: float) -> None:
        self.probing = self.verified = False
        self._probed = False  # ever
        self._credit = self._lost = 0.0
        self._counted = self._next = now
        self._wait = _FIRST_WAIT

    def early(self, now: float) -> bool:
        """Whether it is not yet time to think of a probe."""
        self._credit += _SHARE * min(now - self._counted, _PAUSE)
        self._counted = now
        return now < self._next

    def affords(self, cost: float, *, free: bool = False) -> bool:
        """Whether a probe that is expected to lose so many seconds may be made.

        Args:
            cost: Those seconds.
            free: Nothing is known of drafts: the first probe need not be saved up for.
        """
        if free and not self._probed and cost <= _FREE:
            return True
        self._credit = min(self._credit, _SAVED * cost)
        return self._credit >= cost

    def defer(self, now: float, cost: float) -> None:
        """The cheapest probe was too dear at this cost: think again when it may be afforded."""
        self._next = now + min((cost - self._credit) / _SHARE, _LONGEST_DEFERRAL)

    def begin(self) -> None:
        """A probe is made."""
        self.probing, self.verified, self._lost = True, False, 0.0

    def charge(self, seconds: float) -> None:
        """The probe under way lost so many seconds."""
        self._lost += seconds

    def earn(self, verified: int, seconds: float) -> None:
        """So many drafted tokens were verified, of which those accepted are worth these seconds."""
        self._lost -= seconds
        self.verified = self.verified or verified > 0

    def end(self) -> bool:
        """Pay for the probe under way; whether there was one."""
        ended, self.probing = self.probing, False
        if ended:
            self._probed = True
            self._credit -= self._lost
        return ended

    def finish_probe(self, now: float, *, news: bool) -> None:
        """What it showed is known: the next one waits longer, or not at all after news."""
        self._wait = _FIRST_WAIT if news else min(2 * self._wait, _LONGEST_WAIT)
        self._next = now if news else now + self._wait
