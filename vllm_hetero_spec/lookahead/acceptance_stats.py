# SPDX-License-Identifier: Apache-2.0
"""Statistics of past drafts: acceptance by position, by confidence, and whole drafts.

Greedy and sampled requests are separate kinds: a greedy target hardly ever rejects a confident
token, a sampled one as often as it draws another token. Drafts are recorded one by one and learnt
in batches, which is cheaper.

A rate per position hides that some drafts are accepted entirely and others not at all. So recent
drafts are kept, and replayed to estimate any draft length or stopping rule.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import Confidence, PositionRates

_SURPRISE = 2.7  # standard deviations of accepted tokens: chance exceeds it once in 140 times
_SLACK = 0.2  # tokens on top, for the first drafts, whose variance is next to none
_RECENT = 0.95  # weight of a draft against the next: surprises are sought in the last 20 or so
_AFTER_SURPRISE = 0.2  # what the old knowledge weighs behind one: it is a hint, no more
_LOOKED_BACK = 32  # drafts beyond these would weigh less than 0.2 in a surprise
_KEPT = 64  # drafts replayed: enough for a mean within some percent, few enough to be quick
_TOKENS_OF_DRAFT = 2  # tested, about
_ENDED = -1.0  # in the place of a confidence: the drafter had nothing more to propose


class Observation(NamedTuple):
    """One verified draft, with the arguments of `Controller.observe_acceptance`."""

    verified: int
    accepted: int
    confidences: Sequence[float]
    wanted: int


class AcceptanceStats:
    """Statistics of all drafts.

    Args:
        positions: Largest draft length, in target tokens.

    Attributes:
        positions: As given.
        drafts: Number of drafts learnt from.
    """

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self._kinds = _KindStats(positions), _KindStats(positions)  # greedy, random
        self._observations: tuple[list[Observation], list[Observation]] = [], []
        self.drafts = 0

    def observe(self, draft: Observation, random: bool) -> None:
        """Record a verified draft of a greedy or sampled request, for `learn`."""
        if not draft.confidences:
            draft = draft._replace(confidences=[math.nan] * draft.verified)
        self._observations[random].append(draft)

    def learn(self, keep: float = 1.0) -> bool:
        """Learn from the recorded drafts; older ones get `keep` times their weight.

        Returns:
            True if there were recorded drafts.
        """
        if not any(self._observations):
            return False
        for kind, observations in zip(self._kinds, self._observations, strict=True):
            if observations:
                self.drafts += len(observations)
                kind.learn(observations, keep)
        self._observations = [], []
        return True

    def rates(self, random: bool) -> list[float]:
        """Conditional acceptance of each position of one kind of request, as of last `learn`."""
        return self._kinds[random].rates

    def survival_of(self, confidences: Sequence[float], random: bool) -> list[float]:
        """P[accepted up to each token] of a draft under way, by its confidences."""
        return self._kinds[random].survival_of(confidences)

    def survival(self, random: Sequence[bool]) -> np.ndarray:
        """P[accepted up to each position] of recent drafts, float [n, positions].

        Args:
            random: One entry per request to draft for, at least one; True if it is sampled. The
                kinds of the n drafts alternate in the same order.
        """
        by_kind = {kind: self._kinds[kind].survival for kind in set(random)}
        if len(by_kind) == 1:
            return by_kind.popitem()[1]
        kinds = self._in_turn(random)
        rows = np.empty((len(kinds), self.positions))
        for kind, survival in by_kind.items():
            rows[kinds == kind] = np.resize(survival, (np.sum(kinds == kind), self.positions))
        return rows

    def conditional(self, random: Sequence[bool]) -> np.ndarray:
        """Conditional acceptance of each position for the rows of `survival`.

        Returns:
            float [n, positions], or [1, positions] where that is the same for all.
        """
        if len(kind := set(random)) == 1:
            return np.array([self.rates(kind.pop())])
        kinds = self._in_turn(random)
        return np.where(kinds[:, None], self.rates(True), self.rates(False))

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        greedy, random = self._kinds
        return {"drafts": self.drafts, "greedy": greedy.to_dict(), "random": random.to_dict()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], positions: int, weight: int) -> "AcceptanceStats":
        """Restore the result of `to_dict` with the weight of at most `weight` drafts of each kind.

        Raises:
            ValueError: Invalid data.
        """
        stats = cls(positions)
        stats.drafts = int(saved["drafts"])
        greedy, random = (
            _KindStats.from_dict(saved[kind], positions, weight) for kind in ("greedy", "random")
        )
        stats._kinds = greedy, random
        return stats

    def _in_turn(self, random: Sequence[bool]) -> np.ndarray:
        """bool [n]: the kinds one after the other, over and over, or evenly some of them."""
        count = max(len(self._kinds[kind].survival) for kind in set(random))
        if len(random) <= count:
            return np.resize(np.array(random, bool), count)
        return np.array(random, bool)[np.arange(count) * len(random) // count]


class _KindStats:
    """Statistics of the drafts of one kind of request.

    Attributes:
        rates: Conditional acceptance of each position.
        survival: P[accepted up to each position] of its recent drafts, float [n, positions].
    """

    def __init__(self, positions: int) -> None:
        self._by_position = PositionRates(positions)
        self._by_confidence = Confidence()
        self._recent = _RecentDrafts(positions)
        self._excess = self._variance = 0.0  # of accepted tokens over expected ones, discounted
        self._refresh()

    def learn(self, observations: Sequence[Observation], keep: float) -> None:
        """Learn from at least one draft; older ones get `keep` times their weight."""
        if self._surprised(observations[-_LOOKED_BACK:]):
            keep = min(keep, _AFTER_SURPRISE)
        if keep < 1.0:
            self._by_position.age(keep)
            self._by_confidence.age(keep)
        self._by_position.observe(
            [draft.verified for draft in observations], [draft.accepted for draft in observations]
        )
        tested = [
            (draft.confidences[j], j, j < draft.accepted)
            for draft in observations
            for j in range(min(draft.verified, draft.accepted + 1, len(draft.confidences)))
            if not math.isnan(draft.confidences[j])
        ]
        if tested:
            self._by_confidence.observe(*zip(*tested, strict=True))
        for draft in observations[-_KEPT:]:  # in whose places those before would be
            self._recent.add(draft.confidences, min(draft.wanted, len(self.rates)))
        self._refresh()

    def to_dict(self) -> dict[str, Any]:
        return {
            "by_position": self._by_position.to_dict(),
            "by_confidence": self._by_confidence.to_dict(),
            "recent": self._recent.to_lists(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], positions: int, weight: int) -> "_KindStats":
        kind = cls(positions)
        kind._by_position = PositionRates.from_dict(saved["by_position"], positions, weight)
        tokens = _TOKENS_OF_DRAFT * weight
        kind._by_confidence = Confidence.from_dict(saved["by_confidence"], tokens)
        kind._recent = _RecentDrafts.from_lists(saved["recent"], positions, weight)
        kind._refresh()
        return kind

    def survival_of(self, confidences: Sequence[float]) -> list[float]:
        """P[accepted up to each token] of a draft, given its confidences."""
        alive, survival, chance = 1.0, [], self._by_confidence.chance
        for position, (confidence, rate) in enumerate(zip(confidences, self.rates, strict=False)):
            alive *= rate if math.isnan(confidence) else chance(confidence, position)
            survival.append(alive)
        return survival

    def _surprised(self, observations: Sequence[Observation]) -> bool:
        """Return True if acceptance differs from its estimate by more than chance explains."""
        for draft in observations:
            survival = self.survival_of(draft.confidences[: draft.verified])
            mean = sum(survival)
            square = sum((2 * position + 1) * s for position, s in enumerate(survival))
            self._excess = _RECENT * self._excess + draft.accepted - mean
            self._variance = _RECENT**2 * self._variance + square - mean**2
        surprised = abs(self._excess) > _SURPRISE * math.sqrt(self._variance) + _SLACK
        if surprised:
            self._excess = self._variance = 0.0
        return surprised

    def _refresh(self) -> None:
        rates = self._by_position.rates()
        self.rates: list[float] = rates.tolist()
        self.survival: np.ndarray = self._recent.survival(self._by_confidence, rates)


class _RecentDrafts:
    """The confidences of the last drafts, in a ring.

    Args:
        positions: Longest draft, in target tokens.
    """

    def __init__(self, positions: int) -> None:
        self._ring = np.full((_KEPT, positions), np.nan)
        self._count = 0

    def add(self, confidences: Sequence[float], wanted: int) -> None:
        """Keep one draft.

        Args:
            confidences: One for each token it proposed, in order.
            wanted: Tokens that were asked for; a shorter draft is taken to have ended by itself.
        """
        row = self._ring[self._count % _KEPT]
        row[:] = np.nan
        row[len(confidences) : wanted] = _ENDED
        row[: len(confidences)] = confidences[: len(row)]
        self._count += 1

    def to_lists(self) -> list[list[float | None]]:
        """Return the drafts as JSON values, oldest first."""
        ordered = np.roll(self._ring, -(self._count % _KEPT), axis=0)[-min(self._count, _KEPT) :]
        rows = ordered.round(4).tolist() if self._count else []
        return [[None if math.isnan(x) else x for x in row] for row in rows]

    @classmethod
    def from_lists(
        cls, saved: Sequence[Sequence[float | None]], positions: int, most: int
    ) -> "_RecentDrafts":
        """Restore the last `most` drafts of a result of `to_lists`.

        Raises:
            ValueError: Invalid data.
        """
        drafts = cls(positions)
        for row in saved[-most:]:
            kept = np.array([math.nan if x is None else x for x in row], float)
            if (
                kept.shape != (positions,)
                or ((kept < 0) & (kept != _ENDED)).any()
                or (kept > 1).any()
            ):
                raise ValueError("not confidences")
            drafts._ring[drafts._count % _KEPT] = kept
            drafts._count += 1
        return drafts

    def survival(self, confidence: Confidence, rates: np.ndarray) -> np.ndarray:
        """P[accepted up to each position] of the drafts, [n, positions], n at least 1.

        Args:
            confidence: The present model.
            rates: Acceptance rates of positions that a draft did not reach, [positions].
        """
        drafts = self._ring[: min(self._count, _KEPT)]
        if not len(drafts):
            return np.cumprod(rates)[None]
        predicted = confidence.predict(drafts, np.arange(drafts.shape[1]))
        ended, unknown = drafts == _ENDED, np.isnan(drafts)
        if not ended.any():
            goes_on = 1.0
        else:
            # Where a draft was not asked for so much, it might have ended as others did.
            before = np.zeros_like(ended)
            before[:, 1:] = ended[:, :-1]
            asked = (~unknown & ~before).sum(0)
            goes_on = 1.0 - (ended & ~before).sum(0) / np.maximum(asked, 1)
            predicted[ended] = 0.0
        return np.cumprod(np.where(unknown, rates * goes_on, predicted), axis=1)
