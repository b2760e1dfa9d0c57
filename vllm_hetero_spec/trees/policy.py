# SPDX-License-Identifier: Apache-2.0
"""Choice between chains and trees, and of the number of paths that the drafter follows.

To find a tree takes time, and its rows cost. If trees do not gain more than this, drafts are
chains. Because texts change, a tree is still probed now and then: it is found and valued, but only
its chain is verified. Probes take a small share of the time.
"""

from vllm_hetero_spec.lookahead.controllers import Trees
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Chains, Forecast, Load, forecast
from vllm_hetero_spec.lookahead.prober import Prober
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics

# Price of a row, in tokens, from which on trees are not probed. The less likely of two siblings is
# worth at most half a token and costs two rows, so trees hardly improve on chains.
_DEAR = 0.25
_ENOUGH = 0.01  # relative gain in rate that trees must have; less is within the noise
_OF_A_PATH = 0.05  # tokens per request that each further drafter path is assumed to gain
_SHARE = 0.0025  # share of the time that probes may take; they are cheap compared with a step


class TreeChoice(Chains):
    """Chooses between chains and trees.

    Args:
        width: Largest number of paths that the drafter follows for a tree.
        free: True if further paths take no drafter time, as those of a parallel drafter.
    """

    def __init__(self, known: Estimates, width: int, *, free: bool = False) -> None:
        super().__init__(known)
        self._width, self._free = width, free
        self.branches, self._paths = BranchStatistics(), 1
        self._pay = self._dear = self._looks = False
        self._prober: Prober | None = None
        self._steps = 0.0  # drafter steps of a round

    def forecast(self, load: Load, lookahead: int) -> Forecast:
        chains, self._pay = super().forecast(load, lookahead), False
        if not self._may_pay(load, lookahead):
            return chains
        self._paths = self._nearly_free(load.batch, load.tokens_per_second)
        # Rows of trees are not padded.
        drafted = 1 if self._free else self._paths
        trees = forecast(self._known, load._replace(buckets=()), self.branches, drafted)
        self._pay = max(trees.rates) > (1.0 + _ENOUGH) * max(chains.rates)
        return trees if self._pay else chains

    def _may_pay(self, load: Load, lookahead: int) -> bool:
        """Return True if trees would pay if all their rows were as cheap as the first ones."""
        if not self.branches.room:
            return False
        costs, (batch, _, random, tokens_per_second, *_) = self._known.costs, load
        row = tokens_per_second * costs.row(2 * batch, batch, 2 * batch)
        self._dear = row >= _DEAR
        if self._dear:
            return False
        self._steps = steps = self._known.steps.expected(lookahead)
        read = tokens_per_second * self.branches.read_seconds
        tokens, rows, again = self.branches.worth(None, row, random, read)
        seconds = self.branches.seconds + steps * self._beside(batch) / batch
        return bool(tokens - row * rows - read * again > tokens_per_second * seconds)

    def _nearly_free(self, batch: int, tokens_per_second: float) -> int:
        """Return how many paths cost a drafter step hardly more than one path."""
        costs, steps = self._known.costs, self._steps
        if self._free:
            return self._width
        for paths in range(2, self._width + 1):
            wide = paths * batch
            more = tokens_per_second * steps * (costs.drafter(wide) - costs.drafter(wide - batch))
            if more >= _OF_A_PATH * batch:
                return paths - 1
        return self._width

    def _beside(self, batch: int) -> float:
        """Return the additional seconds of a drafter step that collects candidates."""
        return self.branches.step_share * self._known.costs.drafter(batch)

    def chain_step(self, batch: int, rows: int, seconds: float, again: int) -> float:
        if again and self._known.costs.knows_target:
            more = seconds - self._known.costs.target(batch, rows)
            self.branches.reading.add(more / again)
            seconds = max(seconds - again * self.branches.read_seconds, seconds / 2)
        return seconds

    def chain_round(self, batch: float, steps: float, seconds: float, wide: bool) -> float:
        if wide and self._known.costs.knows_drafter:
            chain = steps * self._known.costs.drafter(batch)
            self.branches.widening.add(seconds / chain - 1.0)
            return chain if self._looks else seconds / (1.0 + self.branches.step_share)
        return seconds

    def plan(self, now: float, drafted: int) -> Trees:
        self._looks = False
        if self._pay:
            return Trees(self._paths)
        if self._dear or not (self.branches.room and self._known.costs.knows_drafter):
            return Trees()
        self._prober = self._prober or Prober(now, _SHARE)
        takes = drafted * self.branches.seconds + self._steps * self._beside(drafted)
        self._looks = self._prober.due(now, takes, drafted)
        return Trees(1, looks=True) if self._looks else Trees()
