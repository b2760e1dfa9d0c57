# SPDX-License-Identifier: Apache-2.0
"""Estimates of the acceptance rate of draft tokens, learnt from verification.

Position j of a draft is tested only if positions 1 .. j-1 were accepted, so rates are conditional:
of the drafts that got as far as j, how many passed. Old tests count less and less.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_HALF_LIFE = 128  # drafts until a test counts half: rates within about 4 %, old text soon forgotten
_PRIOR_RATE = 0.7  # a drafter is taken for a good one before any test, so that it is tried
_PRIOR_WEIGHT = 2.0  # tests: the first few drafts outweigh the prior rate
_NEIGHBOUR_WEIGHT = 3.0  # tests that the rate of the position before counts for as a prior
_LEAST_TESTS = 10.0  # ageing leaves this many, or a mean would rest on one or two drafts

# The regression of `Confidence`.
_BEND = 0.5  # logit of a confidence of 0.62: about where drafters go from ignorant to right
_PRIOR_WEIGHTS = np.array([0.8, 0.0, 0.0, 0.0])  # slope 0.8: drafters are a little too sure
_PRIOR_INFORMATION = np.diag([4.0, 4.0, 0.5, 4.0])  # 1 / variance; the offset varies most
_HALF_LIFE_TOKENS = 256  # tokens until a test counts half: two for each draft of `_HALF_LIFE`
_LEAST_VARIANCE = 0.1  # of one test: a sure prediction must not make its own refutation worthless
_LARGEST_STEP = 2.0  # logits that a prediction may move at once, whatever the surprise
_STEEPEST = 6.0  # logits: nothing is believed to be surer than 99.75 %, either way
_LEAST_CONFIDENCE = 1.0 / (1.0 + math.exp(_STEEPEST))  # the same bound for what drafters say
_LARGEST_CONFIDENCE = 1.0 - _LEAST_CONFIDENCE

# The least squares of `StepsOfDraft`: before any round, one step for each token, hardly any extra.
_PRIOR_ROUNDS = 2.0  # rounds that the belief in no extra steps weighs
_PRIOR_SQUARES = 0.25  # tokens squared that the belief in one step per token weighs
_LEAST_STEPS = 0.05  # steps per token: a step of 20 tokens is beyond any drafter


class PositionRates:
    """Conditional acceptance of each draft position: discounted counts with a prior.

    The prior of a position is the rate of the one before, and of the first a constant: what holds
    for the beginning of drafts is the best guess for depths that were never tried.

    Args:
        positions: Longest draft, in target tokens.
    """

    def __init__(self, positions: int) -> None:
        self._tested = np.zeros(positions)
        self._accepted = np.zeros(positions)

    def observe(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Count drafts that were verified together.

        Args:
            verified: Tokens of each draft that the target verified, [n].
            accepted: Leading tokens of each that it accepted, [n].
        """
        depth = np.arange(len(self._tested))
        lengths, passed = np.asarray(verified)[:, None], np.asarray(accepted)[:, None]
        tests = ((depth < lengths) & (depth <= passed)).sum(0)
        passes = (depth < np.minimum(lengths, passed)).sum(0)
        keep = 0.5 ** (tests[0] / _HALF_LIFE)  # of all, so that untested depths are tried again
        self._tested = self._tested * keep + tests
        self._accepted = self._accepted * keep + passes

    def age(self, keep: float) -> None:
        """Let what was counted weigh `keep` times as much, down to a few tests; rates stay."""
        scale = _aged(self._tested, keep)
        self._tested *= scale
        self._accepted *= scale

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {"tested": self._tested.tolist(), "accepted": self._accepted.tolist()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], positions: int, weight: float) -> "PositionRates":
        """Restore the result of `to_dict` with the weight of at most `weight` drafts.

        Raises:
            ValueError: Invalid data.
        """
        rates = cls(positions)
        rates._tested = numbers(saved["tested"], (positions,))
        rates._accepted = numbers(saved["accepted"], (positions,))
        if (rates._accepted < 0).any() or (rates._accepted > rates._tested).any():
            raise ValueError("more was accepted than tested")
        rates.age(weight / max(float(rates._tested[0]), weight))
        return rates

    def rates(self) -> np.ndarray:
        """P[position j accepted | all before it were], float [positions]."""
        rates = np.empty(len(self._tested))
        rate, weight = _PRIOR_RATE, _PRIOR_WEIGHT
        counts = zip(self._tested.tolist(), self._accepted.tolist(), strict=True)
        for position, (tested, accepted) in enumerate(counts):
            rate = (accepted + weight * rate) / (tested + weight)
            rates[position] = rate
            weight = _NEIGHBOUR_WEIGHT
        return rates


