# SPDX-License-Identifier: Apache-2.0
"""Choice of the steps to read while speculation is disabled.

Reading a step takes host time for each request, and without drafts no device work hides it. So only
some steps are read: two in a row, because the second one can be timed.
"""

from vllm_hetero_spec.lookahead.prober import other_batch

_MANY = 2  # steps; the first ones without drafts, which are read
_APART = 64  # steps; of so many later ones, the first two are read


class Looks:
    """Counts steps without drafts."""

    def __init__(self) -> None:
        self._without = 0  # steps in a row
        self._batch = 0  # requests when they began

    def passes(self, without_drafts: bool, batch: int) -> bool:
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
