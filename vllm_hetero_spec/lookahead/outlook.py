# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of every lookahead, foreseen: recent drafts replayed at present costs.

A round with lookahead k takes the drafter's steps and the target's, and gives one token for each
request plus those accepted: rate(k) = tokens(k) / seconds(k). Lookahead 0 is the target alone. The
tokens that would be left unverified, and the rounds that would be ended early, are so in the replay
too, at the same price: what a second is worth in tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import StepsOfDraft
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.experience import Experience

# Deeper lookaheads are not looked at once the rate has fallen this far below the best, or a depth
# brings no more than this share of the tokens.
_HOPELESS, _NEGLIGIBLE = 0.9, 0.002
# A hopeful view is off by so many standard deviations, but no more than this share.
_HOPE, _MOST_HOPE = 1.5, 0.15


@dataclass(frozen=True)
class Outlook:
    """Rates in tokens per second over the whole batch.

    Attributes:
        alone: Of the target alone.
        rates: Of lookahead 1, 2, ...; never empty.
        hopeful: As `rates`, if steps cost less than thought where little is known.
        doubts: How uncertain the costs of each lookahead are, as a share.
    """

    alone: float
    rates: tuple[float, ...]
    hopeful: tuple[float, ...]
    doubts: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The highest rate over that of the target alone."""
        return max(self.rates) / self.alone


@dataclass(frozen=True)
class Replay:
    """What is known of drafts and costs.

    Attributes:
        costs: Of steps.
        steps: Drafter steps that a draft takes.
        drafts: Past ones.
        stops: Rounds of drafting can be ended early.
        random: Which of the requests to be drafted for are random, in turn.
    """

    costs: CostModel
    steps: StepsOfDraft
    drafts: Experience
    stops: bool
    random: Sequence[bool]

    def outlook(self, batch: int, limits: Sequence[int], worth: float) -> Outlook:
        """Rates of all lookaheads.

        Args:
            batch: Requests in the target's step.
            limits: Longest draft of each request that may have one; at least one above 0.
            worth: Lambda, tokens per second.
        """
        alone = batch / self.costs.target(batch, batch)
        asked = np.bincount(limits)[::-1].cumsum()[::-1].tolist()  # how many reach each depth
        drafting = asked[1]
        round_worth = worth * self.costs.drafter(drafting) * self.steps.each
        survival = self.drafts.survival(self.random)
        conditional = self.drafts.conditional(self.random)
        reach = np.ones(len(survival), bool)  # drafts that are still verified
        going = np.ones(len(survival), bool)  # drafts that are still drafted
        count = len(_groups(going, drafting))
        tokens, rows, deep = float(batch), float(batch), 0.0
        rates: list[float] = []
        hopeful: list[float] = []
        doubts: list[float] = []
        drafter_doubt = self.costs.drafter_doubt(drafting)
        for depth in range(len(asked) - 1):
            price = worth * self.costs.row(rows, batch, batch + drafting * (depth + 1))
            if self.stops and depth:
                hope = survival[:, depth - 1] * conditional[:, depth]
                going &= _worthwhile(hope * going, drafting, round_worth, price)
            here = survival[:, depth]
            reach &= going & (here >= price)
            deep += (
                int(np.count_nonzero(_groups(going, drafting).any(1))) / count
                if self.stops
                else 1.0
            )
            more = asked[depth + 1] / len(reach)
            tokens += more * float(here @ reach)
            rows += more * int(np.count_nonzero(reach))
            seconds = self.costs.drafting(drafting, self.steps.expected(deep))
            verifying, doubt = self.costs.target(batch, rows), self.costs.verify_doubt(rows)
            rates.append(tokens / (seconds + verifying))
            hoped = seconds * math.exp(-min(_HOPE * drafter_doubt, _MOST_HOPE))
            hoped += verifying * math.exp(-min(_HOPE * doubt, _MOST_HOPE))
            hopeful.append(tokens / hoped)
            doubts.append(max(doubt, drafter_doubt))
            if (
                hopeful[-1] < _HOPELESS * max(rates)
                or more * float(here @ reach) < _NEGLIGIBLE * tokens
            ):
                break
        return Outlook(alone, tuple(rates), tuple(hopeful), tuple(doubts))


def _worthwhile(hope: np.ndarray, drafting: int, round_worth: float, price: float) -> np.ndarray:
    """Of drafts in groups as large as the batch, those that one more step is worth it for."""
    groups = _groups(hope, drafting)
    enough = groups.sum(1) * (drafting / groups.shape[1]) >= round_worth
    worthwhile = np.repeat(enough, groups.shape[1])
    return np.resize(worthwhile, len(hope)) & (hope >= price)


def _groups(values: np.ndarray, size: int) -> np.ndarray:
    """[n] as groups [m, size] of as many as there are; the rest is left out."""
    size = min(size, len(values))
    count = len(values) // size
    return values[: count * size].reshape(count, size)
