# SPDX-License-Identifier: Apache-2.0
"""Costs in seconds of target steps, drafter steps, and the overhead of a draft.

Start-up timing fills the tables. Live steps correct them: each kind of step has a drift factor,
and the timed sizes next to a measured one move a little further. Target steps without drafts
(plain) and with drafts (verifying) are separate kinds, because their difference decides whether to
speculate.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from vllm_hetero_spec.lookahead.ratio import Ratio

Points = Sequence[tuple[float, float]]  # (size, seconds)

_SIZES = [1.0, 2.0, 3.0, *(float(part << octave) for octave in range(10) for part in range(4, 8))]
_GROWTH = 0.15  # exponent of the size beyond all timed sizes: steps are mostly memory-bound there
# Share of a deviation by which the drift factor follows. A lasting change counts half after six
# steps, and 6 % of noise leave an error of 1.5 %.
_DRIFT = 0.1
_LOCAL = 0.05  # share of the rest by which the sizes next to the measured one follow at least
_SHARED = 0.8  # share of a drift that the other kind of target step follows: the machine's speed
_TIMED = 3.0  # measurements that start-up timing counts for: it is the fastest of three
_NOISE = 0.05  # mean deviation of a measurement before any: equal steps differ by some percent
_OUTLIER = 3.0  # mean deviations; an outlier counts as much as this
_LASTING = 3  # outliers in a row on one side are a lasting change
_KNOWN = 0.5  # measurements from which on a size is part of the curve
_COLD = 1.25  # a first step of so many rows that is slower by this factor compiled kernels
_HOPE = 0.15  # share by which sizes that were never measured are taken to be cheaper
_USUAL_FEED = 4  # context tokens per request that any round reads: those emitted last
_LONG_FEED = 64  # tokens of a catch-up from which on its time is not noise
_KEEP = 0.9  # weight of a long catch-up relative to the next: they are few
_KEEP_TREES = 0.97  # weight of a step with branches relative to the next: they cost about the noise
_LEAST_OVERHEAD = 1e-6  # seconds; 0 has no logarithm


class CostTable:
    """Seconds of one kind of step by size, linear between timed sizes and never falling.

    Args:
        points: Timed (size, seconds). Without any, the first measurement gives the level.
    """

    def __init__(self, points: Points = ()) -> None:
        timed = sorted((s, t) for s, t in points if s > 0 and 0 < t < math.inf)
        self._logs = [0.0] * len(_SIZES)  # of the seconds at known sizes
        self._seen = [0.0] * len(_SIZES)  # measurements of each size
        self._count = 0  # measurements of known sizes
        self._noise = _NOISE
        self._strikes = 0.0  # outliers in a row; negative if they were low
        self._curve: tuple[list[float], list[float]] = [], []  # known sizes, seconds
        self._prices: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        if timed:
            sizes, seconds = map(list, zip(*timed, strict=True))
            self._curve = sizes, _rising(seconds, [1.0] * len(sizes))
            for size in sizes:
                knot = bisect_left(_SIZES, size, hi=len(_SIZES) - 1)  # itself, or the next one
                self._logs[knot], self._seen[knot] = math.log(self.seconds(_SIZES[knot])), _TIMED
            self.shift(0.0)

    @property
    def known(self) -> bool:
        """True if any step was timed."""
        return bool(self._curve[0])

    def seconds(self, size: float) -> float:
        """Return the seconds of a step of this size; extrapolated beyond the largest one."""
        return _interpolated(size, *self._curve)

    def hoped(self, size: float) -> float:
        """Return `seconds`, reduced while the size was hardly measured, so that it is tried."""
        at, share = _place(size)
        low, high = (
            self.seconds(_SIZES[knot]) * (1.0 - _HOPE / (1.0 + self._seen[knot]))
            for knot in (at, at + 1)
        )
        return low + share * (high - low)

    def observe(self, size: float, seconds: float) -> float:
        """Learn from a measurement; ignore one that is not a positive number.

        A deviation counts up to a bound, so that a single pause changes little. A lasting change is
        followed at once. The first measurements of a size are averaged.

        Returns:
            The change of the drift factor's logarithm.
        """
        if not (size > 0 and 0 < seconds < math.inf):
            return 0.0
        if not self.known:
            self._curve = [size], [seconds]
        deviation, drift = math.log(seconds / self.seconds(size)), 0.0
        at, share = _place(size)
        weights = {at: 1.0 - share, at + 1: share}
        seen = sum(weight * self._seen[knot] for knot, weight in weights.items())
        if seen >= _KNOWN:
            self._count += 1
            bound = _OUTLIER * self._noise
            self._noise += _DRIFT * (abs(deviation) - self._noise)
            side = math.copysign(1.0, deviation) if abs(deviation) > bound else 0.0
            self._strikes = side + (self._strikes if side * self._strikes > 0 else 0.0)
            if abs(self._strikes) >= _LASTING:
                self._strikes, drift = 0.0, deviation
            elif self._count <= _LASTING:  # start-up timing may be far off
                drift = deviation / (1.0 + self._count)
            else:
                deviation = min(max(deviation, -bound), bound)
                drift = _DRIFT * deviation
        local = max(1.0 / (1.0 + seen), _LOCAL) / sum(weight**2 for weight in weights.values())
        for knot, weight in weights.items():
            if self._seen[knot] < _KNOWN:
                self._logs[knot] = math.log(self.seconds(_SIZES[knot]))
            self._seen[knot] += weight
            self._logs[knot] += weight * local * (deviation - drift)
        self.shift(drift)
        return drift

    def shift(self, drift: float) -> None:
        """Multiply all seconds by exp(`drift`)."""
        self._logs = [log + drift for log in self._logs]
        known = [knot for knot, seen in enumerate(self._seen) if seen >= _KNOWN]
        seconds = [math.exp(self._logs[knot]) for knot in known]
        self._curve = (
            [_SIZES[knot] for knot in known],
            _rising(seconds, [self._seen[k] for k in known]),
        )
        self._prices = {}

    def slope(self, size: float, first: int, last: int) -> float:
        """Return the additional seconds of one more unit at `size`, between `first` and `last`.

        Kernels work in tiles: one row may cost much and the next ones nothing. The lower convex
        hull between both ends spreads such a cost, so that drafts do not end just before it.
        """
        if (first, last) not in self._prices:
            last = max(last, first + 1)
            sizes = [float(first), *(s for s in self._curve[0] if first < s < last), float(last)]
            widths = [high - low for low, high in pairwise(sizes)]
            rises = [high - low for low, high in pairwise(map(self.seconds, sizes))]
            slopes = [rise / width for rise, width in zip(rises, widths, strict=True)]
            self._prices[first, last] = sizes[1:], _rising(slopes, widths)
        ends, slopes = self._prices[first, last]
        return slopes[min(bisect_right(ends, size), len(slopes) - 1)]

    def points(self) -> list[tuple[float, float]]:
        """Return the table as points; none if nothing is known."""
        return list(zip(*self._curve, strict=True))


class CostModel:
    """Costs of one pair of models on one machine.

    Args:
        target: Timed (rows, seconds) of target steps.
        drafter: Timed (batch, seconds) of single drafter steps.
        verify: As `target` for steps with more rows than requests; `target` if empty.
        overhead: Timed (batch, seconds) of a drafting round without its forwards.
        catch_up: Seconds per context token that the drafter reads; None if unknown.
        again: Seconds per KV token that a branch of a tree reads again.
        wide: Extra time of a drafter step that collects candidates for trees, as a share.

    Rows are all tokens that a target step computes, bonus rows included.
    """

    def __init__(
        self,
        target: Points = (),
        drafter: Points = (),
        verify: Points = (),
        overhead: Points = (),
        catch_up: float | None = None,
        again: float = 0.0,
        wide: float = 0.0,
    ) -> None:
        self._plain, self._verify = CostTable(target), CostTable(verify or target)
        self._drafter, self._overhead = CostTable(drafter), CostTable(overhead)
        feed = 0.0 if catch_up is None else 4.0 * _LONG_FEED
        self._catch_up = Ratio(feed, catch_up or 0.0, _KEEP)
        self._again = Ratio(1024.0, again, _KEEP_TREES)
        self._wide = Ratio(4.0, wide, _KEEP_TREES)
        self._met: set[int] = set()  # rows of target steps so far

    @property
    def knows_target(self) -> bool:
        """True if any step of the target was timed."""
        return self._plain.known

    @property
    def knows_drafter(self) -> bool:
        """True if any step of the drafter was timed."""
        return self._drafter.known

    def target(self, batch: int, rows: float) -> float:
        """Return the seconds of a target step with `rows` rows of `batch` requests."""
        plain = self._plain.seconds(batch)
        return plain if rows <= batch else max(plain, self._verify.seconds(rows))

    def hoped(self, batch: int, rows: float) -> float:
        """Return `target`, reduced while such steps were hardly measured, so that they are."""
        plain = self._plain.seconds(batch)
        return plain if rows <= batch else max(plain, self._verify.hoped(rows))

    def verifying(self, batch: int, rows: float) -> float:
        """Return the seconds that the rows of drafts add to a plain step."""
        return self.target(batch, rows) - self.target(batch, batch)

    def row(self, rows: float, batch: int, most: int) -> float:
        """Return the additional seconds of one more row in a step of `rows` rows.

        Args:
            rows: Rows of the step so far.
            batch: Number of requests, and of rows without drafts.
            most: Largest number of rows.
        """
        return self._verify.slope(rows, batch, most)

    def drafter(self, batch: float) -> float:
        """Return the seconds of one drafter step of `batch` requests."""
        return self._drafter.seconds(batch)

    def drafting(self, batch: float, steps: float) -> float:
        """Return the seconds of a drafting round, without the catch-up of long contexts."""
        overhead = self._overhead.seconds(batch) if self._overhead.known else 0.0
        return overhead + steps * self._drafter.seconds(batch)

    def beside(self, batch: float) -> float:
        """Return the additional seconds of a drafter step that collects candidates for trees."""
        return self._drafter.seconds(batch) * self._wide.value

    def catch_up(self, pending: int) -> float:
        """Return the seconds to read a request's context, beyond what any round reads."""
        return max(0, pending - _USUAL_FEED) * self._catch_up.value

    def side(self, context: float) -> float:
        """Return the seconds of a branch that reads `context` tokens, without its rows."""
        return context * self._again.value

    def observe_target(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        """Observe a target step without prefill, in which branches read `again` KV tokens."""
        if again and self.knows_target and 0 < seconds < math.inf:
            self._again.observe(again, seconds - self.target(batch, rows))
            seconds = max(seconds - self.side(again), seconds / 2)
        first = rows not in self._met
        self._met.add(rows)
        if first and self.knows_target and seconds > _COLD * self.target(batch, rows):
            return
        kinds = (self._verify, self._plain) if rows > batch else (self._plain, self._verify)
        drift = kinds[0].observe(max(rows, batch), seconds)
        if kinds[1].known:
            kinds[1].shift(_SHARED * drift)
        else:
            kinds[1].observe(max(rows, batch), seconds)

    def observe_drafting(
        self,
        batch: float,
        steps: float,
        seconds: float,
        overhead: float = 0.0,
        fed: int = 0,
        *,
        wide: bool = False,
        looks: bool = False,
    ) -> None:
        """Observe a drafting round; arguments as in `Controller.observe_draft`.

        Args:
            looks: True for a probe of trees: the round does not update the cost of plain rounds.
        """
        if not (batch > 0 and steps > 0 and 0 < seconds < math.inf):
            return
        extra = max(0.0, fed - _USUAL_FEED * batch)
        if wide and self.knows_drafter:
            if not extra:
                self._wide.observe(1.0, seconds / (steps * self.drafter(batch)) - 1.0)
            if looks:
                return
            seconds /= 1.0 + self._wide.value
        if overhead > 0 or self._overhead.known:
            self._overhead.observe(batch, max(overhead, _LEAST_OVERHEAD))
        reading, stepping = (
            extra * self._catch_up.value,
            steps * self._drafter.seconds(batch) if self.knows_drafter else 0.0,
        )
        if extra >= _LONG_FEED and (reading > stepping or not self._catch_up.weight):
            if self.knows_drafter:
                self._catch_up.observe(extra, seconds - stepping)
        else:
            self._drafter.observe(batch, max(seconds - reading, seconds / 2) / steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates as JSON values; they are arguments of the class."""
        return {
            "target": self._plain.points(),
            "verify": self._verify.points(),
            "drafter": self._drafter.points(),
            "overhead": self._overhead.points(),
            "catch_up": self._catch_up.value if self._catch_up.weight else None,
            "again": self._again.value,
            "wide": self._wide.value,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "CostModel":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: Invalid data.
        """
        try:
            ratios = [float(saved[name] or 0.0) for name in ("catch_up", "again", "wide")]
            if not all(0.0 <= ratio < math.inf for ratio in ratios):
                raise ValueError(f"ratios {ratios}")
            return cls(**{name: saved[name] for name in cls().to_dict()})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"invalid saved costs: {error!r}") from error


def _place(size: float) -> tuple[int, float]:
    """Return the index of the size below, and the share of the way to the next one."""
    at = min(max(bisect_right(_SIZES, size) - 1, 0), len(_SIZES) - 2)
    share = (size - _SIZES[at]) / (_SIZES[at + 1] - _SIZES[at])
    return at, min(max(share, 0.0), 1.0)


def _interpolated(size: float, sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the seconds at a size; beyond both ends, the line goes on, to half of the first."""
    if len(sizes) == 1:
        return seconds[0] * (size / sizes[0]) ** _GROWTH
    at = min(max(bisect_right(sizes, size) - 1, 0), len(sizes) - 2)
    share = (size - sizes[at]) / (sizes[at + 1] - sizes[at])
    return max(seconds[at] + share * (seconds[at + 1] - seconds[at]), seconds[0] / 2)


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the rising values nearest to the given ones (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] > pool[0]:
            (before, heavy, count), (mean, light, members) = pools.pop(), pool
            total = heavy + light
            pool = (before * heavy + mean * light) / total, total, count + members
        pools.append(pool)
    return [mean for mean, _, members in pools for _ in range(members)]
