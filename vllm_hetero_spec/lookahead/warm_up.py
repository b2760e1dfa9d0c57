# SPDX-License-Identifier: Apache-2.0
"""Warm-up of an unknown pair: drafting continues even if the very first drafts are rejected."""

from vllm_hetero_spec.lookahead.acceptance_stats import AcceptanceStats

_DRAFTS = 48  # enough to tell good from bad, by confidence as well
_LOST = 2.0  # plain steps, at most, before a useless drafter is given up,
_SECONDS = 0.05  # or, where these are quick, so many seconds


class WarmUp:
    """Allows drafting while it loses little.

    Args:
        acceptance: Statistics of the pair; there is no warm-up if an earlier run has saved some.
    """

    def __init__(self, acceptance: AcceptanceStats) -> None:
        self._acceptance, self._goes_on = acceptance, not acceptance.drafts
        self._lost = 0.0  # seconds

    @property
    def lasts(self) -> bool:
        """True if there are too few observations to rely on."""
        return self._goes_on and self._acceptance.drafts < _DRAFTS

    def lose(self, seconds: float, plain: float) -> None:
        """Record a step.

        Args:
            seconds: Its time minus that of the target alone for its tokens, and minus the drafter's
                catch-up.
            plain: Seconds of a step of the target alone.
        """
        self._lost += seconds
        self._goes_on = self._lost <= max(_LOST * plain, _SECONDS)
