# SPDX-License-Identifier: Apache-2.0
"""Decisions within a step: which tokens are worth their time.

A drafter step or a row of the target is worth it if its expected tokens exceed lambda times its
seconds. Each decision is made before its token is sampled, or for all proposed tokens.
"""

from collections.abc import Sequence

from vllm_hetero_spec.lookahead.estimates import Estimates


class StepPolicy:
    """Decisions for the drafts of one step, at the costs known when it begins.

    Args:
        known: Estimates for the pair.
        tokens_per_second: Lambda.
        batch: Number of requests in the target's step.
        most: Rows of that step if all drafts have their planned length.
        random: True for each sampled request.
        beside: Net gain in tokens of a tree at each depth beside its chain; empty for chains.
        paths: Number of paths that the drafter follows.
        filled_up: True if all drafts are padded to the longest, so that rows have no price.
    """

    def __init__(
        self,
        known: Estimates,
        tokens_per_second: float,
        batch: int,
        most: int,
        random: Sequence[bool],
        beside: Sequence[float] = (),
        paths: int = 1,
        *,
        filled_up: bool = False,
    ) -> None:
        self.known, self.tokens_per_second = known, tokens_per_second
        self.batch, self.most, self.random = batch, most, random
        self._beside, self._paths = beside, paths
        self._filled_up = filled_up and not beside

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Decide as `Controller.continue_drafting`."""
        price = self.row_price(self.batch + sum(map(len, confidences)))
        expected = []
        for draft, random in zip(confidences, self.random, strict=True):
            tokens = self._next(draft, random)
            expected.append(tokens if tokens >= price else 0.0)
        drafting = len(expected) - expected.count(0.0)
        enough = drafting > 0 and sum(expected) >= self._step_price(drafting)
        return [enough and tokens > 0 for tokens in expected]

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """Decide as `Controller.trim`.

        Tokens are chosen depth by depth over the whole batch, the most promising requests first, so
        that the choice of a token does not depend on tokens sampled after it.
        """
        if self._filled_up:
            return [len(draft) for draft in confidences]
        survival = list(map(self.known.acceptance.survival_of, confidences, self.random))
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
        """Return the price of one more row, in tokens."""
        if self._filled_up:
            return 0.0
        # Trees may have more rows than were planned for chains.
        most = max(self.most, rows)
        return self.tokens_per_second * self.known.costs.row(rows, self.batch, most)

    def _step_price(self, drafting: int) -> float:
        """Return the price in tokens of a drafter step for `drafting` requests."""
        step = self.known.costs.drafter(drafting * self._paths)
        return self.tokens_per_second * step * self.known.steps.each

    def _next(self, confidences: Sequence[float], random: bool) -> float:
        """Return P[a further token counts]: 0 for a request without a draft or at its longest."""
        acceptance, depth = self.known.acceptance, len(confidences)
        rates = acceptance.rates(random)
        if not 0 < depth < len(rates):
            return 0.0
        beside = self._beside[depth] if depth < len(self._beside) else 0.0
        return acceptance.survival_of(confidences, random)[-1] * rates[depth] + beside
