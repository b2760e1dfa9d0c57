# SPDX-License-Identifier: Apache-2.0
"""Forecast of tokens per second for every draft length.

A step with draft length k takes the drafter's steps and one of the target, and emits one token per
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

_GOOD_ENOUGH = 0.99  # share of the best rate; forecasts are no surer
Price = Callable[[float], float]  # in tokens, of the last of so many rows


class BranchGains(Protocol):
    """Expected gains of draft trees over chains: `trees.branch_statistics.BranchStatistics`."""

    @property
    def seconds(self) -> float: ...

    @property
    def step_share(self) -> float: ...

    @property
    def read_seconds(self) -> float: ...

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
    def good(self) -> list[int]:
        """Draft lengths that are about as good as the best one."""
        least = _GOOD_ENOUGH * max(self.hoped)
        return [k for k, rate in enumerate(self.hoped, 1) if rate >= least]


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
    """Return the rates of all draft lengths.

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
    read_seconds = 0.0
    if branches is not None:
        step += branches.step_share * costs.drafter(drafting)
        before += drafting * branches.seconds
        read_seconds = branches.read_seconds
    step_price = price * step * known.steps.each
    # [groups, drafting, positions], [drafting, positions]
    survival, rates = known.acceptance.replayed(random)
    going, verified = np.ones(survival.shape[:2], bool), np.ones(survival.shape[:2], bool)
    tokens, rows, drafted, share = float(batch), float(batch), 0.0, 1.0
    found = Forecast(batch / costs.target(batch, batch), [], [], [])
    for depth in range(len(asking) - 1):
        middle, most = rows + asking[depth + 1] / 2, batch + drafting * (depth + 1)
        row_price = 0.0 if buckets else price * costs.row(middle, batch, most)
        side_tokens = side_rows = side_reads = beside = 0.0
        if branches is not None:
            chains = rows + asking[depth + 1]
            price_of = partial(_price_of_last, costs, price, chains, drafting)
            reading = price * read_seconds
            best, row = branches.paying(depth + 1, row_price, price_of, random, reading)
            side_tokens, side_rows, side_reads = best.tolist()
            beside = side_tokens - row * side_rows - reading * side_reads
            found.beside.append(beside)
        if can_stop_early and depth:
            # Tokens that a further position adds, known before it is sampled.
            adds = survival[..., depth - 1] * rates[..., depth] + beside
            going &= adds >= row_price
            going &= ((adds * going).sum(1) >= step_price)[:, None]
            share = float(going.any(1).mean())
        verified &= going & (survival[..., depth] >= row_price)
        drafted += share
        tokens += asking[depth + 1] * float((survival[..., depth] * verified).mean() + side_tokens)
        rows += asking[depth + 1] * float(verified.mean() + side_rows)
        read_again += asking[depth + 1] * side_reads
        seconds = before + step * known.steps.expected(drafted) + read_seconds * read_again
        computed = batch * (1.0 + filled_up(depth + 1, buckets)) if buckets else rows
        found.rates.append(tokens / (seconds + costs.target(batch, computed)))
        found.hoped.append(tokens / (seconds + costs.hoped(batch, computed)))
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

    def chain_step(self, batch: int, rows: int, seconds: float, again: int) -> float:
        """Return the seconds of a target step without what trees added to it.

        Args:
            batch, rows, seconds, again: As in `Controller.observe_step`.
        """
        return seconds

    def chain_round(self, batch: float, steps: float, seconds: float, wide: bool) -> float:
        """Return the seconds of a round's forwards without what trees added to them.

        Args:
            batch, steps, seconds, wide: As in `Controller.observe_draft`.
        """
        return seconds


def filled_up(length: int, buckets: Sequence[int]) -> int:
    """Return the padded draft length if the longest draft has `length` tokens."""
    return next((bucket for bucket in buckets if bucket >= length), buckets[-1])


def _price_of_last(
    costs: CostModel, tokens_per_second: float, chains: float, drafting: int, beside: float
) -> float:
    """Return the price in tokens of the last row, if drafts have `beside` rows beside chains."""
    rows = chains + drafting * beside
    return tokens_per_second * costs.row(rows, int(chains), int(rows) + 1)
