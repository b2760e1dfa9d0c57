# SPDX-License-Identifier: Apache-2.0
"""Acceptance of draft tokens: a logistic regression, and recent drafts to replay.

Greedy and sampled requests are separate kinds: a greedy target hardly ever rejects a confident
token, a sampled one does so as often as it samples another token. Whole drafts are kept, because
some are accepted entirely and others not at all, which a rate per position hides.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_BEND = 0.5  # logit of a confidence of 0.62, about where drafters go from ignorant to right
_PRIOR_WEIGHTS = np.array([0.8, 0.0, 0.0, 0.0])  # slope 0.8: drafters are a little too sure
_PRIOR_INFORMATION = np.diag([4.0, 4.0, 0.5, 4.0])  # 1 / variance; the offset varies most
_HALF_LIFE = 1024  # tested tokens until a test counts half: rates within 2 %
_LEAST_VARIANCE = 0.1  # of one test, so that a sure prediction can be refuted by a few
_LARGEST_STEP = 2.0  # logits by which a batch of tests moves a prediction at most
_STEEPEST = 6.0  # logits: no prediction is surer than 99.75 %
_PRIOR_RATE = 0.7  # acceptance without any test, and the confidence of a token that has none
_NEIGHBOUR = 3.0  # drafts that the rate of the position before counts for
_JUDGED = 32.0  # accepted tokens, real or forecast, after which both are compared
_CHANGED = 0.25  # ratio of both that shows a change: hard text has about half of the mean
_AFTER_CHANGE = 0.02  # weight of earlier tests after a change: they are a hint, no more
_KEPT = 256  # drafts replayed: enough for a mean within some percent, few enough to be quick
_ENDED = -1.0  # in the place of a confidence: the drafter had nothing more to propose


class Observation(NamedTuple):
    """One verified draft, with the arguments of `Controller.observe_acceptance`."""

    verified: int
    accepted: int
    confidences: Sequence[float]
    wanted: int


class Confidence:
    """Maps a drafter's confidence and the position of a token to the probability of acceptance.

    A logistic regression that forgets old tests. Its prior nearly equals the confidence. The score
    is linear in the confidence's logit, with one bend (drafters are often right about easy tokens
    and ignorant about hard ones), and in the logarithm of the position.
    """

    def __init__(self) -> None:
        self._weights = _PRIOR_WEIGHTS.copy()
        self._learnt = np.zeros_like(_PRIOR_INFORMATION)
        self._as_floats: list[float] = self._weights.tolist()

    def predict(self, confidences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return P[accepted | all before it were].

        Args:
            confidences: From 0 to 1, known before the token was sampled.
            positions: From 0.
        """
        slope, bend, offset, depth = self._as_floats
        logit = _logit(confidences)
        score = slope * logit + bend * np.maximum(logit - _BEND, 0.0)
        return _probability(score + (offset + depth * np.log1p(positions)))

    def chance(self, confidence: float, position: int) -> float:
        """`predict` for a single token, without the cost of arrays."""
        slope, bend, offset, depth = self._as_floats
        inside = min(max(confidence, _LEAST_CONFIDENCE), 1.0 - _LEAST_CONFIDENCE)
        logit = math.log(inside / (1.0 - inside))
        score = slope * logit + offset + depth * math.log1p(position)
        score += bend * max(logit - _BEND, 0.0)
        return 1.0 / (1.0 + math.exp(-min(max(score, -_STEEPEST), _STEEPEST)))

    def observe(
        self, confidences: Sequence[float], positions: Sequence[int], accepted: Sequence[bool]
    ) -> None:
        """Learn from tokens that were tested together, [n] each: one step of Newton's method."""
        features = np.ones((4, len(confidences)))
        logit = features[0] = _logit(np.array(confidences, float))
        features[1] = np.maximum(logit - _BEND, 0.0)
        features[3] = np.log1p(positions)
        predicted = _probability(self._weights @ features)
        variance = np.maximum(predicted * (1.0 - predicted), _LEAST_VARIANCE)
        self.age(0.5 ** (len(logit) / _HALF_LIFE))
        self._learnt += (features * variance) @ features.T
        surprise = features @ (np.array(accepted, float) - predicted)
        step = np.linalg.solve(self._learnt + _PRIOR_INFORMATION, surprise)
        largest = float(np.abs(step @ features).max())
        self._weights += step * min(1.0, _LARGEST_STEP / max(largest, 1e-9))
        self._as_floats = self._weights.tolist()

    def age(self, keep: float) -> None:
        """Let earlier tests weigh `keep` times as much; predictions stay."""
        self._learnt *= keep

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"weights": self._as_floats, "learnt": self._learnt.tolist()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Confidence":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: Invalid data.
        """
        confidence = cls()
        confidence._weights = numbers(saved["weights"], _PRIOR_WEIGHTS.shape)
        confidence._learnt = numbers(saved["learnt"], _PRIOR_INFORMATION.shape)
        if np.linalg.eigvalsh(confidence._learnt)[0] < -1e-6:
            raise ValueError("the saved information is negative")
        confidence._as_floats = confidence._weights.tolist()
        return confidence


class _Kind:
    """Statistics of the drafts of one kind of request.

    Attributes:
        rates: Conditional acceptance of each position.
        survival: P[accepted up to each position] of its recent drafts, float [n, positions].
    """

    def __init__(self, positions: int) -> None:
        self._confidence = Confidence()
        self._forecast = self._accepted = 0.0  # tokens, since they were last compared
        self._new = 0  # recent drafts since then
        self._recent = np.full((0, positions), np.nan)  # confidences; NaN beyond the plan
        self._replay(positions)

    def learn(self, drafts: Sequence[Observation]) -> None:
        """Learn from at least one draft."""
        if self._has_changed(drafts):
            self._confidence.age(_AFTER_CHANGE)
            self._recent = self._recent[len(self._recent) - self._new :]
        tested = [
            (draft.confidences[j], j, j < draft.accepted)
            for draft in drafts
            for j in range(min(draft.verified, draft.accepted + 1))
        ]
        if tested:
            self._confidence.observe(*zip(*tested, strict=True))
        positions = len(self.rates)
        sample = drafts[-_KEPT:]
        rows = np.full((len(sample), positions), np.nan)
        for row, draft in zip(rows, sample, strict=True):
            row[len(draft.confidences) : draft.wanted] = _ENDED
            row[: len(draft.confidences)] = draft.confidences[:positions]
        self._recent = np.concatenate([self._recent, rows])[-_KEPT:]
        self._new = min(self._new + len(rows), len(self._recent)) if self._forecast else 0
        self._replay(positions)

    def survival_of(self, confidences: Sequence[float]) -> list[float]:
        """Return P[accepted up to each token] of a draft, given its confidences."""
        alive, survival, chance = 1.0, [], self._confidence.chance
        for position, confidence in enumerate(confidences):
            alive *= chance(confidence, position)
            survival.append(alive)
        return survival

    def to_dict(self) -> dict[str, Any]:
        recent = self._recent.round(4).tolist()
        rows = [[None if math.isnan(x) else x for x in row] for row in recent]
        return {"confidence": self._confidence.to_dict(), "recent": rows}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], positions: int) -> "_Kind":
        kind = cls(positions)
        kind._confidence = Confidence.from_dict(saved["confidence"])
        rows = [[_ENDED - 1 if x is None else x for x in row] for row in saved["recent"]]
        recent = numbers(rows, (len(rows), positions)) if rows else kind._recent
        if ((recent > 1) | ((recent < 0) & (recent != _ENDED) & (recent != _ENDED - 1))).any():
            raise ValueError("not confidences")
        kind._recent = np.where(recent == _ENDED - 1, np.nan, recent)
        kind._replay(positions)
        return kind

    def _has_changed(self, drafts: Sequence[Observation]) -> bool:
        """Return True if accepted tokens are many times as many as the forecast ones, or as few.

        The forecast is that of all recent drafts, because the drafter's confidences may change
        with its acceptance. Runs of easy or hard text differ by less.
        """
        mean = np.cumsum([0.0, *self.survival.mean(0)]).tolist()
        self._forecast += sum(mean[draft.verified] for draft in drafts)
        self._accepted += sum(draft.accepted for draft in drafts)
        few, many = sorted((self._forecast, self._accepted))
        if many < _JUDGED:
            return False
        self._forecast = self._accepted = 0.0
        return few < _CHANGED * many

    def _replay(self, positions: int) -> None:
        """Predict the acceptance of the recent drafts.

        A position beyond a draft's planned length has the mean of two rates: that of the other
        drafts, some of which ended by themselves, and that of the draft's position before. The
        first alone underrates drafts that are accepted whole, the second overrates them.
        """
        drafts, ended = self._recent, self._recent == _ENDED
        predicted = self._confidence.predict(np.where(ended, 0.0, drafts), np.arange(positions))
        predicted[ended] = 0.0
        alive, rate, self.rates = np.ones(len(drafts)), _PRIOR_RATE, list[float]()
        before = np.full(len(drafts), _PRIOR_RATE)
        self.survival = np.empty((max(len(drafts), 1), positions))
        for position in range(positions):
            column, over = predicted[:, position], ended[:, position]
            unknown = np.isnan(column)
            asked = float(alive @ ~unknown)
            proposed = float(alive @ ~(unknown | over))
            total = float(alive @ np.where(unknown, 0.0, column))
            rate = (total + _NEIGHBOUR * rate) / (proposed + _NEIGHBOUR)
            goes_on = (proposed + _NEIGHBOUR) / (asked + _NEIGHBOUR)
            before = np.where(unknown, before, column)
            alive = alive * np.where(unknown, (rate + before) / 2 * goes_on, column)
            self.survival[:, position] = alive if len(drafts) else _PRIOR_RATE ** (position + 1)
            self.rates.append(rate)


class Acceptance:
    """Statistics of all drafts.

    Args:
        positions: Largest draft length, in target tokens.

    Attributes:
        positions: As given.
        drafts: Number of drafts learnt from.
    """

    def __init__(self, positions: int) -> None:
        self.positions, self.drafts = positions, 0
        self._kinds = _Kind(positions), _Kind(positions)  # greedy, sampled
        self._observations: tuple[list[Observation], list[Observation]] = [], []

    def observe(self, draft: Observation, random: bool) -> None:
        """Record a verified draft of a greedy or sampled request, for `learn`."""
        known = [_PRIOR_RATE if math.isnan(c) else c for c in draft.confidences]
        known += [_PRIOR_RATE] * (draft.verified - len(known))
        self._observations[random].append(draft._replace(confidences=known))

    def learn(self) -> None:
        """Learn from the recorded drafts."""
        for kind, drafts in zip(self._kinds, self._observations, strict=True):
            if drafts:
                self.drafts += len(drafts)
                kind.learn(drafts)
        self._observations = [], []

    def rates(self, random: bool) -> list[float]:
        """Return the conditional acceptance of each position, as of the last `learn`."""
        return self._kinds[random].rates

    def survival_of(self, confidences: Sequence[float], random: bool) -> list[float]:
        """Return P[accepted up to each token] of a draft under way, by its confidences."""
        known = [_PRIOR_RATE if math.isnan(c) else c for c in confidences]
        return self._kinds[random].survival_of(known)

    def replayed(self, random: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        """Return recent drafts in groups of the batch, which are drafted together.

        Args:
            random: One entry per request to draft for, at least one; True if it is sampled.

        Returns:
            P[accepted up to each position], float [groups, requests, positions]; and the
            conditional acceptance of each position, float [requests, positions].
        """
        kinds = np.array(random)
        counts = {kind: np.count_nonzero(kinds == kind) for kind in set(random)}
        groups = max(math.ceil(len(self._kinds[k].survival) / n) for k, n in counts.items())
        survival = np.empty((groups, len(kinds), self.positions))
        for kind, count in counts.items():
            drafts = np.resize(self._kinds[kind].survival, (groups * count, self.positions))
            survival[:, kinds == kind] = drafts.reshape(groups, count, self.positions)
        return survival, np.array([self.rates(kind) for kind in random])

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        greedy, sampled = (kind.to_dict() for kind in self._kinds)
        return {"drafts": self.drafts, "greedy": greedy, "random": sampled}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], positions: int) -> "Acceptance":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: Invalid data.
        """
        acceptance = cls(positions)
        acceptance.drafts = int(saved["drafts"])
        greedy, sampled = (_Kind.from_dict(saved[kind], positions) for kind in ("greedy", "random"))
        acceptance._kinds = greedy, sampled
        return acceptance


def numbers(saved: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return saved numbers as an array.

    Raises:
        ValueError: They are not finite numbers of this shape.
    """
    array = np.array(saved, float)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"not {shape} finite numbers")
    return array


_LEAST_CONFIDENCE = 1.0 / (1.0 + math.exp(_STEEPEST))


def _logit(confidences: np.ndarray) -> np.ndarray:
    inside = np.clip(confidences, _LEAST_CONFIDENCE, 1.0 - _LEAST_CONFIDENCE)
    logit: np.ndarray = np.log(inside / (1.0 - inside))
    return logit


def _probability(scores: np.ndarray) -> np.ndarray:
    probability: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(scores, -_STEEPEST, _STEEPEST)))
    return probability
