# SPDX-License-Identifier: Apache-2.0
"""Costs in seconds of target steps, drafter steps, and the overhead of a draft.

Start-up timing gives a table for each kind of step. Live steps correct it by medians, which ignore
single pauses and follow lasting changes: one factor for the speed of the machine, and one for each
size of step. Target steps without drafts (plain) and with drafts (verifying) are separate kinds,
because their difference decides whether to speculate.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from operator import itemgetter
from statistics import median
from typing import Any

Points = Sequence[tuple[float, float]]  # (size, seconds)

_SIZES = [1.0, 2.0, 3.0, *(float(part << octave) for octave in range(10) for part in range(4, 8))]
_NEAR = 1.06  # factor by which a size is below the one that it counts for, at most
_WINDOW = 15  # measurements of a median: 5 % of noise leave 1.6 %, and 8 outvote what was before
_OFTEN = 10  # measurements of a size from which on another one shows that the machine has changed
_NEARNESS = 30.0  # exponent of the ratio of two sizes; the next size counts for some percent
_COLD = 1.25  # a first step of a size that is slower by this factor may have compiled kernels
_USUAL_FEED = 4  # context tokens per request that any round reads: those emitted last
_LONG_FEED = 64  # tokens of a catch-up from which on its time is not noise
_first = itemgetter(0)


class Recent:
    """Median of the last measurements; 0 without any.

    Args:
        prior: Initial measurements.
    """

    def __init__(self, prior: Sequence[float] = ()) -> None:
        self._values = deque(prior, maxlen=_WINDOW)
        self.value = median(prior) if prior else 0.0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a measurement."""
        self._values.append(value)
        self.value = median(self._values)


