# SPDX-License-Identifier: Apache-2.0
"""Explicit random choices of an algorithm, so that its exact distribution can be computed.

An algorithm takes its random choices from `Chance`. `law` runs it along every sequence of choices
and adds up their probabilities. This proves a distribution, which sampling cannot.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

Outcome = TypeVar("Outcome", bound=Hashable)


class Chance(Protocol):
    """Source of an algorithm's random choices."""

    def draw(self, weights: ArrayLike) -> int:
        """Return an index, with probability in proportion to its weight."""

    def flip(self, probability: float) -> bool:
        """Return True with this probability; values outside [0, 1] are clipped."""


class _Replay:
    """Makes the prescribed first choices, then always the first possible one."""

    def __init__(self, beginning: list[int]) -> None:
        self._beginning = beginning
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self.probability = 1.0

    def draw(self, weights: ArrayLike) -> int:
        values = np.asarray(weights, float)
        support = [int(i) for i in np.flatnonzero(values > 0)]
        depth = len(self.taken)
        index = self._beginning[depth] if depth < len(self._beginning) else support[0]
        self.taken.append(index)
        self.possible.append(support)
        self.probability *= float(values[index] / values.sum())
        return index

    def flip(self, probability: float) -> bool:
        yes = min(max(float(probability), 0.0), 1.0)
        return bool(self.draw([1.0 - yes, yes]))


def law(algorithm: Callable[[Chance], Outcome]) -> dict[Outcome, float]:
    """Return the exact distribution of an algorithm's outcome.

    The algorithm must make finitely many choices and depend on nothing else that changes. It runs
    once for every sequence of choices, so vocabularies must be small and drafts short.
    """
    found: dict[Outcome, float] = defaultdict(float)
    beginnings: list[list[int]] = [[]]
    while beginnings:
        beginning = beginnings.pop()
        chance = _Replay(beginning)
        outcome = algorithm(chance)
        found[outcome] += chance.probability
        for depth in range(len(beginning), len(chance.taken)):
            for other in chance.possible[depth]:
                if other != chance.taken[depth]:
                    beginnings.append([*chance.taken[:depth], other])
    return dict(found)
