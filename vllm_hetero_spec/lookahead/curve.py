# SPDX-License-Identifier: Apache-2.0
"""Seconds as a function of a size, learnt from measurements that are few, noisy and drift.

The logarithm of the seconds is kept at sizes 1, 2, 3, ..., 8, 10, 12, ... together with how
uncertain each value is and how strongly the values move together (a Kalman filter). One measurement
thus corrects its neighbours as well, the more so the less is known of them. Between the sizes the
curve is a straight line, and it never falls.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise, repeat
from operator import itemgetter

import numpy as np

Points = Sequence[tuple[float, float]]  # (size, seconds)

_SIZES = [1.0, 2.0, 3.0, *(float(part << octave) for octave in range(9) for part in range(4, 8))]
_INNER = _SIZES[1:-1]
_WIDTHS = [high - low for low, high in pairwise(_SIZES)]
_KNOTS = np.array(_SIZES)
_OCTAVES = np.log2(_KNOTS)

# Standard deviations of the logarithm, so roughly shares of the seconds.
_NOISE = 0.06  # of one measurement: equal steps differ by some percent
_SURPRISE = 3.0  # a measurement further off, in standard deviations, is cut down to it
_LASTING = 3  # so many surprises in a row on one side are no accident, and the curve follows
_JUMP = 0.5  # of the whole curve after a lasting change: anything from half to twice is believed
# Before any measurement: of the whole curve, of its growth per octave, of one size against others.
_CALIBRATED = (0.2, 0.05, 0.15)  # start-up timing is a fifth off at most, its shape less
_UNKNOWN = (10.0, 0.3, 0.3)  # any level is believed, and a moderate shape
_CORRELATION_OCTAVES = 2.0  # sizes further apart have little to do with each other
_ACROSS_KINDS = 0.8  # correlation of two kinds of step, which share most of their work
_FADE = 1500  # measurements over which what is known fades to the prior, as machines drift
_FADE_EVERY = 8  # of them: fading each time would cost as much as learning from one
# Behind so many measurements, those of a known size are learnt from
_EACH = 64
_TOGETHER = 4  # at a time: what follows from a curve takes longer to work out than the curve
# Without calibration.
_GROWTH = 0.1  # logarithm of seconds per doubling of the size: nearly flat, as below saturation
_LEVEL = -5.0  # logarithm of seconds at size 1: 7 ms, and the first measurement replaces it


class CostCurve:
    """One curve for each kind of step; kinds correct each other.

    Args:
        points: Calibrated (size, seconds) of each kind, in any order; of a kind without points
            those of kind 0 are taken. Sizes and seconds above 0.
        kinds: How many kinds of step there are.
    """

    def __init__(self, points: Mapping[int, Points] | None = None, kinds: int = 1) -> None:
        known = {kind: clean for kind, raw in (points or {}).items() if (clean := _clean(raw))}
        self._seen: set[int] = set()  # knots of all kinds that were calibrated or measured
        self._learnt = 0  # measurements
        self._measurements: list[tuple[float, float, int]] = []  # not learnt from yet
        fallback = known.get(0) or next(iter(known.values()), None)
        level, growth, shape = _CALIBRATED if fallback else _UNKNOWN
        means = []
        for kind in range(kinds):
            calibrated = known.get(kind) or fallback
            means.append(_line(calibrated) if calibrated else _GROWTH * _OCTAVES + _LEVEL)
            for size, _ in known.get(kind, ()):
                nearest = int(np.abs(_OCTAVES - math.log2(size)).argmin())
                self._seen.add(kind * len(_SIZES) + nearest)
        self._log = np.concatenate(means)
        near = np.exp(-np.abs(_OCTAVES[:, None] - _OCTAVES) / _CORRELATION_OCTAVES)
        across = np.full((kinds, kinds), _ACROSS_KINDS)
        np.fill_diagonal(across, 1.0)
        together = np.kron(across, shape**2 * near + growth**2 * np.outer(_OCTAVES, _OCTAVES))
        self._covariance = level**2 + together
        self._drift = _CALIBRATED[0] ** 2 + together
        # Of all sizes alike, but not quite of the other kind, which is to be measured again.
        self._jump = np.kron(_JUMP**2 * across, np.ones_like(near))
        self._surprises = 0.0  # in a row: positive above, negative below
        # Results kept until anything is learnt: by kind, by kind and knot, by kind, first and
        # last knot.
        self._monotone: dict[int, list[float]] = {}
        self._least: dict[tuple[int, int], float] = {}
        self._slopes: dict[tuple[int, int, int], list[float]] = {}

    @property
    def known(self) -> bool:
        """True if there is any calibration or measurement."""
        return bool(self._seen)

    def seconds(self, size: float, kind: int = 0) -> float:
        """Return the seconds of a step of this size; extrapolated beyond the largest knot."""
        values = self._values(kind)
        at, share = _place(size)
        low, high = values[at : at + 2]
        return low + share * (high - low) if at or share > 0.0 else low

    def slope(self, size: float, first: float, last: float, kind: int = 0) -> float:
        """Return the additional seconds per size at this size, on the way from `first` to `last`.

        Kernels work in tiles: one size may cost much and the next ones nothing. An expensive size
        is averaged with the cheap ones after it (lower convex hull over the range), so that drafts
        do not stop just before it. An uncertain slope is reduced by a standard deviation, to at
        least 0.
        """
        at, low, high = _below(size), _below(first), _below(max(first, last))
        if low <= at <= high:
            return self._spread_slopes(low, high, kind)[at - low]
        return self._least_slope(at, kind)

    def slopes(self, first: int, last: int, kind: int = 0) -> list[float]:
        """`slope` at all sizes from a first to a last, [1 + last - first]."""
        low, high = _below(first), _below(last)
        found: list[float] = []
        for knot, slope in enumerate(self._spread_slopes(low, high, kind), low):
            ends = last + 1 if knot == high else int(_SIZES[knot + 1])
            found += [slope] * (ends - first - len(found))
        return found

    def stddev(self, size: float, kind: int = 0) -> float:
        """Standard deviation of the logarithm of `seconds(size, kind)`."""
        at, low, high, _ = self._expect(size, kind)
        first, second, both = self._covariances(at)
        return math.sqrt(max(low * low * first + high * high * second + 2 * low * high * both, 0.0))

    def widen(self, spread: float) -> None:
        """Increase the standard deviation of the whole curve by `spread`, if long unmeasured."""
        self._covariance += spread**2
        self._forget_results()

    def observe(self, size: float, seconds: float, kind: int = 0) -> None:
        """Learn from one measurement; what is not a positive number is ignored."""
        if not (size > 0 and 0 < seconds < math.inf):
            return
        self._measurements.append((size, seconds, kind))
        familiar = self._learnt >= _EACH and kind * len(_SIZES) + _below(size) in self._seen
        if familiar and len(self._measurements) < _TOGETHER:
            return
        for (size, kind), several in groupby(self._measurements, itemgetter(0, 2)):
            self._learn(size, kind, [seconds for _, seconds, _ in several])
        self._measurements.clear()
        self._forget_results()

    def points(self, kind: int = 0) -> list[tuple[float, float]]:
        """The curve at all sizes that were calibrated or measured, as calibration takes it."""
        seen = sorted({knot % len(_SIZES) for knot in self._seen})
        return [(_SIZES[knot], self.seconds(_SIZES[knot], kind)) for knot in seen]

    def _learn(self, size: float, kind: int, measured: Sequence[float]) -> None:
        """Learn from the seconds of equal steps, one after the other.

        Each measurement moves the curve along the same column of the covariance and reduces it. So
        scalars are accumulated, and the arrays are updated once at the end.
        """
        first = _FADE_EVERY - 1 - self._learnt % _FADE_EVERY  # so many before the curve fades
        if 0 < first < len(measured):
            self._learn(size, kind, measured[:first])
            measured, first = measured[first:], 0
        self._learnt += len(measured)
        if not first:
            self._covariance += (self._drift - self._covariance) * (_FADE_EVERY / _FADE)
        at, low, high, expected = self._expect(size, kind)
        column, variance = self._column(at, low, high)
        left, moved, taken = 1.0, 0.0, 0.0  # what is left of column and variance, and what came
        for seconds in measured:
            off = math.log(seconds / expected) - variance * moved
            spread = left * variance + _NOISE**2
            bound = _SURPRISE * math.sqrt(spread)
            side = math.copysign(1.0, off) if abs(off) > bound else 0.0
            self._surprises = side + (self._surprises if self._surprises * side > 0 else 0.0)
            if abs(self._surprises) >= _LASTING:
                self._move(column, moved, taken)
                self._covariance += self._jump
                expected *= math.exp(variance * moved)
                column, variance = self._column(at, low, high)
                left, moved, taken = 1.0, 0.0, 0.0
                spread, bound, self._surprises = variance + _NOISE**2, math.inf, 0.0
            moved += left * max(-bound, min(bound, off)) / spread
            taken += left**2 / spread
            left *= _NOISE**2 / spread
        self._move(column, moved, taken)
        self._seen.add(at + (high > low))

    def _column(self, at: int, low: float, high: float) -> tuple[np.ndarray, float]:
        """Covariances of all knots with one measurement, and its variance."""
        column = low * self._covariance[at]
        if high:
            column += high * self._covariance[at + 1]
        return column, float(low * column[at] + high * column[at + 1])

    def _move(self, column: np.ndarray, moved: float, taken: float) -> None:
        self._log += column * moved
        self._covariance -= column[:, None] * (column * taken)

    def _expect(self, size: float, kind: int) -> tuple[int, float, float, float]:
        """The knot below, the log-seconds' derivatives by that knot and the next, the seconds."""
        below, share = _place(size)
        share = min(max(share, 0.0), 1.0)
        at = kind * len(_SIZES) + below
        low, high = (1.0 - share) * math.exp(self._log[at]), share * math.exp(self._log[at + 1])
        expected = low + high
        return at, low / expected, high / expected, expected

    def _values(self, kind: int) -> list[float]:
        """Seconds at all knots; where noise made them fall, the mean of the neighbours."""
        values = self._monotone.get(kind)
        if values is None:
            span = slice(kind * len(_SIZES), (kind + 1) * len(_SIZES))
            logs = self._log[span].tolist()
            if logs != sorted(logs):
                logs = _isotonic(logs, (1.0 / self._covariance.diagonal()[span]).tolist())
            values = self._monotone[kind] = list(map(math.exp, logs))
        return values

    def _spread_slopes(self, low: int, high: int, kind: int) -> list[float]:
        """Return `slope` at the knots from `low` to `high`, [1 + high - low]."""
        slopes = self._slopes.get((kind, low, high))
        if slopes is None:
            values, widths = self._values(kind)[low : high + 2], _WIDTHS[low : high + 1]
            pairs = zip(pairwise(values), widths, strict=True)
            hull = _isotonic([(after - before) / width for (before, after), width in pairs], widths)
            slopes = [min(self._least_slope(at, kind), rise) for at, rise in enumerate(hull, low)]
            self._slopes[kind, low, high] = slopes
        return slopes

    def _least_slope(self, knot: int, kind: int) -> float:
        """The slope from a knot to the next, a standard deviation below what is expected."""
        slope = self._least.get((kind, knot))
        if slope is None:
            first, second, both = self._covariances(kind * len(_SIZES) + knot)
            spread = math.sqrt(max(first + second - 2.0 * both, 0.0))
            low, high = self._values(kind)[knot : knot + 2]
            rise = math.expm1(max(math.log(high / low) - spread, 0.0))
            slope = self._least[kind, knot] = low * rise / _WIDTHS[knot]
        return slope

    def _forget_results(self) -> None:
        for results in (self._monotone, self._least, self._slopes):
            results.clear()

    def _covariances(self, at: int) -> tuple[float, float, float]:
        """Variance of a value, of the next, and the covariance of the two."""
        (first, both), (_, second) = self._covariance[at : at + 2, at : at + 2].tolist()
        return first, second, both


