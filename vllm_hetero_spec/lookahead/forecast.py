# SPDX-License-Identifier: Apache-2.0
"""Tokens per second: the measured rate of each load, and a forecast for every draft length.

A round with draft length k takes the drafter's and the target's steps, and emits one token per
request plus the accepted tokens: rate(k) = tokens(k) / seconds(k). Draft length 0 is the target
alone. Recent drafts are replayed at present costs. The replay also omits tokens that would not be
verified and stops rounds early, at the same price of a second in tokens.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from vllm_hetero_spec.lookahead.controllers import Trees
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates

_HOPELESS = 0.9  # of the best rate: below it, deeper lookaheads will not catch up
_NEGLIGIBLE = 0.002  # share of the tokens: where a depth brings less, so do the deeper ones
_OPTIMISM = 1.5  # standard deviations by which unknown costs count for less, so that they are tried
_MOST_OPTIMISM = 0.15  # of the logarithm of a cost: more would cost more to try than it may bring
_KEEP = 0.5 ** (1 / 256)  # weight of a step against the next: half after 256, some seconds
_NEW_LOAD = (0.0, 0.0, 0.0)  # steps, tokens, seconds
_FORECAST_WEIGHT = 8.0  # steps of measurement that weigh as much as what was foreseen


class Throughput:
    """Measured tokens per second of each load."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[float, float, float]] = {}  # steps, tokens, seconds

    def add(self, load: Hashable, tokens: int, seconds: float) -> None:
        """Add a step of this load."""
        if seconds > 0:
            steps, sum_tokens, sum_seconds = (_KEEP * x for x in self._sums.get(load, _NEW_LOAD))
            self._sums[load] = steps + 1.0, sum_tokens + tokens, sum_seconds + seconds

    def knows(self, load: Hashable) -> bool:
        """Return True if any step of this load was measured."""
        return load in self._sums

    def rate(self, load: Hashable, foreseen: float) -> float:
        """Tokens per second; near `foreseen` while little has been measured."""
        steps, tokens, seconds = self._sums.get(load, _NEW_LOAD)
        if not steps:
            return foreseen
        prior_seconds = _FORECAST_WEIGHT * seconds / steps
        return (tokens + prior_seconds * foreseen) / (seconds + prior_seconds)


Price = Callable[[float], float]  # in tokens, of the last of so many rows


class BranchGains(Protocol):
    """Expected gains of draft trees over chains: `trees.branch_statistics.BranchStatistics`."""

    @property
    def seconds(self) -> float: ...

    def paying(
        self, depth: int, row: float, price_of: Price, random: Sequence[bool], read: float
    ) -> tuple[np.ndarray, float]: ...


class Forecast(NamedTuple):
    """Rates in tokens per second over the whole batch, of lookahead 1, 2, ...; never empty.

    Attributes:
        alone: Rate of the target alone.
        rates: Expected rates.
        optimistic_rates: Rates with uncertain costs reduced.
        stddevs: Relative standard deviation of the costs of each draft length: that of the target,
            or that of the drafter times its share of the time, whichever is larger.
        beside: Net gain in tokens of a tree at each depth beside its chain; empty for chains.
    """

    alone: float
    rates: list[float]
    optimistic_rates: list[float]
    stddevs: list[float]
    beside: list[float]

    @property
    def gain(self) -> float:
        """The highest rate over that of the target alone."""
        return max(self.rates) / self.alone


