# SPDX-License-Identifier: Apache-2.0
"""Random choices of an algorithm, made explicit, so that its law can be computed exactly.

An algorithm written against `Chance` says where it draws and from what. `law` runs it along every
sequence of choices and adds up their probabilities, which proves what sampling can only suggest.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

Outcome = TypeVar("Outcome", bound=Hashable)


class Chance(Protocol):
    """Where an algorithm gets its random choices from."""

    def draw(self, weights: ArrayLike) -> int:
        """An index, with probability in proportion to its weight."""

    def flip(self, probability: float) -> bool:
        """True with this probability; values outside [0, 1] are clipped."""


class _Replay:
    """Follows a prescribed beginning, then takes the first possible choice every time."""

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
    """The exact distribution of an algorithm's outcome.

    The algorithm must make finitely many choices and depend on nothing else that changes. Its cost
    is one run for every sequence of choices: for small vocabularies and short drafts only.
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
