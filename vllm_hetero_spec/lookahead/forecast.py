# SPDX-License-Identifier: Apache-2.0
"""Forecast of tokens per second for every draft length.

A round with draft length k takes the drafter's and the target's steps, and emits one token per
request plus the accepted tokens: rate(k) = tokens(k) / seconds(k). Recent drafts are replayed at
present costs. The replay also omits tokens that would not be verified and stops rounds early, at
the same price of a second in tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from vllm_hetero_spec.lookahead.controllers import Trees
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates

GOOD_ENOUGH = 0.99  # share of the best rate; forecasts are no surer
_HOPELESS = 0.9  # share of the best rate; a draft length below it ends the forecast
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
        hoped: Rates with hardly measured costs reduced.
        beside: Net gain in tokens of a tree at each depth beside its chain; empty for chains.
    """

    alone: float
    rates: list[float]
    hoped: list[float]
    beside: list[float]

    @property
    def gain(self) -> float:
        """The highest rate over that of the target alone."""
        return max(self.rates) / self.alone

    @property
    def shortest(self) -> int:
        """The shortest draft length that is about as good as the best one."""
        good = GOOD_ENOUGH * max(self.hoped)
        return next(k for k, rate in enumerate(self.hoped, 1) if rate >= good)


class Load(NamedTuple):
    """The requests of a step, and the price of a second.

    Attributes:
        batch: Number of requests in the target's step.
        limits: Largest draft length of each request; at least one above 0.
        random: One entry per request to draft for; True if it is sampled.
        tokens_per_second: Lambda.
        can_stop_early: True if drafting can end between drafter steps.
        buckets: As in `Controller.plan`: rows within a bucket have no additional cost.
    """

    batch: int
    limits: Sequence[int]
    random: Sequence[bool]
    tokens_per_second: float
    can_stop_early: bool = False
    buckets: Sequence[int] = ()


def forecast(
    known: Estimates, load: Load, branches: BranchGains | None = None, paths: int = 1
) -> Forecast:
    """Return the rates of all promising draft lengths.

    Args:
        branches: Gains of trees; None if drafts are chains.
        paths: Number of drafter paths per tree.
    """
    costs, (batch, limits, random, price, can_stop_early, buckets) = known.costs, load
    # Requests whose limit is 0 or more, 1 or more, ...
    ordered = sorted(limits)
    asking = [len(limits) - bisect_left(ordered, depth) for depth in range(ordered[-1] + 1)]
    drafting = asking[1]
    step, before, read_again = costs.drafter(drafting * paths), costs.drafting(drafting, 0.0), 0.0
    if branches is not None:
        step += costs.beside(drafting)
        before += drafting * branches.seconds
    step_price = price * step * known.steps.each
    read_price = price * costs.side(1)
    survival = known.acceptance.survival(random)  # [drafts, positions]
    # P[a further token counts] behind so many, as is known before it is drawn.
    expected = survival[:, :-1] * known.acceptance.conditional(random)[:, 1:]
    groups = _Groups(len(survival), drafting)
    still_drafted = np.ones(len(survival), bool)
    still_verified = np.ones(len(survival), bool)
    tokens, rows, depth_drafted = float(batch), float(batch), 0.0
    share = 1.0  # of the groups that still draft: all where there are no early stops
    found = Forecast(batch / costs.target(batch, batch), [], [], [])
    for depth in range(len(asking) - 1):
        row_price = price * costs.row(rows, batch, batch + drafting * (depth + 1))
        if buckets:
            row_price = 0.0
        side_tokens = side_rows = side_reads = beside = 0.0
        if branches is not None:
            chains = rows + asking[depth + 1]
            price_of = partial(_price_of_last, costs, price, chains, drafting)
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
        tokens += weight * float(survival[:, depth] @ still_verified)
        rows += weight * int(np.count_nonzero(still_verified))
        tokens += asking[depth + 1] * side_tokens
        rows += asking[depth + 1] * side_rows
        read_again += asking[depth + 1] * side_reads
        seconds = before + step * known.steps.expected(depth_drafted) + costs.side(read_again)
        computed = batch * (1.0 + filled_up(depth + 1, buckets)) if buckets else rows
        found.rates.append(tokens / (seconds + costs.target(batch, computed)))
        found.hoped.append(tokens / (seconds + costs.hoped(batch, computed)))
        if found.hoped[-1] < _HOPELESS * max(found.rates):
            break
    return found


class Chains:
    """Chooses the kind of drafts: always chains. `trees.policy.TreeChoice` may choose trees.

    Args:
        known: Estimates for the pair.
    """

    def __init__(self, known: Estimates) -> None:
        self._known = known

    def forecast(self, load: Load, lookahead: int) -> Forecast:
        """Return the rates of the better kind. `lookahead` is the last draft length."""
        return forecast(self._known, load)

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
    return tokens_per_second * costs.row(rows, int(chains), int(rows) + 1)


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
