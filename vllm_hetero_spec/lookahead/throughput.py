# SPDX-License-Identifier: Apache-2.0
"""Tokens per second achieved at each batch size: what a second is worth."""

_KEEP = 0.5 ** (1 / 256)  # weight of a step against the one after it
_TRUST = 8.0  # steps of measurement that weigh as much as what was foreseen


class Throughput:
    """Discounted tokens and seconds of each batch size."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}  # steps, tokens, seconds

    def add(self, batch: int, tokens: int, seconds: float) -> None:
        """One step of this batch."""
        if seconds > 0:
            steps, all_tokens, all_seconds = self._sums.get(batch, (0.0, 0.0, 0.0))
            self._sums[batch] = (
                steps * _KEEP + 1.0,
                all_tokens * _KEEP + tokens,
                all_seconds * _KEEP + seconds,
            )

    def rate(self, batch: int, foreseen: float) -> float:
        """Tokens per second; near `foreseen` while little has been measured."""
        steps, tokens, seconds = self._sums.get(batch, (0.0, 0.0, 0.0))
        if not steps:
            return foreseen
        trusted = _TRUST * seconds / steps
        return (tokens + trusted * foreseen) / (seconds + trusted)
