# SPDX-License-Identifier: Apache-2.0
"""Inside a step: which tokens are worth the time they take.

A drafter step, and a row of the target, are worth it if they bring more tokens than lambda times
their seconds. Both are asked before the token concerned is drawn, or of all that were proposed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_hetero_spec.lookahead.estimates import Estimates


class StepPolicy(NamedTuple):
    """The drafts of one step.

    Attributes:
        known: Estimates.
        tokens_per_second: Lambda.
        batch: Requests in the target's step.
        most: Rows of that step if all drafts were as long as planned.
        random: Which of the requests are random.
    """

    known: Estimates
    tokens_per_second: float
    batch: int
    most: int
    random: Sequence[bool]

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Which requests draft on; see `Controller`."""
        survival = self.known.acceptance.survival_of(confidences, self.random)
        price = self.row_price(self.batch + sum(map(len, confidences)))
        expected = list(map(self._next, survival, self.random))
        expected = [tokens if tokens >= price else 0.0 for tokens in expected]
        active = sum(tokens > 0 for tokens in expected)
        step = self.known.costs.drafter(max(active, 1)) * self.known.steps.each
        enough = sum(expected) >= self.tokens_per_second * step
        return [enough and tokens > 0 for tokens in expected]

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many proposed tokens to verify; see `Controller`.

        Depth by depth over the whole batch, the most promising requests first, so that whether a
        token is in does not depend on what was drawn after it.
        """
        survival = self.known.acceptance.survival_of(confidences, self.random)
        kept = [0] * len(survival)
        rows = self.batch
        alive = [i for i, request in enumerate(survival) if request]
        while alive:
            alive.sort(key=lambda i: -survival[i][kept[i]])
            still_alive = []
            for i in alive:
                if survival[i][kept[i]] < self.row_price(rows):
                    break
                kept[i] += 1
                rows += 1
                if kept[i] < len(survival[i]):
                    still_alive.append(i)
            alive = still_alive
        return kept

    def row_price(self, rows: int) -> float:
        """Tokens that one row more has to bring."""
        most = max(self.most, rows)  # of trees, there may be more than was planned for chains
        return self.tokens_per_second * self.known.costs.row(rows, self.batch, most)

    def side_price(self, context: int) -> float:
        """Tokens that a side sequence over so much context has to bring beside its rows."""
        return self.tokens_per_second * self.known.costs.side(context)

    def _next(self, survival: Sequence[float], random: bool) -> float:
        """P[a further token counts]: 0 for a request without a draft or at its longest."""
        rates = self.known.acceptance.rates(random)
        if not 0 < len(survival) < len(rates):
            return 0.0
        return survival[-1] * rates[len(survival)]
