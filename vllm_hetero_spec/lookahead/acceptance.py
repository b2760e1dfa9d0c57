# SPDX-License-Identifier: Apache-2.0
"""How likely the target is to accept the tokens of a draft, learnt while it verifies them.

Position j of a draft is put to the test only if positions 1 .. j-1 were accepted, so rates are
conditional: of the drafts that got as far as j, how many passed. Old tests count less and less.
"""

import math
from collections.abc import Sequence

import numpy as np

# Drafts after which an old test counts half.
_HALF_LIFE = 128
# Before any test a drafter is taken for a good one, so that it is tried; a few tests undo that.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 2.0
# Weight of the position before as a position's prior.
_NEIGHBOUR_WEIGHT = 3.0
# Ageing leaves at least this many tests, so that the mean is kept.
_LEAST_TESTS = 10.0


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

    def rates(self) -> np.ndarray:
        """a_j, float [positions]: P[position j accepted | all before it were]."""
        rates = np.empty(len(self._tested))
        rate, weight = _PRIOR_RATE, _PRIOR_WEIGHT
        counts = zip(self._tested.tolist(), self._accepted.tolist(), strict=True)
        for position, (tested, accepted) in enumerate(counts):
            rate = (accepted + weight * rate) / (tested + weight)
            rates[position] = rate
            weight = _NEIGHBOUR_WEIGHT
        return rates

    def survival(self) -> np.ndarray:
        """S_j = a_1 ... a_j, float [positions]: P[at least j tokens accepted]."""
        return np.cumprod(self.rates())


class Confidence:
    """From a drafter's confidence in its next token to the probability that it is accepted.

    Logistic regression with a prior that takes the confidence at its word, and that forgets old
    tests. The score is a line with one bend in the confidence's logit (drafters are often right
    about easy tokens and ignorant about hard ones), and a line in the logarithm of the position.
    Against a rising map of bins its excess loss is half as high up to some hundred tests, where it
    matters, and 0.004 nats higher after many (measured in the tests): four numbers are learnt
    sooner than a dozen bins.

    The confidence must be known before the token is drawn, as the largest probability of its row.
    """

    def __init__(self) -> None:
        self._weights = _TRUSTING.copy()
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
        score = slope * logit + bend * np.maximum(logit - _BEND, 0.0) + offset
        score = score + depth * np.log1p(positions)
        return 1.0 / (1.0 + np.exp(-np.clip(score, -_STEEPEST, _STEEPEST)))

    def chance(self, confidence: float, position: int) -> float:
        """`predict` of a single token, without the cost of arrays."""
        slope, bend, offset, depth = self._as_floats
        inside = min(max(confidence, _SUREST_NO), 1.0 - _SUREST_NO)
        logit = math.log(inside / (1.0 - inside))
        score = slope * logit + bend * max(logit - _BEND, 0.0) + offset
        score += depth * math.log1p(position)
        return 1.0 / (1.0 + math.exp(-min(max(score, -_STEEPEST), _STEEPEST)))

    def observe(
        self, confidences: Sequence[float], positions: Sequence[int], accepted: Sequence[bool]
    ) -> None:
        """Learn from tokens that were put to the test together, [n] each."""
        if not len(confidences):
            return
        told = np.asarray(confidences, float)
        logit, depth = _logit(told), np.log1p(positions)
        bent = np.maximum(logit - _BEND, 0.0)
        features = np.stack([logit, bent, np.ones(len(logit)), depth], axis=1)
        predicted = self.predict(told, np.asarray(positions))
        keep = 0.5 ** (len(logit) / _HALF_LIFE_TOKENS)
        learnt = (self._information - _PRIOR_INFORMATION) * keep
        doubt = np.maximum(predicted * (1.0 - predicted), _LEAST_DOUBT)
        self._information = _PRIOR_INFORMATION + learnt + (features * doubt[:, None]).T @ features
        surprise = features.T @ (np.asarray(accepted, float) - predicted)
        step = np.linalg.solve(self._information, surprise)
        largest = float(np.abs(features @ step).max())
        self._weights += step * min(1.0, _LARGEST_STEP / max(largest, 1e-9))
        self._as_floats = self._weights.tolist()

    def age(self, keep: float) -> None:
        """Let what was learnt weigh `keep` times as much; predictions stay."""
        learnt = self._information - _PRIOR_INFORMATION
        weight = np.array([learnt[2, 2] / _LEAST_DOUBT])  # about the number of tests
        self._information = _PRIOR_INFORMATION + learnt * float(_aged(weight, keep)[0])


_BEND = 0.5  # a confidence of 0.62
# Slope, bend, offset, depth: what to believe before any test, and how firmly (1 / variance).
_TRUSTING = np.array([0.8, 0.0, 0.0, 0.0])
_PRIOR_INFORMATION = np.diag([4.0, 4.0, 0.5, 4.0])
_HALF_LIFE_TOKENS = 256
# Bounds that keep one batch of surprises, or a confidence of exactly 0 or 1, from running away.
_LEAST_DOUBT = 0.1
_LARGEST_STEP = 2.0
_STEEPEST = 6.0
_SUREST_NO = 1.0 / (1.0 + math.exp(_STEEPEST))


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
        """One round: steps it took, and target tokens of its longest draft."""
        if tokens <= 0 or steps <= 0:
            return
        new = (1.0, tokens, tokens**2, steps, steps * tokens)
        keep = 0.5 ** (1.0 / _HALF_LIFE)
        self._sums = tuple(old * keep + one for old, one in zip(self._sums, new, strict=True))
        rounds, total, squares, taken, products = self._sums
        # Least squares with a prior: one step for each token, hardly any extra.
        rounds, squares, products = rounds + 2.0, squares + 0.25, products + 0.25
        determinant = rounds * squares - total**2
        self._extra = max((squares * taken - total * products) / determinant, 0.0)
        self.each = max((rounds * products - total * taken) / determinant, 0.05)

    def expected(self, tokens: float) -> float:
        """Steps of a draft of so many target tokens."""
        return self._extra + self.each * tokens


def _aged(tests: np.ndarray, keep: float) -> np.ndarray:
    """Factors that age counts by `keep`, but not below a few tests."""
    floor = np.minimum(1.0, _LEAST_TESTS / np.maximum(tests, 1e-9))
    return np.maximum(keep, floor)


def _logit(confidences: np.ndarray) -> np.ndarray:
    """The logit, bounded."""
    inside = np.clip(confidences, _SUREST_NO, 1.0 - _SUREST_NO)
    return np.log(inside / (1.0 - inside))