class CostTable:
    """Seconds of one kind of step by size, linear between known sizes and never falling.

    If few measurements of a size differ from its timing, the timing was wrong. Then the sizes next
    to it are corrected, too. If many do, the machine has changed. Then all sizes are corrected.

    Args:
        points: Timed (size, seconds). Without any, the first measurement gives the level.
        speed: Logarithm of measured over usual seconds, shared by kinds that change together.
    """

    def __init__(self, points: Points = (), speed: Recent | None = None) -> None:
        self._speed = Recent([0.0] * _OFTEN) if speed is None else speed
        self._own: dict[float, Recent] = {}  # of measured sizes: usual over timed, logarithms
        timed = {s: t for s, t in sorted(points) if s > 0 and 0 < t < math.inf}
        self._timed = sorted(timed.items())
        self._update()

    @property
    def known(self) -> bool:
        """True if any step was timed."""
        return bool(self._timed)

    def seconds(self, size: float) -> float:
        """Return the seconds of a step of this size; extrapolated beyond the known sizes."""
        return math.exp(self._speed.value) * _line(size, self._curve)

    def hoped(self, size: float) -> float:
        """Return `seconds`; if such a size was measured seldom, the least that it may take.

        Between two known sizes, seconds are no less than the lines through the known sizes on
        either side, because costs that are flat at first and then rise bend upwards.
        """
        known = [point for point in self._curve if not self._is_doubtful(point[0])]
        at = bisect_right(known, size, key=_first)
        if not (self._is_doubtful(_nearest(size)) and 0 < at < len(known)):
            return self.seconds(size)
        sides = known[max(at - 2, 0) : at], known[at : at + 2]
        least = max(_line(size, side) if len(side) > 1 else 0.0 for side in sides)
        least = max(least, known[at - 1][1])
        return min(math.exp(self._speed.value) * least, self.seconds(size))

    def _is_doubtful(self, size: float) -> bool:
        """Return True if the size was not timed, and measured less than half of `_OFTEN`."""
        return size not in self._sizes and 2 * len(self._own.get(size, ())) < _OFTEN

    def observe(self, size: float, seconds: float) -> None:
        """Learn from a measurement; ignore one that is not a positive number."""
        if not (size > 0 and 0 < seconds < math.inf):
            return
        if not self.known:
            self._timed = [(size, seconds * math.exp(-self._speed.value))]
            self._update()
        nearest = _nearest(size)
        cold = nearest not in self._own and seconds > _COLD * self.seconds(size)
        if nearest not in self._own:
            self._own[nearest] = Recent()
        own = self._own[nearest]
        if cold:
            return
        if len(self._speed) <= 2:  # after `doubt`; a probe may have another size than all before
            self._speed.add(math.log(seconds / _line(size, self._curve)))
            return
        off = math.log(seconds / _line(size, self._timed))
        if len(own) >= _OFTEN:
            self._speed.add(off - own.value)
        own.add(off - self._speed.value)
        self._update()

    def doubt(self) -> None:
        """Let the next two measurements, of any size, decide whether the machine has changed."""
        self._speed = Recent([self._speed.value])

    def slope(self, size: float, first: int, last: int) -> float:
        """Return the additional seconds of one more unit at `size`, between `first` and `last`.

        Kernels work in tiles: one row may cost much and the next ones nothing. The lower convex
        hull between both ends spreads such a cost, so that drafts do not end just before it. After
        such a row, the mean up to a later one is less.
        """
        if (first, last) not in self._slopes:
            last = max(last, first + 1)
            sizes = [first, *(s for s, _ in self._curve if first < s < last), last]
            widths = [high - low for low, high in pairwise(sizes)]
            seconds = [_line(s, self._curve) for s in sizes]
            rises = [high - low for low, high in pairwise(seconds)]
            slopes = [rise / width for rise, width in zip(rises, widths, strict=True)]
            slopes = rising(slopes, widths)
            known = [i for i, s in enumerate(sizes) if not self._is_doubtful(s)]
            for low, high in combinations(known, 2):
                rise = seconds[high] - seconds[low]
                slopes[low] = min(slopes[low], rise / (sizes[high] - sizes[low]))
            self._slopes[first, last] = sizes[1:], slopes
        ends, slopes = self._slopes[first, last]
        slope = slopes[min(bisect_right(ends, size), len(slopes) - 1)]
        return math.exp(self._speed.value) * slope

    def points(self) -> list[tuple[float, float]]:
        """Return the table as points; none if nothing is known."""
        return [(size, self.seconds(size)) for size, _ in self._curve]

    def _measured(self) -> list[tuple[float, float, int]]:
        """Return (size, logarithm of usual over timed seconds, number) of measured sizes."""
        return [(size, recent.value, len(recent)) for size, recent in self._own.items() if recent]

    def _update(self) -> None:
        """Compute the usual seconds of all known sizes."""
        own, self._sizes = self._measured(), {size for size, _ in self._timed}
        sizes = sorted({size for size, *_ in (*self._timed, *own)})
        usual = [_line(size, self._timed) * math.exp(_mean_near(size, own)) for size in sizes]
        weights = [1.0 + len(self._own.get(size, ())) for size in sizes]
        self._curve = list(zip(sizes, rising(usual, weights), strict=True))
        self._slopes: dict[tuple[int, int], tuple[list[float], list[float]]] = {}