def forecast(
    known: Estimates,
    batch: int,
    limits: Sequence[int],
    random: Sequence[bool],
    tokens_per_second: float,
    can_stop_early: bool,
    branches: BranchGains | None = None,
    paths: int = 1,
    buckets: Sequence[int] = (),
) -> Forecast:
    """Return the rates of all promising draft lengths.

    Args:
        known: Estimates for the pair.
        batch: Number of requests in the target's step.
        limits: Largest draft length of each request; at least one above 0.
        random: One entry per request to draft for; True if it is sampled.
        tokens_per_second: Lambda.
        can_stop_early: True if drafting can end between drafter steps.
        branches: Gains of trees; None if drafts are chains.
        paths: Number of drafter paths per tree.
        buckets: As in `Controller.plan`: rows within a bucket have no additional cost.
    """
    costs = known.costs
    # Requests whose limit is 0 or more, 1 or more, ...
    ordered = sorted(limits)
    asking = [len(limits) - bisect_left(ordered, depth) for depth in range(ordered[-1] + 1)]
    drafting = asking[1]
    step, before, read_again = costs.drafter(drafting * paths), costs.drafting(drafting, 0.0), 0.0
    if branches is not None:
        step += costs.beside(drafting)
        before += drafting * branches.seconds
    step_price = tokens_per_second * step * known.steps.each
    read_price = tokens_per_second * costs.side(1)
    drafter_stddev = costs.drafter_stddev(drafting)
    hope_of_drafter = _optimism(drafter_stddev)
    survival = known.acceptance.survival(random)  # [drafts, positions]
    # P[a further token counts] behind so many, as is known before it is drawn.
    expected = survival[:, :-1] * known.acceptance.conditional(random)[:, 1:]
    groups = _Groups(len(survival), drafting)
    still_drafted = np.ones(len(survival), bool)
    still_verified = np.ones(len(survival), bool)
    tokens, rows, depth_drafted = float(batch), float(batch), 0.0
    share = 1.0  # of the groups that still draft: all where there are no early stops
    found = Forecast(batch / costs.target(batch, batch), [], [], [], [])
    for depth in range(len(asking) - 1):
        row_price = tokens_per_second * costs.row(rows, batch, batch + drafting * (depth + 1))
        if buckets:
            row_price = 0.0
        side_tokens = side_rows = side_reads = beside = 0.0
        if branches is not None:
            chains = rows + asking[depth + 1]
            price_of = partial(_price_of_last, costs, tokens_per_second, chains, drafting)
            found_beside, row = branches.paying(depth + 1, row_price, price_of, random, read_price)
            side_tokens, side_rows, side_reads = found_beside.tolist()
            beside = side_tokens - row * side_rows - read_price * side_reads
            found.beside.append(beside)
        if can_stop_early and depth:
            counts = expected[:, depth - 1] + beside
            still_drafted &= groups.earn(counts * still_drafted, step_price)
            still_drafted &= counts >= row_price
            share = groups.share(still_drafted)
        still_verified &= still_drafted
        still_verified &= survival[:, depth] >= row_price
        depth_drafted += share
        weight = asking[depth + 1] / len(survival)
        accepted = weight * float(survival[:, depth] @ still_verified)
        rows += weight * int(np.count_nonzero(still_verified))
        accepted += asking[depth + 1] * side_tokens
        rows += asking[depth + 1] * side_rows
        read_again += asking[depth + 1] * side_reads
        tokens += accepted
        seconds = before + step * known.steps.expected(depth_drafted) + costs.side(read_again)
        computed = batch * (1.0 + filled_up(depth + 1, buckets)) if buckets else rows
        verifying, stddev = costs.target(batch, computed), costs.verify_stddev(computed)
        hoped = seconds * hope_of_drafter + verifying * _optimism(stddev)
        found.rates.append(tokens / (seconds + verifying))
        found.optimistic_rates.append(tokens / hoped)
        found.stddevs.append(max(stddev, drafter_stddev * seconds / (seconds + verifying)))
        if (
            found.optimistic_rates[-1] < _HOPELESS * max(found.rates)
            or accepted < _NEGLIGIBLE * tokens
        ):
            break
    return found


class Chains:
    """Chooses the kind of drafts: always chains. `trees.policy.TreeChoice` may choose trees.

    Args:
        known: Estimates for the pair.
    """

    def __init__(self, known: Estimates) -> None:
        self._known = known

    def forecast(
        self,
        batch: int,
        limits: Sequence[int],
        random: Sequence[bool],
        tokens_per_second: float,
        can_stop_early: bool,
        lookahead: int,
        buckets: Sequence[int] = (),
    ) -> Forecast:
        """Return the rates of the better kind.

        Args:
            batch, limits, random, tokens_per_second, can_stop_early: As in `forecast`.
            lookahead: The last draft length, in target tokens.
            buckets: As in `forecast`, for chains only. Rows of trees are not padded.
        """
        load = batch, limits, random, tokens_per_second, can_stop_early
        return forecast(self._known, *load, buckets=buckets)

    def plan(self, now: float, drafted: int) -> Trees:
        """Choose the kind of drafts of a step that drafts for `drafted` requests."""
        return Trees()


def filled_up(length: int, buckets: Sequence[int]) -> int:
    """Return the padded draft length if the longest draft has `length` tokens."""
    return next((bucket for bucket in buckets if bucket >= length), buckets[-1])


def _price_of_last(
    costs: CostModel, tokens_per_second: float, chains: float, drafting: int, beside: float
) -> float:
    """Return the price in tokens of the last row, if drafts have `beside` rows beside chains."""
    rows = chains + drafting * beside
    return tokens_per_second * costs.row(rows, chains, rows)


def _optimism(stddev: float) -> float:
    """The factor that makes a cost a hopeful one."""
    return math.exp(-min(_OPTIMISM * stddev, _MOST_OPTIMISM))


class _Groups:
    """Drafts in groups as large as the batch, which go on together; the rest is left out.

    Args:
        drafts: How many there are, at least one.
        size: Of a group; fewer where there are fewer.
    """

    def __init__(self, drafts: int, size: int) -> None:
        self._shape = drafts // min(size, drafts), min(size, drafts)
        self._whole = self._shape[0] * self._shape[1]
        self._scale = size / self._shape[1]
        # The rest does as the first ones do.
        self._group_of = np.arange(drafts) % self._whole // self._shape[1]

    def earn(self, expected: np.ndarray, price: float) -> np.ndarray:
        """Return for each draft whether its group earns at least `price` tokens, bool [drafts]."""
        earned = expected[: self._whole].reshape(self._shape).sum(1) * self._scale
        enough: np.ndarray = (earned >= price)[self._group_of]
        return enough

    def share(self, drafted: np.ndarray) -> float:
        """Share of the groups in which any is left of drafts [drafts]."""
        left = drafted[: self._whole].reshape(self._shape).any(1)
        return int(np.count_nonzero(left)) / self._shape[0]
