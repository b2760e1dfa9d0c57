# SPDX-License-Identifier: Apache-2.0
"""Costs in seconds of target steps, of drafter steps, and of the overhead of a draft.

They are calibrated at start-up if possible, and corrected by every step. Target steps without
drafts (plain, one row per request) and with drafts are separate kinds, because their difference
decides whether to speculate.
"""

import math
from collections.abc import Mapping
from typing import Any

from vllm_hetero_spec.lookahead.curve import CostCurve, Points

_PLAIN, _VERIFY = 0, 1  # kinds of target steps
_USUAL_FEED = 4  # context tokens per request that any round feeds: what was emitted last
_LONG_FEED = 64  # tokens of a catch-up that is long enough to say what one of them costs
_CALIBRATED_FEED = 256.0  # tokens that a calibrated catch-up weighs: outweighed by a few long ones
_KEEP = 0.9  # weight of one long catch-up against the next: they are few, ten are remembered
_CALIBRATED_AGAIN = 1024.0  # KV tokens read again that what was known weighs: a step or two
_KEEP_AGAIN = 0.98  # weight of a step with sides against the next: what they take is near the noise
_KEEP_WIDE = 0.95  # weight of a round with trees against the next: twenty are remembered
_FREE_ROUNDS = 4.0  # such rounds that the belief weighs that their steps take no longer
_FAR = 0.5  # beyond this much more or less it is a pause, or another machine
_LEAST_OVERHEAD = 1e-6  # seconds: a curve of logarithms cannot learn 0
_LONG_AGO = 256  # steps since a plain one, from which on it is less and less certain
_COLD = 1.25  # a first step this much above what is expected made kernels; noise is well below it


