# SPDX-License-Identifier: Apache-2.0
"""What trees would add to chains: recent trees replayed at any price of a row."""

from collections import deque
from collections.abc import Sequence

import numpy as np

_KEEP = 0.9  # weight of a step's trees against the next
_LOOK_EVERY = 64  # steps without trees, before one that looks whether they pay now
_KEPT = 32  # trees of each kind: each has several nodes beside its chain


class SideBranches:
    """What recent trees had beside the drafter's chain, of greedy and of random requests.

    Attributes:
        seconds: That a tree takes on the host, beside the drafter's steps.
    """

    def __init__(self) -> None:
        self._kinds = deque[np.ndarray](maxlen=_KEPT), deque[np.ndarray](maxlen=_KEPT)
        self._together: list[np.ndarray | None] = [None, None]  # of each kind
        self._took = 0.0, 0.0  # trees and their seconds, discounted
        self._refused = 0
        self.seconds = 0.0

    def add(
        self, depths: Sequence[int], values: Sequence[float], again: Sequence[int], random: bool
    ) -> None:
        """Note a tree.

        Args:
            depths: Of each node beside the chain, 1 for one that continues the text itself.
            values: P[accepted] of each.
            again: Rows that are fed again for each.
            random: Of a random request, not a greedy one.
        """
        self._kinds[random].append(np.array([depths, values, again], float).reshape(3, -1))
        self._together[random] = None

    def took(self, count: int, seconds: float) -> None:
        """Note what so many trees took."""
        keep = _KEEP if count else 1.0
        self._took = self._took[0] * keep + count, self._took[1] * keep + seconds
        self.seconds = self._took[1] / max(self._took[0], 1.0)

    def pay(self, tokens_per_second: float, row: float, random: Sequence[bool]) -> bool:
        """Whether trees bring more than their rows and their time; also now and then, to see.

        Args:
            tokens_per_second: What a second is worth.
            row: Tokens that a row has to bring.
            random: As of `worth`.
        """
        brought = self.worth(None, row, random)
        pays = bool(brought[0] - row * brought[1] >= tokens_per_second * self.seconds)
        self._refused = 0 if pays else self._refused + 1
        return pays or self._refused % _LOOK_EVERY == 0

    def worth(self, depth: int | None, row: float, random: Sequence[bool]) -> np.ndarray:
        """Tokens and rows, float [2], that a draft has at a depth beside its chain.

        Args:
            depth: From 1; None for all.
            row: Tokens that a row has to bring.
            random: Of each request that is to be drafted for, at least one.
        """
        share = sum(random) / len(random)
        found = np.zeros(2)
        for kind, weight in enumerate((1.0 - share, share)):
            trees = self._kinds[kind]
            if not trees or not weight:
                continue
            depths, values, again = self._joined(bool(kind))
            kept = values >= row * (1.0 + again)
            if depth is not None:
                kept &= depths == depth
            rows = (1.0 + again[kept]).sum()
            found += weight / len(trees) * np.array([values[kept].sum(), rows])
        return found

    def _joined(self, random: bool) -> np.ndarray:
        """float [3, n], depths, values and rows fed again of all nodes of one kind."""
        joined = self._together[random]
        if joined is None:
            joined = self._together[random] = np.concatenate(self._kinds[random], axis=1)
        return joined
