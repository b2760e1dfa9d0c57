# SPDX-License-Identifier: Apache-2.0
"""What trees would add to chains: recent trees replayed at any price of a row."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

_KEEP = 0.9  # weight of a step's trees against the next
_REPRICED = 4  # prices of a row that are tried, until its tokens pay for the last of them
_KEPT = 32  # trees of each kind: each has several nodes beside its chain


class BranchStatistics:
    """What recent trees had beside the drafter's chain, of greedy and of random requests.

    Attributes:
        room: Whether the target has any for them in the present step; told before it is planned.
    """

    def __init__(self) -> None:
        self.room = True
        self._kinds = deque[np.ndarray](maxlen=_KEPT), deque[np.ndarray](maxlen=_KEPT)
        self._together: list[np.ndarray | None] = [None, None]  # of each kind
        # Trees and their seconds, discounted: found and valued; and trimmed, where that was due.
        self._found = self._trimmed = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """That a tree takes on the host, beside the drafter's steps."""
        return sum(seconds / max(trees, 1.0) for trees, seconds in (self._found, self._trimmed))

    def add(
        self,
        depths: Sequence[int],
        values: Sequence[float],
        again: Sequence[int],
        context: int,
        random: bool,
    ) -> None:
        """Note a tree.

        Args:
            depths: Of each node beside the chain, 1 for one that continues the text itself.
            values: P[accepted] of each.
            again: Rows that are fed again for each: above 0 where it opens a side sequence.
            context: Tokens of its request, which each side sequence reads.
            random: Of a random request, not a greedy one.
        """
        read = [context * (rows > 0) for rows in again]
        self._kinds[random].append(np.array([depths, values, again, read], float).reshape(4, -1))
        self._together[random] = None

    def found(self, trees: int, seconds: float) -> None:
        """Note what it took to find so many trees, or 0 for what it took to value them."""
        self._found = _discounted(self._found, trees, seconds)

    def trimmed(self, trees: int, seconds: float) -> None:
        """Note what it took to trim so many."""
        self._trimmed = _discounted(self._trimmed, trees, seconds)

    def worth(
        self, depth: int | None, row: float, random: Sequence[bool], read: float = 0.0
    ) -> np.ndarray:
        """Tokens, rows, and context tokens read again, that a draft has beside its chain.

        Args:
            depth: At which depth, from 1; None for all.
            row: Tokens that a row has to bring.
            random: Of each request that is to be drafted for, at least one.
            read: Tokens that each context token read again has to bring.

        Returns:
            float [3].
        """
        share = sum(random) / len(random)
        found = np.zeros(3)
        for kind, weight in enumerate((1.0 - share, share)):
            trees = self._kinds[kind]
            if not trees or not weight:
                continue
            depths, values, again, tokens = self._joined(bool(kind))
            kept = values >= row * (1.0 + again) + read * tokens
            if depth is not None:
                kept &= depths == depth
            sums = values[kept].sum(), (1.0 + again[kept]).sum(), tokens[kept].sum()
            found += weight / len(trees) * np.array(sums)
        return found

    def paying(
        self,
        depth: int,
        row: float,
        price_of: Callable[[float], float],
        random: Sequence[bool],
        read: float,
    ) -> tuple[np.ndarray, float]:
        """`worth` at a price at which all rows pay for the last of them, or nearly; and that price.

        Args:
            row: Price of the first.
            price_of: That of the last of so many for each draft.
            depth, random, read: See `worth`.
        """
        for _ in range(_REPRICED):
            found = self.worth(depth, row, random, read)
            last = price_of(float(found[1]))
            if last <= row:
                break
            row = last
        return found, row

    def _joined(self, random: bool) -> np.ndarray:
        """float [4, n], depths, values, rows fed again, context read again of one kind's nodes."""
        joined = self._together[random]
        if joined is None:
            joined = self._together[random] = np.concatenate(self._kinds[random], axis=1)
        return joined


def _discounted(before: tuple[float, float], trees: int, seconds: float) -> tuple[float, float]:
    keep = _KEEP if trees else 1.0
    return before[0] * keep + trees, before[1] * keep + seconds
