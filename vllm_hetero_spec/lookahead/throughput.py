# SPDX-License-Identifier: Apache-2.0
"""Tokens per second achieved under each load: what a second is worth."""

from collections.abc import Hashable

_KEEP = 0.5 ** (1 / 256)  # weight of a step against the one after it
_TRUST = 8.0  # steps of measurement that weigh as much as what was foreseen


class Throughput:
    """Discounted tokens and seconds of each load: a batch size and what it is made of."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[float, float, float]] = {}  # steps, tokens, seconds

    def add(self, load: Hashable, tokens: int, seconds: float) -> None:
        """One step of this load."""
        if seconds > 0:
            steps, all_tokens, all_seconds = self._sums.get(load, (0.0, 0.0, 0.0))
            self._sums[load] = (
                steps * _KEEP + 1.0,
                all_tokens * _KEEP + tokens,
                all_seconds * _KEEP + seconds,
            )

    def rate(self, load: Hashable, foreseen: float) -> float:
        """Tokens per second; near `foreseen` while little has been measured."""
        steps, tokens, seconds = self._sums.get(load, (0.0, 0.0, 0.0))
        if not steps:
            return foreseen
        trusted = _TRUST * seconds / steps
        return (tokens + trusted * foreseen) / (seconds + trusted)
