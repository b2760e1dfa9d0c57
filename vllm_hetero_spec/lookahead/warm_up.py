# SPDX-License-Identifier: Apache-2.0
"""The first drafts of a pair that is not known: they go on, whatever the very first were like."""

from vllm_hetero_spec.lookahead.acceptance_stats import AcceptanceStats

_DRAFTS = 48  # enough to tell good from bad, by confidence as well
_LOST = 2.0  # plain steps, at most, before a useless drafter is given up,
_SECONDS = 0.05  # or, where these are quick, so many seconds


class WarmUp:
    """Drafting as long as it loses little, if good drafts would pay.

    Args:
        acceptance: Of the pair; what earlier runs learnt is believed, and nothing is tried.
    """

    def __init__(self, acceptance: AcceptanceStats) -> None:
        self._acceptance, self._goes_on = acceptance, not acceptance.drafts
        self._lost = 0.0  # seconds

    @property
    def lasts(self) -> bool:
        """Whether too little is known to go by it."""
        return self._goes_on and self._acceptance.drafts < _DRAFTS

    def lose(self, seconds: float, plain: float) -> None:
        """A step has ended.

        Args:
            seconds: That it took longer than the target alone takes for its tokens, but for texts
                that the drafter had not read.
            plain: Seconds of a step of the target alone.
        """
        self._lost += seconds
        self._goes_on = self._lost <= max(_LOST * plain, _SECONDS)
