# SPDX-License-Identifier: Apache-2.0
"""Choice between chains and trees, and of the number of paths that the drafter follows.

To find a tree takes time, and its rows cost. If trees do not gain more than this, drafts are
chains. Because texts change, a tree is still probed now and then: it is found and valued, but only
its chain is verified. Probes take a small share of the time.
"""

import math
from collections.abc import Sequence

from vllm_hetero_spec.lookahead.controllers import Trees
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Chains, Forecast, forecast
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics

# Price of a row, in tokens, from which on trees are not probed. The less likely of two siblings is
# worth at most half a token and costs two rows, so trees hardly improve on chains.
_DEAR = 0.25
_ENOUGH = 0.01  # relative gain in rate that trees must have; less is within the noise
_OF_A_PATH = 0.05  # tokens per request that each further drafter path is assumed to gain
_UNCERTAIN = 0.45  # relative standard deviation of drafter costs at which paths are not added
_SHARE = 0.0025  # share of time for probes
_APART = 0.25  # seconds, the shortest interval between two probes


class TreeChoice(Chains):
    """Chooses between chains and trees.

    Args:
        width: Largest number of paths that the drafter follows for a tree.
    """

    def __init__(self, known: Estimates, width: int) -> None:
        super().__init__(known)
        self._width = width
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
        load = batch, limits, random, tokens_per_second, can_stop_early
        chains, self._pay = super().forecast(*load, lookahead, buckets), False
        if not self._may_pay(batch, random, tokens_per_second, lookahead):
            return chains
        self._paths = self._nearly_free(batch, tokens_per_second)
        trees = forecast(self._known, *load, self.branches, self._paths)
        self._pay = max(trees.rates) > (1.0 + _ENOUGH) * max(chains.rates)
        return trees if self._pay else chains

    def _may_pay(
        self, batch: int, random: Sequence[bool], tokens_per_second: float, lookahead: int
    ) -> bool:
        """Return True if trees would pay if all their rows were as cheap as the first ones."""
        if not self.branches.room:
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
        """Return how many paths cost a drafter step hardly more than one path."""
        costs, steps = self._known.costs, self._steps
        for paths in range(2, self._width + 1):
            wide = paths * batch
            more = tokens_per_second * steps * (costs.drafter(wide) - costs.drafter(wide - batch))
            if more >= _OF_A_PATH * batch or costs.drafter_stddev(wide) >= _UNCERTAIN:
                return paths - 1
        return self._width

    def plan(self, now: float, drafted: int) -> Trees:
        if self._pay:
            return Trees(self._paths)
        if self._dear or now < self._next_look or not self.branches.room:
            return Trees()
        takes = drafted * self.branches.seconds + self._steps * self._known.costs.beside(drafted)
        self._next_look = now + max(takes / _SHARE, _APART)
        return Trees(1, looks=True)