class Confidence:
    """From a drafter's confidence in its next token to the probability that it is accepted.

    Logistic regression that forgets old tests, with a prior that nearly takes the confidence at its
    word. The score is a line with one bend in the confidence's logit (drafters are often right
    about easy tokens and ignorant about hard ones), and a line in the logarithm of the position.
    Four numbers are learnt sooner than a dozen bins: up to some hundred tests the excess loss is
    half that of a rising map of bins, and 0.004 nats higher after many (measured in the tests).

    The confidence must be known before the token is drawn, as the largest probability of its row.
    """

    def __init__(self) -> None:
        self._weights = _PRIOR_WEIGHTS.copy()
        self._information = _PRIOR_INFORMATION.copy()
        self._as_floats: list[float] = self._weights.tolist()

    def predict(self, confidences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """P[accepted | all before it were], of the shape that the arguments make together.

        Args:
            confidences: From 0 to 1, both allowed; NaN, for none, stays NaN.
            positions: From 0.
        """
        slope, bend, offset, depth = self._as_floats
        logit = _logit(confidences)
        score = slope * logit + bend * np.maximum(logit - _BEND, 0.0)
        return _probability(score + (offset + depth * np.log1p(positions)))

    def chance(self, confidence: float, position: int) -> float:
        """`predict` of a single token, without the cost of arrays."""
        slope, bend, offset, depth = self._as_floats
        if confidence <= _LEAST_CONFIDENCE:
            logit = -_STEEPEST
        elif confidence >= _LARGEST_CONFIDENCE:
            logit = _STEEPEST
        else:
            logit = math.log(confidence / (1.0 - confidence))
        score = slope * logit + offset + depth * math.log1p(position)
        if logit > _BEND:
            score += bend * (logit - _BEND)
        if abs(score) > _STEEPEST:
            score = math.copysign(_STEEPEST, score)
        return 1.0 / (1.0 + math.exp(-score))

    def observe(
        self, confidences: Sequence[float], positions: Sequence[int], accepted: Sequence[bool]
    ) -> None:
        """Learn from tokens that were tested together, [n] each: one step of Newton's method."""
        if not len(confidences):
            return
        features = np.ones((4, len(confidences)))
        logit = features[0] = _logit(np.array(confidences, float))
        features[1] = np.maximum(logit - _BEND, 0.0)
        features[3] = np.log1p(positions)
        predicted = _probability(self._weights @ features)
        keep = 0.5 ** (len(logit) / _HALF_LIFE_TOKENS)
        learnt = (self._information - _PRIOR_INFORMATION) * keep
        variance = np.maximum(predicted * (1.0 - predicted), _LEAST_VARIANCE)
        tests = (features * variance) @ features.T
        self._information = _PRIOR_INFORMATION + learnt + tests
        surprise = features @ (np.array(accepted, float) - predicted)
        step = np.linalg.solve(self._information, surprise)
        largest = float(np.abs(step @ features).max())
        self._weights += step * min(1.0, _LARGEST_STEP / max(largest, 1e-9))
        self._as_floats = self._weights.tolist()

    def age(self, keep: float) -> None:
        """Let what was learnt weigh `keep` times as much; predictions stay."""
        learnt = self._information - _PRIOR_INFORMATION
        tests = np.array([self._tests])
        self._information = _PRIOR_INFORMATION + learnt * float(_aged(tests, keep)[0])

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"weights": self._as_floats, "information": self._information.tolist()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], weight: float) -> "Confidence":
        """Restore the result of `to_dict` with the weight of at most `weight` tokens.

        Raises:
            ValueError: Invalid data.
        """
        confidence = cls()
        confidence._weights = numbers(saved["weights"], _PRIOR_WEIGHTS.shape)
        confidence._information = numbers(saved["information"], _PRIOR_INFORMATION.shape)
        if np.linalg.eigvalsh(confidence._information - _PRIOR_INFORMATION)[0] < -1e-6:
            raise ValueError("the saved information matrix is below the prior")
        confidence._as_floats = confidence._weights.tolist()
        confidence.age(weight / max(confidence._tests, weight))
        return confidence

    @property
    def _tests(self) -> float:
        """Approximate discounted number of observed tokens."""
        return float((self._information - _PRIOR_INFORMATION)[2, 2]) / _LEAST_VARIANCE