class CostModel:
    """Costs of one pair of models on one machine.

    Args:
        target: Timed (rows, seconds) of target steps.
        drafter: Timed (batch, seconds) of single drafter steps.
        verify: As `target` for steps with more rows than requests; `target` if empty.
        overhead: Timed (batch, seconds) of a drafting round without its forwards.
        catch_up: Seconds per context token that the drafter reads; None if unknown.

    Rows are all tokens that a target step computes, bonus rows included.
    """

    def __init__(
        self,
        target: Points = (),
        drafter: Points = (),
        verify: Points = (),
        overhead: Points = (),
        catch_up: float | None = None,
    ) -> None:
        speed = Recent([0.0] * _OFTEN)
        self._plain, self._verify = CostTable(target, speed), CostTable(verify or target, speed)
        self._drafter, self._overhead = CostTable(drafter), CostTable(overhead)
        self._catch_up = Recent([] if catch_up is None else [catch_up])

    @property
    def knows_target(self) -> bool:
        """True if any step of the target was timed."""
        return self._plain.known

    @property
    def knows_drafter(self) -> bool:
        """True if any step of the drafter was timed."""
        return self._drafter.known

    @property
    def knows_catch_up(self) -> bool:
        """True if any long context was read."""
        return bool(self._catch_up)

    @property
    def read_seconds(self) -> float:
        """Seconds per context token that the drafter reads; 0 if unknown."""
        return self._catch_up.value

    def target(self, batch: int, rows: float) -> float:
        """Return the seconds of a target step with `rows` rows of `batch` requests."""
        plain = self._plain.seconds(batch)
        return plain if rows <= batch else max(plain, self._verify.seconds(rows))

    def hoped(self, batch: int, rows: float) -> float:
        """Return `target`; if such steps were measured seldom, the least that they may take."""
        plain = self._plain.seconds(batch)
        return plain if rows <= batch else max(plain, self._verify.hoped(rows))

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

    def catch_up(self, pending: int) -> float:
        """Return the seconds to read a request's context, beyond what any round reads."""
        return max(0, pending - _USUAL_FEED) * self._catch_up.value

    def doubt_drafter(self) -> None:
        """Prepare for measurements of the drafter after a time without any."""
        self._drafter.doubt()

    def observe_target(self, batch: int, rows: int, seconds: float) -> None:
        """Observe a target step without prefill."""
        rows = max(rows, batch)
        tables = (self._verify, self._plain) if rows > batch else (self._plain, self._verify)
        tables[0].observe(rows, seconds)
        if not tables[1].known:
            tables[1].observe(rows, seconds)

    def observe_drafting(
        self, batch: float, steps: float, seconds: float, overhead: float = 0.0, fed: int = 0
    ) -> None:
        """Observe a drafting round; arguments as in `Controller.observe_draft`."""
        if not (batch > 0 and steps > 0 and 0 < seconds < math.inf):
            return
        if overhead > 0:
            self._overhead.observe(batch, overhead)
        extra = max(0.0, fed - _USUAL_FEED * batch)
        if extra < _LONG_FEED:
            reading = min(extra * self._catch_up.value, seconds / 2)
            self._drafter.observe(batch, (seconds - reading) / steps)
        elif self.knows_drafter:
            stepping = steps * self._drafter.seconds(batch)
            self._catch_up.add(max(seconds - stepping, 0.0) / extra)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates as JSON values; they are arguments of the class."""
        return {
            "target": self._plain.points(),
            "verify": self._verify.points(),
            "drafter": self._drafter.points(),
            "overhead": self._overhead.points(),
            "catch_up": self._catch_up.value if self._catch_up else None,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "CostModel":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: Invalid data.
        """
        try:
            if not 0.0 <= float(saved["catch_up"] or 0.0) < math.inf:
                raise ValueError(f"catch_up is {saved['catch_up']}")
            return cls(**{name: saved[name] for name in cls().to_dict()})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"invalid saved costs: {error!r}") from error


def _nearest(size: float) -> float:
    """Return the size that a measurement counts for."""
    return _SIZES[max(bisect_right(_SIZES, size * _NEAR) - 1, 0)]


def _line(size: float, points: Points) -> float:
    """Return the seconds at a size; beyond both ends, the line goes on, to half of the first.

    If one size is known, all sizes take as long.
    """
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_right(points, size, key=_first) - 1, 0), len(points) - 2)
    (low, before), (high, after) = points[at : at + 2]
    return max(before + (size - low) / (high - low) * (after - before), points[0][1] / 2)


def _mean_near(size: float, measured: Sequence[tuple[float, float, int]]) -> float:
    """Return the mean of values at (size, value, number), sizes near to `size` first; 0 if none."""
    weights = [count * min(size / at, at / size) ** _NEARNESS for at, _, count in measured]
    total = sum(weight * value for weight, (_, value, _) in zip(weights, measured, strict=True))
    return total / max(sum(weights), 1e-300)


def rising(values: Sequence[float], weights: Sequence[float] = ()) -> list[float]:
    """Return the rising values nearest to the given ones (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] > pool[0]:
            (before, heavy, count), (mean, light, members) = pools.pop(), pool
            total = heavy + light
            pool = (before * heavy + mean * light) / total, total, count + members
        pools.append(pool)
    return [mean for mean, _, members in pools for _ in range(members)]
