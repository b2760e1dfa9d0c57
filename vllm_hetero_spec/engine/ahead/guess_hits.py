# SPDX-License-Identifier: Apache-2.0
"""Hit rates of precomputed drafts (lines): of the chain's, and of those for guessed tokens.

Each line is counted by its rank, the most likely first, which gives the gain of one more guess.
The rate of a line that was not drafted for long returns to its prior, so that it is tried again.
"""

_WEIGHT = 4.0  # look-ups that what is thought of a line before any is worth
_KEEP = 0.99  # weight of a look-up against the next: half after 70, some seconds


class GuessHits:
    """Hit rates of lines by rank; rank 0 is the chain's."""

    def __init__(self) -> None:
        self._counts: list[list[float]] = []  # of each rank: look-ups, hits

    def observe(self, rank: int | None, guesses: int) -> None:
        """Add a look-up.

        Args:
            rank: Rank of the line that was hit; None if none was.
            guesses: Number of lines beside the chain.
        """
        self._counts += [[0.0, 0.0] for _ in range(1 + guesses - len(self._counts))]
        for line, counts in enumerate(self._counts):
            counts[0] = _KEEP * counts[0] + (line <= guesses)
            counts[1] = _KEEP * counts[1] + (line == rank)

    def chances(self, guesses: int) -> list[float]:
        """Return P[any line up to each rank is hit], for the chain alone, with one guess, ...

        The prior of a line is half of the probability that the lines before it miss, and at most
        the rate of the previous line.
        """
        reached, last, found = 0.0, 1.0, []
        for line in range(1 + guesses):
            seen, hits = self._counts[line] if line < len(self._counts) else (0.0, 0.0)
            prior = min(last, 0.5 * (1.0 - reached))
            last = (hits + _WEIGHT * prior) / (seen + _WEIGHT)
            reached = min(reached + last, 1.0)
            found.append(reached)
        return found
