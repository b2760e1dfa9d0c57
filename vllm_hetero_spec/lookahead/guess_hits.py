# SPDX-License-Identifier: Apache-2.0
"""Which of the lines that are drafted ahead the target then goes along: the chain, or a guess.

Of each line by itself, as guesses come the likeliest first: so it is known what one more would add.
Lines that have not been followed for long count as promising again, and are tried.
"""

_WEIGHT = 4.0  # look-ups that what is thought of a line before any is worth
_KEEP = 0.99  # weight of a look-up against the next: half after 70, some seconds


class GuessHits:
    """Chances of lines, by rank: 0 is the chain's."""

    def __init__(self) -> None:
        self._counts: list[list[float]] = []  # of each rank: look-ups, hits

    def observe(self, rank: int | None, guesses: int) -> None:
        """One look-up, where so many guesses were followed beside the chain.

        Args:
            rank: Of the line that was hit; None where none was.
            guesses: As said.
        """
        self._counts += [[0.0, 0.0] for _ in range(1 + guesses - len(self._counts))]
        for line, counts in enumerate(self._counts):
            counts[0] = _KEEP * counts[0] + (line <= guesses)
            counts[1] = _KEEP * counts[1] + (line == rank)

    def chances(self, guesses: int) -> list[float]:
        """P[any line up to each is hit]: of the chain alone, with one guess, and so on.

        Of a line that was not followed: half of what those before it leave, and no more than the
        one before it has.
        """
        reached, last, found = 0.0, 1.0, []
        for line in range(1 + guesses):
            seen, hits = self._counts[line] if line < len(self._counts) else (0.0, 0.0)
            prior = min(last, 0.5 * (1.0 - reached))
            last = (hits + _WEIGHT * prior) / (seen + _WEIGHT)
            reached = min(reached + last, 1.0)
            found.append(reached)
        return found