class StepsOfDraft:
    """Drafter steps that a draft of so many target tokens takes.

    A drafter step yields none, one or several target tokens, and a draft may end with a step that
    only completes its last token: steps = extra + each * tokens, fitted to recent rounds.

    Attributes:
        each: Steps that one target token more takes.
    """

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # discounted: rounds, tokens, tokens squared, steps, steps * tokens
        self._extra, self.each = 0.0, 1.0

    def observe(self, tokens: int, steps: float) -> None:
        """Add a round: target tokens of its longest draft, and its drafter steps."""
        if tokens <= 0 or steps < 0:
            return
        new = (1.0, tokens, tokens**2, steps, steps * tokens)
        keep = 0.5 ** (1.0 / _HALF_LIFE)
        self._sums = tuple(old * keep + one for old, one in zip(self._sums, new, strict=True))
        self._fit()

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"sums": list(self._sums)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], weight: float) -> "StepsOfDraft":
        """Restore the result of `to_dict` with the weight of at most `weight` rounds.

        Raises:
            ValueError: Invalid data.
        """
        steps = cls()
        sums = numbers(saved["sums"], (len(steps._sums),))
        if (sums < 0).any():
            raise ValueError("sums below 0")
        steps._sums = tuple((sums * weight / max(float(sums[0]), weight)).tolist())
        steps._fit()
        return steps

    def _fit(self) -> None:
        rounds, total, squares, taken, products = self._sums
        rounds, squares = rounds + _PRIOR_ROUNDS, squares + _PRIOR_SQUARES
        products += _PRIOR_SQUARES
        determinant = rounds * squares - total**2
        self._extra = max((squares * taken - total * products) / determinant, 0.0)
        self.each = max((rounds * products - total * taken) / determinant, _LEAST_STEPS)

    def expected(self, tokens: float) -> float:
        """Steps of a draft of so many target tokens."""
        return self._extra + self.each * tokens


def _aged(tests: np.ndarray, keep: float) -> np.ndarray:
    """Factors that age counts by `keep`, but not below a few tests."""
    floor = np.minimum(1.0, _LEAST_TESTS / np.maximum(tests, 1e-9))
    return np.maximum(keep, floor)


def numbers(saved: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return saved numbers as an array.

    Raises:
        ValueError: They are not finite numbers of this shape.
    """
    array = np.array(saved, float)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"not {shape} finite numbers")
    return array


def _logit(confidences: np.ndarray) -> np.ndarray:
    """The logit, bounded."""
    inside = np.minimum(np.maximum(confidences, _LEAST_CONFIDENCE), _LARGEST_CONFIDENCE)
    logit: np.ndarray = np.log(inside / (1.0 - inside))
    return logit


def _probability(scores: np.ndarray) -> np.ndarray:
    """Return the probabilities of bounded logits."""
    bounded = np.minimum(np.maximum(scores, -_STEEPEST), _STEEPEST)
    probability: np.ndarray = 1.0 / (1.0 + np.exp(-bounded))
    return probability