def _below(size: float) -> int:
    """The knot below a size, from the first to the last but one."""
    return bisect_right(_INNER, size)


def _place(size: float) -> tuple[int, float]:
    """Return the knot below a size, and its distance as a share; above 1 past the last knot."""
    low = _below(size)
    return low, (size - _SIZES[low]) / _WIDTHS[low]


def _clean(points: Points) -> list[tuple[float, float]]:
    """Usable points in order of size, the mean where a size comes twice."""
    found: dict[float, list[float]] = {}
    for size, seconds in points:
        if size > 0 and 0 < seconds < math.inf:
            found.setdefault(float(size), []).append(seconds)
    return [(size, sum(found[size]) / len(found[size])) for size in sorted(found)]


def _line(points: Points) -> np.ndarray:
    """Logarithms at the knots of the rising line through the points."""
    sizes = np.array([size for size, _ in points])
    seconds = _isotonic([value for _, value in points], [1.0] * len(points))
    if len(points) == 1:
        return np.log(seconds[0]) + _GROWTH * (_OCTAVES - math.log2(sizes[0]))
    line = np.interp(_KNOTS, sizes, seconds)
    for a, beyond in ((0, sizes[0] > _KNOTS), (len(points) - 2, sizes[-1] < _KNOTS)):
        slope = (seconds[a + 1] - seconds[a]) / (sizes[a + 1] - sizes[a])
        line[beyond] = seconds[a] + slope * (_KNOTS[beyond] - sizes[a])
    return np.log(np.maximum(line, seconds[0] / 2))


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The rising values nearest to the given ones (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    rising: list[float] = []
    for pool in zip(values, weights, repeat(1)):
        while pools and pools[-1][0] > pool[0]:
            (before, heavy, count), (mean, weight, members) = pools.pop(), pool
            total = heavy + weight
            pool = (before * heavy + mean * weight) / total, total, count + members
        pools.append(pool)
    for mean, _, members in pools:
        rising += [mean] * members
    return rising
