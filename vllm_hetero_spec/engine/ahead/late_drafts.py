# SPDX-License-Identifier: Apache-2.0
"""Decisions on precomputed drafts: whether to wait for a missing one, and how many lines to make.

A draft that was not precomputed follows a token that the drafter did not predict, so fewer of its
tokens tend to be accepted. Initially the target waits for none: precomputed drafts cost next to
nothing, and show how good the drafter is.

A line is the chain, or the draft behind a guessed token. Lines are counted by rank, the most likely
first, which gives the gain of one more guess.
"""

from collections.abc import Sequence

import numpy as np

from vllm_hetero_spec.lookahead.step_policy import StepPolicy

_WEIGHT = 4.0  # look-ups that what is thought of a line before any is worth
# Weight of a look-up relative to the next: half after 70, some seconds. The rate of a line that was
# not drafted for long returns to its prior, so that it is tried again.
_KEEP_HITS = 0.99
_STARTED = 0.5  # share of a drafter step; it has to end before one for the new text begins
# Steps in a row without waiting until late drafts are treated like others, to measure them again:
# texts change, and a wait in vain takes about half of a step.
_TRIED_EVERY = 16
_KEEP = 0.95  # weight of a late draft relative to the next: about 20 count
_PRIOR = 0.25  # expected tokens of a late draft before any was waited for, none of them accepted


class GuessHits:
    """Hit rates of lines by rank; rank 0 is the chain's."""

    def __init__(self) -> None:
        self._counts: list[list[float]] = []  # of each rank: look-ups, hits

    def observe(self, rank: int | None, guesses: int) -> None:
        """Add a look-up.

        Args:
            rank: Rank of the line that was hit; None if none was.
            guesses: Number of lines beside the chain.
        """
        self._counts += [[0.0, 0.0] for _ in range(1 + guesses - len(self._counts))]
        for line, counts in enumerate(self._counts):
            counts[0] = _KEEP_HITS * counts[0] + (line <= guesses)
            counts[1] = _KEEP_HITS * counts[1] + (line == rank)

    def chances(self, guesses: int) -> list[float]:
        """Return P[any line up to each rank is hit], for the chain alone, with one guess, ...

        The prior of a line is half of the probability that the lines before it miss, and at most
        the rate of the previous line.
        """
        reached, last, found = 0.0, 1.0, []
        for line in range(1 + guesses):
            seen, hits = self._counts[line] if line < len(self._counts) else (0.0, 0.0)
            prior = min(last, 0.5 * (1.0 - reached))
            last = (hits + _WEIGHT * prior) / (seen + _WEIGHT)
            reached = min(reached + last, 1.0)
            found.append(reached)
        return found


class LateDrafts:
    """Acceptance of late drafts relative to others, and hit rates of precomputed ones.

    Args:
        parallel: True if one forward of the drafter drafts all tokens.

    Attributes:
        share: Accepted tokens of late drafts, over those that other drafts would have.
        hits: Hit rates of lines.
    """

    def __init__(self, *, parallel: bool = False) -> None:
        self._parallel = parallel
        self.share, self.hits = 0.0, GuessHits()
        self._expected, self._accepted = _PRIOR, 0.0  # tokens
        self._passed = 0  # steps in a row without waiting

    def observe(self, policy: StepPolicy, verified: int, accepted: int, random: bool) -> None:
        """Add a verified late draft of a greedy or sampled request."""
        rates = policy.known.acceptance.rates(random)[:verified]
        self._expected = _KEEP * self._expected + float(np.cumprod(rates).sum())
        self._accepted = _KEEP * self._accepted + accepted
        self.share = min(1.0, self._accepted / max(self._expected, _PRIOR))

    def wait(
        self, policy: StepPolicy, missing: Sequence[int], longest: int, each: float, unread: int
    ) -> tuple[int, float]:
        """Decide whether the target waits, as `PrecomputedDrafts.wait` returns it.

        Args:
            policy: Prices of the present step.
            missing: Indices of the requests without a precomputed draft.
            longest: Largest draft length, in target tokens.
        """
        acceptance, costs = policy.known.acceptance, policy.known.costs
        price, step = policy.tokens_per_second, costs.drafter(len(missing))
        begins = _STARTED * step + costs.catch_up(unread)
        share = 1.0 if self._passed >= _TRIED_EVERY else self.share
        alive = np.cumprod([acceptance.rates(policy.random[i]) for i in missing], axis=1).sum(0)
        rows, gain = policy.batch, 0.0
        best, most, seconds = 0.0, 0, 0.0
        for tokens in range(1, longest + 1):
            gain += share * float(alive[tokens - 1]) - len(missing) * policy.row_price(rows)
            rows += len(missing)
            steps = 1.0 if self._parallel else each * tokens
            net = gain - price * (begins + steps * step)
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
        steps = costs.target(policy.batch, policy.most) / step
        if self._parallel:
            forwards = 1 + (np.arange(1 + most) > 0)  # of chains, then of branches
            depths = longest * (steps >= forwards)
        else:
            # The first one is for the target's own token.
            depths = np.clip((steps - 1.0) / each, 0.0, longest)
        accepted = [0.0, *np.cumprod(acceptance.rates(policy.random[0])).cumsum()]
        tokens = np.interp(depths, np.arange(len(accepted)), accepted)
        return int((self.hits.chances(most) * tokens).argmax())
