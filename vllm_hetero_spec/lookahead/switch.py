# SPDX-License-Identifier: Apache-2.0
"""Drafting or the target alone: another batch changes it at once, mere estimates with inertia."""

# Foreseen gains at which drafting begins and ends, and steps that it stays off at least.
_BEGIN, _END = 1.02, 0.99
_STAY_OFF = 8
# Another batch is one larger or smaller by this factor: its costs are known, nothing has to settle.
_OTHER_BATCH = 1.25
# The trial in the beginning goes on for so many drafts, or until it has cost so many seconds.
_TRIAL_DRAFTS, _TRIAL_SECONDS = 48, 0.1


class Switch:
    """Off in the beginning.

    Attributes:
        off: The target works alone.
    """

    def __init__(self) -> None:
        self.off = True
        self._since = _STAY_OFF
        self._batch = 0

    def turn(self, gain: float, batch: int) -> None:
        """Decide for a step, given the foreseen rate of drafting over that of the target alone."""
        self._since += 1
        low, high = sorted((batch, self._batch))
        settled = high > _OTHER_BATCH * low or self._since >= _STAY_OFF
        if (settled and gain > _BEGIN) if self.off else gain < _END:
            self.off = not self.off
            self._since, self._batch = 0, batch


class Trial:
    """The time in which drafting goes on, whatever the first drafts were like, if good ones pay."""

    def __init__(self) -> None:
        self._lost = 0.0

    def charge(self, seconds: float) -> None:
        """A step of the trial took so much longer than the target alone for as many tokens."""
        self._lost += seconds

    def over(self, drafts: int) -> bool:
        """Whether so many drafts are enough, or too much has been lost."""
        return drafts >= _TRIAL_DRAFTS or self._lost > _TRIAL_SECONDS
