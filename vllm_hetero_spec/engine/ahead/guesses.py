# SPDX-License-Identifier: Apache-2.0
"""Where a target may leave the drafter's chain, and with what: the likeliest of so many guesses."""

import heapq
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple


class BranchPoint(NamedTuple):
    """A token that may come in the place of the chain's.

    Attributes:
        place: Tokens of the chain in front of it.
        token: A drafter token, another than the chain's at that place.
        probability: That the chain is followed so far, and left by this token.
    """

    place: int
    token: int
    probability: float


class Alternative(NamedTuple):
    """What the drafter thinks of one place of its chain.

    Attributes:
        chosen: The chain's token there.
        tokens: The likeliest tokens.
        shares: Their probabilities.
    """

    chosen: int
    tokens: Sequence[int]
    shares: Sequence[float]

    @property
    def share(self) -> float:
        """The probability of the chain's token; 0 where it is none of the likeliest."""
        return dict(zip(self.tokens, self.shares, strict=True)).get(self.chosen, 0.0)


def choose_guesses(
    rivals: Sequence[Alternative], follows: Sequence[float], budget: int
) -> list[BranchPoint]:
    """The guesses that are hit most often together: no two of them are of the same outcome.

    Args:
        rivals: Of each place of the chain, from the first that is not settled yet.
        follows: Of each place, the probability that the target follows the chain there, given that
            it did before.
        budget: Guesses at most.

    Returns:
        The likeliest first; the earlier place first among equals.
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
