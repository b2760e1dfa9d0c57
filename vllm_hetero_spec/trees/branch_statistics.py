# SPDX-License-Identifier: Apache-2.0
"""Expected gain of draft trees over chains: recent trees are replayed at any price of a row."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from vllm_hetero_spec.lookahead.costs import Recent

_KEEP = 0.9  # discount factor per observation
_REPRICED = 4  # largest number of row prices that `paying` tries
_KEPT = 32  # trees per kind; each has several nodes beside its chain


class BranchStatistics:
    """Nodes of recent trees beside the drafter's chain, for greedy and for sampled requests.

    Attributes:
        room: True if the target has room for branches in the present step; set before each plan.
        reading: Measurements of `read_seconds`.
        widening: Measurements of `step_share`.
    """

    def __init__(self) -> None:
        self.room = True
        self._kinds = deque[np.ndarray](maxlen=_KEPT), deque[np.ndarray](maxlen=_KEPT)
        self._together: list[np.ndarray | None] = [None, None]  # per kind
        # Discounted numbers of trees, and seconds to find and value them, and to trim them.
        self._found = self._trimmed = (0.0, 0.0)
        self.reading, self.widening = Recent([0.0]), Recent([0.0])

    @property
    def seconds(self) -> float:
        """Seconds per tree on the host, without the drafter's steps."""
        return sum(seconds / max(trees, 1.0) for trees, seconds in (self._found, self._trimmed))

    @property
    def step_share(self) -> float:
        """Additional share of a drafter step that collects candidates."""
        return max(self.widening.value, 0.0)

    @property
    def read_seconds(self) -> float:
        """Seconds of the target per context token that a branch reads again."""
        return max(self.reading.value, 0.0)

    def add(
        self,
        depths: Sequence[int],
        values: Sequence[float],
        again: Sequence[int],
        context: int,
        random: bool,
    ) -> None:
        """Add a tree; arrays have one entry per node beside the chain.

        Args:
            depths: 1 for a node that directly continues the request.
            values: P[accepted].
            again: Rows that are recomputed for the node; above 0 if it opens a branch.
            context: Tokens of the request, which each branch reads.
            random: True for a sampled request.
        """
        read = [context * (rows > 0) for rows in again]
        self._kinds[random].append(np.array([depths, values, again, read], float).reshape(4, -1))
        self._together[random] = None

    def found(self, trees: int, seconds: float) -> None:
        """Add the seconds that it took to find `trees` trees, or to value them (`trees` 0)."""
        self._found = _discounted(self._found, trees, seconds)

    def trimmed(self, trees: int, seconds: float) -> None:
        """Add the seconds that it took to trim `trees` trees."""
        self._trimmed = _discounted(self._trimmed, trees, seconds)

    def worth(
        self, depth: int | None, row: float, random: Sequence[bool], read: float = 0.0
    ) -> np.ndarray:
        """Return the gain and cost of a draft's nodes beside its chain.

        Args:
            depth: Depth of the nodes, from 1; None for all.
            row: Price of a row in tokens.
            random: One entry per request to draft for, at least one; True if it is sampled.
            read: Price in tokens of each context token that a branch reads.

        Returns:
            float [3]: expected tokens, rows, and context tokens that branches read.
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
        """Return `worth` at a row price at which nearly all rows pay for the last, and the price.

        Args:
            row: Price of the first row.
            price_of: Returns the price of the last of so many rows per draft.
            depth, random, read: As in `worth`.
        """
        for _ in range(_REPRICED):
            found = self.worth(depth, row, random, read)
            last = price_of(float(found[1]))
            if last <= row:
                break
            row = last
        return found, row

    def _joined(self, random: bool) -> np.ndarray:
        """Return depths, values, recomputed rows and read context of one kind, float [4, n]."""
        joined = self._together[random]
        if joined is None:
            joined = self._together[random] = np.concatenate(self._kinds[random], axis=1)
        return joined


def _discounted(before: tuple[float, float], trees: int, seconds: float) -> tuple[float, float]:
    keep = _KEEP if trees else 1.0
    return before[0] * keep + trees, before[1] * keep + seconds
