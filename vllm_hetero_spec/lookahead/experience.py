# SPDX-License-Identifier: Apache-2.0
"""What past drafts teach about the next: acceptance by position, by confidence, and whole drafts.

Greedy and random requests are two kinds: what the drafter is sure of a greedy target hardly ever
rejects, a random one as often as it draws something else. Outcomes are heard one request at a time
and learnt together now and then, which is cheaper.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import Confidence, PositionRates
from vllm_hetero_spec.lookahead.recent import RecentDrafts

# Accepted tokens so many standard deviations from what was foreseen, over the last dozen drafts or
# so (weights fall by this factor), mean that what was known counts for less.
_SURPRISE, _RECENT, _AFTER_SURPRISE = 2.7, 0.95, 0.2
_LOOKED_BACK = 32  # drafts


class _Heard(NamedTuple):
    """One draft; see `Controller.observe_acceptance`."""

    verified: int
    accepted: int
    confidences: Sequence[float]
    wanted: int


class Experience:
    """All that is known of drafts.

    Args:
        positions: Longest draft, in target tokens.

    Attributes:
        drafts: Drafts learnt from.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._lessons = _Lessons(positions), _Lessons(positions)  # of greedy, of random requests
        self.drafts = 0
        self._heard: tuple[list[_Heard], list[_Heard]] = [], []

    def hear(
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float],
        wanted: int,
        random: bool = False,
    ) -> None:
        """Note one draft; see `Controller.observe_acceptance`."""
        told = confidences or [math.nan] * verified
        self._heard[random].append(_Heard(verified, accepted, told, wanted))

    def learn(self, keep: float = 1.0) -> bool:
        """Learn from what was heard, if anything; what was known weighs `keep` times as much."""
        if not any(self._heard):
            return False
        for lessons, heard in zip(self._lessons, self._heard, strict=True):
            if heard:
                self.drafts += len(heard)
                lessons.learn(heard, keep)
        self._heard = [], []
        return True

    def rates(self, random: bool) -> list[float]:
        """Conditional acceptance of each position of one kind of request, as of last `learn`."""
        return self._lessons[random].rates

    def follow(
        self, confidences: Sequence[Sequence[float]], random: Sequence[bool]
    ) -> list[list[float]]:
        """P[accepted up to each token] of drafts under way, of the shape of `confidences`.

        Args:
            confidences: Of the tokens of each draft.
            random: Which drafts are of random requests.
        """
        return [
            self._lessons[kind].follow(draft)
            for draft, kind in zip(confidences, random, strict=True)
        ]

    def survival(self, random: Sequence[bool]) -> np.ndarray:
        """P[accepted up to each position] of recent drafts, float [n, positions].

        Args:
            random: Of each request that is to be drafted for, at least one; the kinds of drafts
                come in turn as these do.
        """
        found = {kind: self._lessons[kind].survival for kind in set(random)}
        if len(found) == 1:
            return found.popitem()[1]
        kinds = self._in_turn(random)
        rows = np.empty((len(kinds), self._positions))
        for kind, survival in found.items():
            rows[kinds == kind] = np.resize(survival, (np.sum(kinds == kind), self._positions))
        return rows

    def conditional(self, random: Sequence[bool]) -> np.ndarray:
        """Conditional acceptance of each position for the rows of `survival`, of its shape."""
        kinds = self._in_turn(random)
        return np.where(kinds[:, None], self.rates(True), self.rates(False))

    def _in_turn(self, random: Sequence[bool]) -> np.ndarray:
        """bool [n]: the kinds one after the other, over and over, or evenly some of them."""
        count = max(len(self._lessons[kind].survival) for kind in set(random))
        if len(random) <= count:
            return np.resize(np.array(random, bool), count)
        return np.array(random, bool)[np.arange(count) * len(random) // count]


class _Lessons:
    """What the drafts of one kind of request have taught.

    Attributes:
        rates: Conditional acceptance of each position.
        survival: P[accepted up to each position] of its recent drafts, float [n, positions].
    """

    def __init__(self, positions: int) -> None:
        self._by_position = PositionRates(positions)
        self._by_confidence = Confidence()
        self._recent = RecentDrafts(positions)
        self._excess = self._variance = 0.0
        self._read()

    def learn(self, heard: Sequence[_Heard], keep: float) -> None:
        """From drafts; what was known weighs `keep` times as much."""
        if self._surprised(heard[-_LOOKED_BACK:]):
            keep = min(keep, _AFTER_SURPRISE)
        if keep < 1.0:
            self._by_position.age(keep)
            self._by_confidence.age(keep)
        self._by_position.observe([h.verified for h in heard], [h.accepted for h in heard])
        tested = [
            (draft.confidences[j], j, j < draft.accepted)
            for draft in heard
            for j in range(min(draft.verified, draft.accepted + 1, len(draft.confidences)))
            if not math.isnan(draft.confidences[j])
        ]
        if tested:
            self._by_confidence.observe(*zip(*tested, strict=True))
        for draft in heard:
            self._recent.add(draft.confidences, min(draft.wanted, len(self.rates)))
        self._read()

    def follow(self, draft: Sequence[float]) -> list[float]:
        """P[accepted up to each token], given their confidences."""
        alive, survival = 1.0, []
        for position, confidence in enumerate(draft[: len(self.rates)]):
            if math.isnan(confidence):
                alive *= self.rates[position]
            else:
                alive *= self._by_confidence.chance(confidence, position)
            survival.append(alive)
        return survival

    def _surprised(self, heard: Sequence[_Heard]) -> bool:
        """Whether acceptance has been so far from what was foreseen that it must have changed."""
        for draft in heard:
            survival = self.follow(draft.confidences[: draft.verified])
            mean = sum(survival)
            square = sum((2 * position + 1) * s for position, s in enumerate(survival))
            self._excess = _RECENT * self._excess + draft.accepted - mean
            self._variance = _RECENT**2 * self._variance + square - mean**2
        surprised = abs(self._excess) > _SURPRISE * math.sqrt(self._variance) + 0.2
        if surprised:
            self._excess = self._variance = 0.0
        return surprised

    def _read(self) -> None:
        rates = self._by_position.rates()
        self.rates: list[float] = rates.tolist()
        self.survival: np.ndarray = self._recent.survival(self._by_confidence, rates)
