# SPDX-License-Identifier: Apache-2.0
"""What past drafts teach about the next: acceptance by position, by confidence, and whole drafts.

Outcomes are heard one request at a time and learnt together now and then, which is cheaper.
"""

import math
from collections.abc import Sequence

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import Confidence, PositionRates
from vllm_hetero_spec.lookahead.recent import RecentDrafts

# Accepted tokens so many standard deviations from what was foreseen, over the last dozen drafts or
# so (weights fall by this factor), mean that what was known counts for less.
_SURPRISE, _RECENT, _AFTER_SURPRISE = 2.7, 0.95, 0.2
_LOOKED_BACK = 32  # drafts


class Experience:
    """All that is known of drafts.

    Args:
        positions: Longest draft, in target tokens.

    Attributes:
        rates: Conditional acceptance of each position, as of the last `learn`.
        survival: P[accepted up to each position] of recent drafts, float [n, positions], likewise.
        drafts: Drafts learnt from.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._by_position = PositionRates(positions)
        self._by_confidence = Confidence()
        self._recent = RecentDrafts(positions)
        self.drafts = 0
        self._excess = self._variance = 0.0
        self._heard: list[tuple[int, int, Sequence[float], int]] = []
        self._read()

    def hear(self, verified: int, accepted: int, confidences: Sequence[float], wanted: int) -> None:
        """Note one draft; see `Controller.observe_acceptance`."""
        self._heard.append((verified, accepted, confidences or [math.nan] * verified, wanted))

    def learn(self, keep: float = 1.0) -> bool:
        """Learn from what was heard, if anything; what was known weighs `keep` times as much."""
        if not self._heard:
            return False
        heard, self._heard = self._heard, []
        self.drafts += len(heard)
        if self._surprised(heard):
            keep = min(keep, _AFTER_SURPRISE)
        if keep < 1.0:
            self._by_position.age(keep)
            self._by_confidence.age(keep)
        self._by_position.observe([h[0] for h in heard], [h[1] for h in heard])
        tested = [
            (confidences[j], j, j < accepted)
            for verified, accepted, confidences, _ in heard
            for j in range(min(verified, accepted + 1, len(confidences)))
            if not math.isnan(confidences[j])
        ]
        if tested:
            self._by_confidence.observe(*zip(*tested, strict=True))
        for _, _, confidences, wanted in heard:
            self._recent.add(confidences, min(wanted, self._positions))
        self._read()
        return True

    def follow(self, confidences: Sequence[Sequence[float]]) -> list[list[float]]:
        """P[accepted up to each token] of drafts under way, of the shape of `confidences`."""
        chance, rates = self._by_confidence.chance, self.rates
        followed = []
        for draft in confidences:
            alive, survival = 1.0, []
            for position, confidence in enumerate(draft[: self._positions]):
                known = confidence == confidence  # not NaN
                alive *= chance(confidence, position) if known else rates[position]
                survival.append(alive)
            followed.append(survival)
        return followed

    def _surprised(self, heard: list[tuple[int, int, Sequence[float], int]]) -> bool:
        """Whether acceptance has been so far from what was foreseen that it must have changed."""
        heard = heard[-_LOOKED_BACK:]
        foreseen = self.follow([confidences[:verified] for verified, _, confidences, _ in heard])
        for (_, accepted, _, _), survival in zip(heard, foreseen, strict=True):
            mean = sum(survival)
            square = sum((2 * position + 1) * s for position, s in enumerate(survival))
            self._excess = _RECENT * self._excess + accepted - mean
            self._variance = _RECENT**2 * self._variance + square - mean**2
        surprised = abs(self._excess) > _SURPRISE * math.sqrt(self._variance) + 0.2
        if surprised:
            self._excess = self._variance = 0.0
        return surprised

    def _read(self) -> None:
        rates = self._by_position.rates()
        self.rates: list[float] = rates.tolist()
        self.survival: np.ndarray = self._recent.survival(self._by_confidence, rates)
