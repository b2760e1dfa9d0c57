# SPDX-License-Identifier: Apache-2.0
"""Choice of guesses: where the target may leave the drafter's chain, and with which token."""

import heapq
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple


class BranchPoint(NamedTuple):
    """A guess: a token that may replace the chain's token at one position.

    Attributes:
        place: Number of chain tokens before it.
        token: Drafter id; differs from the chain's token there.
        probability: Probability that the target follows the chain up to here, then emits `token`.
    """

    place: int
    token: int
    probability: float


class Alternative(NamedTuple):
    """The drafter's most likely tokens at one position of its chain.

    Attributes:
        chosen: The chain's token there.
        tokens: The most likely tokens.
        shares: Their probabilities.
    """

    chosen: int
    tokens: Sequence[int]
    shares: Sequence[float]

    @property
    def share(self) -> float:
        """Probability of the chain's token; 0 if it is not among the most likely."""
        return dict(zip(self.tokens, self.shares, strict=True)).get(self.chosen, 0.0)


def choose_guesses(
    rivals: Sequence[Alternative], follows: Sequence[float], budget: int
) -> list[BranchPoint]:
    """Return the most probable guesses. As they exclude each other, this maximizes the hit rate.

    Args:
        rivals: For each position of the chain, from the first that is not verified.
        follows: For each position, the probability that the target follows the chain there, given
            that it has followed it before.
        budget: Maximum number of guesses.

    Returns:
        The most probable first; of equal ones, the earlier position first.
    """
    survival = accumulate(follows, mul, initial=1.0)
    guesses = (
        BranchPoint(place, token, reached * share)
        for place, (reached, (chosen, tokens, shares)) in enumerate(
            zip(survival, rivals, strict=False)
        )
        for token, share in zip(tokens, shares, strict=True)
        if token != chosen
    )
    return heapq.nlargest(budget, guesses, key=lambda guess: guess.probability)
