# SPDX-License-Identifier: Apache-2.0
"""Which steps of the target a drafter looks at.

A look takes time of the host for each request and, where steps are scheduled ahead, waits for the
device. So while nothing is drafted, it is taken now and then: at two steps in a row, the second of
which can be timed.
"""

_MANY = 8  # steps without drafts, in a row, that are looked at
_APART = 16  # of later ones, the first two of so many


class Looks:
    """Counts steps."""

    def __init__(self) -> None:
        self._without = 0  # steps in a row

    def passes(self, without_drafts: bool) -> bool:
        """Whether the step that is to be counted goes by.

        Args:
            without_drafts: None were verified in it, and none are to be made behind it.
        """
        self._without = self._without + 1 if without_drafts else 0
        return self._without > _MANY and self._without % _APART > 1
