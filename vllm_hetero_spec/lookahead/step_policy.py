# SPDX-License-Identifier: Apache-2.0
"""Decisions within a step: which tokens are worth their time.

A drafter step or a row of the target is worth it if its expected tokens exceed lambda times its
seconds. Each decision is made before its token is drawn, or for all proposed tokens.
"""

from collections.abc import Sequence

import numpy as np

from vllm_hetero_spec.lookahead.estimates import Estimates

_ON_ITS_WAY = 0.5  # of a drafter step, which has to end before one for the new text begins


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
        self._known, self._tokens_per_second = known, tokens_per_second
        self._batch, self._most, self._random = batch, most, random
        self._beside, self._paths = beside, paths
        self._filled_up = filled_up and not beside
        self._rows = known.costs.rows(batch, most)  # seconds of one more than `batch` and so on
        self._step_prices: dict[int, float] = {}  # by requests that take it

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Decide as `Controller.continue_drafting`."""
        price = self.row_price(self._batch + sum(map(len, confidences)))
        expected = []
        for draft, random in zip(confidences, self._random, strict=True):
            tokens = self._next(draft, random)
            expected.append(tokens if tokens >= price else 0.0)
        drafting = len(expected) - expected.count(0.0)
        enough = drafting > 0 and sum(expected) >= self._step_price(drafting)
        return [enough and tokens > 0 for tokens in expected]

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """Decide as `Controller.trim`.

        Tokens are chosen depth by depth over the whole batch, the most promising requests first, so
        that the choice of a token does not depend on tokens drawn after it.
        """
        survival = list(map(self._known.acceptance.survival_of, confidences, self._random))
        kept = [0] * len(survival)
        rows = self._batch
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

    def wait(
        self, missing: Sequence[int], longest: int, each: float, unread: int
    ) -> tuple[int, float]:
        """Decide whether the target waits for drafts that were not precomputed.

        Args:
            missing: Indices of the requests without a precomputed draft.
            longest: Largest draft length, in target tokens.
            each: Drafter steps per target token.
            unread: Context tokens that the drafter must read first.

        Returns:
            The draft length to wait for, 0 for none; and the seconds after which waiting no longer
            pays.
        """
        step = self._known.costs.drafter(len(missing))
        begins = _ON_ITS_WAY * step + self._known.costs.catch_up(unread)
        late = self._known.acceptance.late
        rates_of = self._known.acceptance.rates if late.due else late.rates
        rates = [rates_of(self._random[index]) for index in missing]
        alive = [1.0] * len(missing)
        rows, gain = self._batch, 0.0
        best, most, seconds = 0.0, 0, 0.0
        for tokens in range(1, longest + 1):
            alive = [chance * of[tokens - 1] for chance, of in zip(alive, rates, strict=True)]
            gain += sum(alive) - len(missing) * self.row_price(rows)
            rows += len(missing)
            takes = begins + each * tokens * step
            if gain - self._tokens_per_second * takes > best:
                best = gain - self._tokens_per_second * takes
                most, seconds = tokens, gain / self._tokens_per_second
        late.decided(waits=most > 0)
        return most, seconds

    def came_late(self, verified: int, accepted: int, random: bool) -> None:
        """Observe the verification of a draft that the target waited for."""
        self._known.acceptance.late.observe(verified, accepted, random)

    def looked_up(self, rank: int | None, guesses: int) -> None:
        """Observe a look-up of precomputed drafts; arguments as in `GuessHits.observe`."""
        self._known.acceptance.hits.observe(rank, guesses)

    def guesses(self, drafting: int, longest: int, each: float, most: int) -> int:
        """Return how many lines to precompute beside each chain, while the target verifies.

        Each line increases the probability of a hit, but makes all lines shorter, because they
        share the drafter's forwards.

        Args:
            drafting: Number of chains.
            longest: Largest draft length, in target tokens.
            each: Drafter steps per target token.
            most: Largest number of lines.
        """
        acceptance, costs = self._known.acceptance, self._known.costs
        step = np.array([costs.drafter(drafting * (1 + count)) for count in range(1 + most)])
        # The first one is for the target's own token.
        steps = costs.target(self._batch, self._most) / step - 1.0
        depths = np.clip(steps / each, 0.0, longest)
        accepted = [0.0, *np.cumprod(acceptance.rates(self._random[0])).cumsum()]
        tokens = np.interp(depths, np.arange(len(accepted)), accepted)
        return int((acceptance.hits.chances(most) * tokens).argmax())

    def row_price(self, rows: int) -> float:
        """Return the price of one more row, in tokens."""
        if self._filled_up:
            return 0.0
        if self._batch <= rows <= self._most:
            return self._tokens_per_second * self._rows[rows - self._batch]
        # Of trees, there may be more than was planned for chains.
        most = max(self._most, rows)
        return self._tokens_per_second * self._known.costs.row(rows, self._batch, most)

    def side_price(self, context: int) -> float:
        """Return the price in tokens of a branch that reads `context` tokens, without its rows."""
        return self._tokens_per_second * self._known.costs.side(context)

    def _step_price(self, drafting: int) -> float:
        """Return the price in tokens of a drafter step for `drafting` requests."""
        price = self._step_prices.get(drafting)
        if price is None:
            costs, wide = self._known.costs, drafting * self._paths
            step = costs.drafter(wide) + (costs.beside(wide) if self._beside else 0.0)
            price = self._tokens_per_second * step * self._known.steps.each
            self._step_prices[drafting] = price
        return price

    def _next(self, confidences: Sequence[float], random: bool) -> float:
        """Return P[a further token counts]: 0 for a request without a draft or at its longest."""
        acceptance, depth = self._known.acceptance, len(confidences)
        rates = acceptance.rates(random)
        if not 0 < depth < len(rates):
            return 0.0
        beside = self._beside[depth] if depth < len(self._beside) else 0.0
        return acceptance.survival_of(confidences, random)[-1] * rates[depth] + beside
