# SPDX-License-Identifier: Apache-2.0
"""Which steps of the target a drafter at rest looks at.

A look takes the host some time for each request. While nothing is drafted, and nothing on a device
hides that time, looks are taken now and then: at two steps in a row, the second of which can be
timed.
"""

from vllm_hetero_spec.lookahead.on_off import other_batch

_MANY = 2  # steps without drafts, in a row, that are looked at
_APART = 64  # of later ones, the first two of so many


class Looks:
    """Counts steps."""

    def __init__(self) -> None:
        self._without = 0  # steps in a row
        self._batch = 0  # requests, when they began

    def passes(self, without_drafts: bool, batch: int) -> bool:
        """Whether the step that is to be counted goes by.

        Args:
            without_drafts: None were verified in it, and none are to be made behind it.
            batch: Its requests; where they are many more or fewer, drafts may pay.
        """
        goes_on = without_drafts and not other_batch(batch, self._batch)
        self._without = self._without + 1 if goes_on else 0
        if not goes_on:
            self._batch = batch
        return self._without > _MANY and self._without % _APART > 1
