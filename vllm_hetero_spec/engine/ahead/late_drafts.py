# SPDX-License-Identifier: Apache-2.0
"""Decisions on precomputed drafts: whether to wait for a missing one, and how many lines to make.

A draft that was not precomputed follows a token that the drafter did not predict, so fewer of its
tokens tend to be accepted. Initially the target waits for none: precomputed drafts cost next to
nothing, and show how good the drafter is.
"""

from collections.abc import Sequence

import numpy as np

from vllm_hetero_spec.engine.ahead.guess_hits import GuessHits
from vllm_hetero_spec.lookahead.acceptance import PositionRates
from vllm_hetero_spec.lookahead.step_policy import StepPolicy

_STARTED = 0.5  # share of a drafter step; it has to end before one for the new text begins
# Steps in a row without waiting until late drafts are treated like others, to measure them again:
# texts change, and a wait in vain takes about half of a step.
_TRIED_EVERY = 16


class LateDrafts:
    """Acceptance of drafts that the target waited for, and hit rates of precomputed ones.

    Attributes:
        hits: Hit rates of lines.
    """

    def __init__(self) -> None:
        self.hits = GuessHits()
        self._counts: dict[bool, PositionRates] = {}  # by kind: greedy, sampled
        self._passed = 0  # steps in a row without waiting

    def rates(self, random: bool, positions: int) -> list[float]:
        """Return the conditional acceptance of each position; 0 before any observation."""
        counts = self._counts.get(random)
        return [0.0] * positions if counts is None else counts.rates().tolist()

    def observe(self, policy: StepPolicy, verified: int, accepted: int, random: bool) -> None:
        """Add a verified late draft of a greedy or sampled request."""
        if random not in self._counts:
            self._counts[random] = PositionRates(policy.known.acceptance.positions)
        self._counts[random].observe([verified], [accepted])

    def wait(
        self, policy: StepPolicy, missing: Sequence[int], longest: int, each: float, unread: int
    ) -> tuple[int, float]:
        """Decide whether the target waits for drafts that were not precomputed.

        Args:
            policy: Prices of the present step.
            missing: Indices of the requests without a precomputed draft.
            longest: Largest draft length, in target tokens.
            each: Drafter steps per target token.
            unread: Context tokens that the drafter must read first.

        Returns:
            The draft length to wait for, 0 for none; and the seconds after which waiting no longer
            pays.
        """
        acceptance, costs = policy.known.acceptance, policy.known.costs
        price, step = policy.tokens_per_second, costs.drafter(len(missing))
        begins = _STARTED * step + costs.catch_up(unread)
        tried = self._passed >= _TRIED_EVERY
        kinds = [policy.random[index] for index in missing]
        rates = [
            acceptance.rates(kind) if tried else self.rates(kind, acceptance.positions)
            for kind in kinds
        ]
        alive = [1.0] * len(missing)
        rows, gain = policy.batch, 0.0
        best, most, seconds = 0.0, 0, 0.0
        for tokens in range(1, longest + 1):
            alive = [chance * of[tokens - 1] for chance, of in zip(alive, rates, strict=True)]
            gain += sum(alive) - len(missing) * policy.row_price(rows)
            rows += len(missing)
            net = gain - price * (begins + each * tokens * step)
            if net > best:
                best, most, seconds = net, tokens, gain / price
        self._passed = 0 if most else self._passed + 1
        return most, seconds

    def guesses(
        self, policy: StepPolicy, drafting: int, longest: int, each: float, most: int
    ) -> int:
        """Return how many lines to precompute beside each chain, while the target verifies.

        Each line increases the probability of a hit, but makes all lines shorter, because they
        share the drafter's forwards.

        Args:
            policy: Prices of the present step.
            drafting: Number of chains.
            longest: Largest draft length, in target tokens.
            each: Drafter steps per target token.
            most: Largest number of lines.
        """
        acceptance, costs = policy.known.acceptance, policy.known.costs
        step = np.array([costs.drafter(drafting * (1 + count)) for count in range(1 + most)])
        # The first one is for the target's own token.
        steps = costs.target(policy.batch, policy.most) / step - 1.0
        depths = np.clip(steps / each, 0.0, longest)
        accepted = [0.0, *np.cumprod(acceptance.rates(policy.random[0])).cumsum()]
        tokens = np.interp(depths, np.arange(len(accepted)), accepted)
        return int((self.hits.chances(most) * tokens).argmax())
