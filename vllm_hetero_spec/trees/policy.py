# SPDX-License-Identifier: Apache-2.0
"""Whether drafts are to be trees at present, and of how many paths.

Finding a tree takes time, and its rows cost. Where trees do not bring more than that, drafts are
chains, at the cost of chains. Now and then a tree is looked at all the same, since texts change:
found and valued, while its chain alone is verified. That takes a small share of the time.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Forecast, forecast
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics

# Tokens for a row, from which on nothing is looked for: of two siblings one is worth half a token
# at most and takes two rows, so that the best trees are chains, or hardly better.
_DEAR = 0.25
_ENOUGH = 0.01  # share of the rate that trees have to add: less is not told from nothing
_OF_A_PATH = 0.05  # tokens for each request that each path of the drafter's brings, or more
_UNCERTAIN = 0.45  # share of a cost: more paths are not taken at costs less certain than this
_SHARE = 0.0025  # of the time that may be spent on looking
_APART = 0.25  # seconds between two looks, or more


class Trees(NamedTuple):
    """What the drafts of a step are to be.

    Attributes:
        paths: How many the drafter follows for trees, 0 where drafts are chains.
        looks: Trees are only looked at: chains are verified.
    """

    paths: int = 0
    looks: bool = False


class TreeChoice:
    """Chains or trees.

    Args:
        known: Estimates.
        width: Most paths that the drafter follows for a tree; 0 where there are none.

    Attributes:
        branches: What recent trees had beside their chains.
    """

    def __init__(self, known: Estimates, width: int) -> None:
        self._known, self._width = known, width
        self.branches, self._paths = BranchStatistics(), 1
        self._pay = self._dear = False
        self._next_look, self._steps = -math.inf, 0.0  # drafter steps of a round

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
        """Rates of trees where these are better than those of chains, else of chains.

        Args:
            batch, limits, random, tokens_per_second, can_stop_early, tiers: See `forecast`. Rows of
                trees are counted as they are.
            lookahead: The last one, in target tokens.
        """
        load = batch, limits, random, tokens_per_second, can_stop_early
        chains, self._pay = forecast(self._known, *load, buckets=buckets), False
        if not self._may_pay(batch, random, tokens_per_second, lookahead):
            return chains
        self._paths = self._nearly_free(batch, tokens_per_second)
        trees = forecast(self._known, *load, self.branches, self._paths)
        self._pay = max(trees.rates) > (1.0 + _ENOUGH) * max(chains.rates)
        return trees if self._pay else chains

    def _may_pay(
        self, batch: int, random: Sequence[bool], tokens_per_second: float, lookahead: int
    ) -> bool:
        """Whether trees would pay if all their rows were as cheap as the first ones."""
        if not (self._width and self.branches.room):
            return False
        costs = self._known.costs
        row = tokens_per_second * costs.row(2 * batch, batch, 2 * batch)
        self._dear = row >= _DEAR
        if self._dear:
            return False
        self._steps = steps = self._known.steps.expected(lookahead)
        read = tokens_per_second * costs.side(1)
        tokens, rows, again = self.branches.worth(None, row, random, read)
        seconds = self.branches.seconds + steps * costs.beside(batch) / batch
        return bool(tokens - row * rows - read * again > tokens_per_second * seconds)

    def _nearly_free(self, batch: int, tokens_per_second: float) -> int:
        """Paths that a drafter step takes hardly longer for than for one."""
        costs, steps = self._known.costs, self._steps
        for paths in range(2, self._width + 1):
            wide = paths * batch
            more = tokens_per_second * steps * (costs.drafter(wide) - costs.drafter(wide - batch))
            if more >= _OF_A_PATH * batch or costs.drafter_stddev(wide) >= _UNCERTAIN:
                return paths - 1
        return self._width

    def plan(self, now: float, drafted: int) -> Trees:
        """For the drafts of a step.

        Args:
            now: Seconds of the caller's clock.
            drafted: Requests that are drafted for.
        """
        if self._pay:
            return Trees(self._paths)
        if self._dear or now < self._next_look or not (self._width and self.branches.room):
            return Trees()
        takes = drafted * self.branches.seconds + self._steps * self._known.costs.beside(drafted)
        self._next_look = now + max(takes / _SHARE, _APART)
        return Trees(1, looks=True)