class CostModel:
    """Costs of one pair of models on one machine.

    Args:
        target: Calibrated (rows, seconds) of target steps that only verify and decode.
        drafter: Calibrated (batch, seconds) of single drafter steps.
        verify: As `target` for steps with more rows than requests; `target` where empty.
        overhead: Calibrated (batch, seconds) of what a round of drafting costs beside its forwards.
        catch_up: Seconds per context token that the drafter reads; 0 and learnt where None.
        again: Seconds per KV token that a side sequence of a tree reads again.

    Rows are all tokens that a target step computes, bonus rows included. Everything works without
    calibration: unknown costs are learnt from the first steps.
    """

    def __init__(
        self,
        target: Points = (),
        drafter: Points = (),
        verify: Points = (),
        overhead: Points = (),
        catch_up: float | None = None,
        again: float = 0.0,
    ) -> None:
        self._target = CostCurve({_PLAIN: target, _VERIFY: verify}, kinds=2)
        self._drafter = CostCurve({0: drafter})
        self._overhead = CostCurve({0: overhead})
        self._met: set[int] = set()  # rows of target steps so far
        feed = 0.0 if catch_up is None else _CALIBRATED_FEED
        self._caught_up = feed, feed * (catch_up or 0.0)  # tokens and their seconds, discounted
        # KV tokens that side sequences of trees have read again, and their seconds, discounted.
        self._read_again = (_CALIBRATED_AGAIN, _CALIBRATED_AGAIN * again)
        # Rounds with trees, and how much longer their steps took, in logarithms, discounted.
        self._wide = (_FREE_ROUNDS, 0.0)

    @property
    def knows_target(self) -> bool:
        """True if any step of the target was calibrated or measured."""
        return self._target.known

    @property
    def knows_drafter(self) -> bool:
        """True if any step of the drafter was calibrated or measured."""
        return self._drafter.known

    def target(self, batch: int, rows: float) -> float:
        """Seconds of a target step with `rows` rows of `batch` requests; rises with both."""
        plain = self._target.seconds(batch, _PLAIN)
        if rows <= batch:
            return plain
        return max(plain, self._target.seconds(rows, _VERIFY))

    def more_rows(self, batch: int, count: int) -> float:
        """Seconds that `count` rows of drafts add to a plain step, by the steeper of two views."""
        rows = batch + count
        rise = self._target.seconds(rows, _VERIFY) - self._target.seconds(batch, _VERIFY)
        return max(rise, self.target(batch, rows) - self.target(batch, batch))

    def row(self, rows: float, batch: float, most: float) -> float:
        """Seconds that one row more adds to a step of `rows` rows; less if unknown, to be tried.

        Args:
            rows: Of the step so far.
            batch: Requests, the rows that are there in any case.
            most: Rows that there may be in the end.
        """
        return self._target.slope(rows, batch, most, _VERIFY)

    def rows(self, batch: int, most: int) -> list[float]:
        """`row` at `batch` rows, one more and so on up to `most`, [1 + most - batch]."""
        return self._target.slopes(batch, most, _VERIFY)

    def prepare(self, batch: int, most: int) -> None:
        """Compute and cache the costs of steps with up to `most` rows."""
        self.target(batch, most)
        self.rows(batch, most)
        if self.knows_drafter:
            self.drafter(batch)

    def plain_stddev(self, batch: int, since: int = 0) -> float:
        """Return the standard deviation of a plain step's cost, as a share of its seconds.

        Args:
            batch: Number of requests.
            since: Steps since the last plain one; uncertainty increases with them.
        """
        return self._target.stddev(batch, _PLAIN) * max(1.0, since / _LONG_AGO)

    def verify_stddev(self, rows: float) -> float:
        """Return the relative standard deviation of a step that verifies drafts."""
        return self._target.stddev(rows, _VERIFY)

    def drafter_stddev(self, batch: float) -> float:
        """Return the relative standard deviation of a drafter step."""
        return self._drafter.stddev(batch)

    def drafter(self, batch: float) -> float:
        """Seconds of one drafter step of `batch` requests."""
        return self._drafter.seconds(batch)

    def drafting(self, batch: float, steps: float) -> float:
        """Seconds of a round of drafting, catch-up of long contexts not counted."""
        overhead = self._overhead.seconds(batch) if self._overhead.known else 0.0
        return overhead + steps * self._drafter.seconds(batch)

    def beside(self, batch: float) -> float:
        """Return the additional seconds of a drafter step that collects candidates for trees."""
        return self._drafter.seconds(batch) * math.expm1(self._longer)

    def catch_up(self, pending: int) -> float:
        """Seconds to feed a request's context tokens, beyond what any round feeds."""
        return max(0, pending - _USUAL_FEED) * self._seconds_per_token

    def reading(self, batch: float, steps: float, seconds: float, fed: int) -> float:
        """Return the additional seconds of a round that has a long catch-up; otherwise 0."""
        if fed - _USUAL_FEED * batch < _LONG_FEED or not self._drafter.known:
            return 0.0
        return max(0.0, seconds - steps * self._drafter.seconds(batch))

    def side(self, context: float) -> float:
        """Return the seconds of a branch that reads `context` tokens, without its rows."""
        tokens, seconds = self._read_again
        return context * max(seconds, 0.0) / tokens

    def loosen_drafter(self, spread: float) -> None:
        """Increase the uncertainty of drafter steps by this share, after a time without them."""
        self._drafter.widen(spread)

    def observe_target(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        """Observe a target step without prefill, in which branches read `again` KV tokens."""
        rows = max(rows, batch)
        first = rows not in self._met
        self._met.add(rows)
        # It may have made kernels: where it took long, it tells nothing of the next ones.
        if first and self.knows_target and seconds > _COLD * self.target(batch, rows):
            return
        if again and self.knows_target and 0 < seconds < math.inf:
            more = seconds - self.target(batch, rows)
            tokens, spent = (_KEEP_AGAIN * x for x in self._read_again)
            # What is not sides is another cost of rows.
            seconds = max(seconds - self.side(again), seconds / 2)
            self._read_again = tokens + again, spent + more
        self._target.observe(rows, seconds, _VERIFY if rows > batch else _PLAIN)

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
        if not (batch > 0 and steps > 0 and seconds > 0):
            return
        if wide:
            if self._drafter.known and fed <= _USUAL_FEED * batch:
                rounds, longer = (_KEEP_WIDE * x for x in self._wide)
                more = math.log(seconds / (steps * self._drafter.seconds(batch)))
                self._wide = rounds + 1.0, longer + min(max(more, -_FAR), _FAR)
            if looks and self._drafter.known:
                return
            seconds *= math.exp(-self._longer)
        if overhead > 0 or self._overhead.known:
            self._overhead.observe(batch, max(overhead, _LEAST_OVERHEAD))
        extra = max(0.0, fed - _USUAL_FEED * batch)
        known = self._drafter.known
        # Even a long catch-up bounds what a step takes from above.
        quick = known and seconds < steps * self._drafter.seconds(batch)
        if extra < _LONG_FEED or quick:
            forwards = max(seconds - extra * self._seconds_per_token, seconds / 2)
            self._drafter.observe(batch, forwards / steps)
        elif known:
            tokens, spent = self._caught_up
            more = seconds - steps * self._drafter.seconds(batch)
            self._caught_up = tokens * _KEEP + extra, spent * _KEEP + more

    @property
    def _longer(self) -> float:
        """Logarithm of a wide step over a plain one."""
        rounds, longer = self._wide
        return max(longer, 0.0) / rounds

    @property
    def _seconds_per_token(self) -> float:
        tokens, seconds = self._caught_up
        return max(seconds, 0.0) / tokens if tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates as JSON values; `from_dict` reads them as a calibration."""
        return {
            "target": self._target.points(_PLAIN),
            "verify": self._target.points(_VERIFY),
            "drafter": self._drafter.points(),
            "overhead": self._overhead.points(),
            "catch_up": self._seconds_per_token if self._caught_up[0] else None,
            "again": self.side(1),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "CostModel":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: Invalid data.
        """
        try:
            curves = {
                name: [(float(size), float(seconds)) for size, seconds in saved[name]]
                for name in ("target", "verify", "drafter", "overhead")
            }
            catch_up = None if saved["catch_up"] is None else float(saved["catch_up"])
            again = float(saved["again"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"invalid saved costs: {error!r}") from error
        if catch_up is not None and not 0 <= catch_up < math.inf:
            raise ValueError(f"invalid saved costs: catch_up is {catch_up}")
        if not 0 <= again < math.inf:
            raise ValueError(f"invalid saved costs: again is {again}")
        return cls(**curves, catch_up=catch_up, again=again)
