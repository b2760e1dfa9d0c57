# SPDX-License-Identifier: Apache-2.0
"""Expected length of outputs: a context is worth reading only for an output that is long enough."""

from collections.abc import Sequence

USUAL = 256.0  # tokens of an output, before any has been seen
_NEW = 0.02  # weight of a step: the last 50 or so count


class OutputLengths:
    """Learns from running requests, which have on average emitted half of their outputs."""

    def __init__(self) -> None:
        self._mean = USUAL

    def expected(self, emitted: Sequence[int], room: Sequence[int]) -> list[float]:
        """Learn from a step, and return the expected length of each request's output in tokens.

        Args:
            emitted: Output tokens of each request.
            room: Output tokens that each request may still emit. Its length is at most these.
        """
        running = [own for own in emitted if own]  # the others still read their prompts
        if running:
            self._mean += _NEW * (2.0 * sum(running) / len(running) - self._mean)
        return [min(self._mean, most) for most in room]
