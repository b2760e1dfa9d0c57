# SPDX-License-Identifier: Apache-2.0
"""Inside a round of drafting: which tokens are worth the time they take.

A drafter step, and a row of the target, are worth it if they bring more tokens than lambda times
their seconds. Both are asked before the token concerned is drawn, or of all that were proposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hetero_spec.lookahead.acceptance import StepsOfDraft
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.experience import Experience


@dataclass(frozen=True)
class Round:
    """The drafts of one step.

    Attributes:
        costs: Of steps.
        steps: Drafter steps that a draft takes.
        experience: Of past drafts.
        worth: Lambda, tokens per second.
        batch: Requests in the target's step.
        most: Rows of that step if all drafts were as long as planned.
        random: Which of them are random.
    """

    costs: CostModel
    steps: StepsOfDraft
    experience: Experience
    worth: float
    batch: int
    most: int
    random: Sequence[bool]

    def proceed(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Which requests draft on; see `Controller`."""
        survival = self.experience.follow(confidences, self.random)
        price = self._price(self.batch + sum(map(len, confidences)))
        hope = [
            self._next(alive, random) for alive, random in zip(survival, self.random, strict=True)
        ]
        hope = [h if h >= price else 0.0 for h in hope]
        active = sum(h > 0 for h in hope)
        step = self.costs.drafter(max(active, 1)) * self.steps.each
        enough = sum(hope) >= self.worth * step
        return [enough and h > 0 for h in hope]

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many proposed tokens to verify; see `Controller`.

        Depth by depth over the whole batch, the most promising requests first, so that no token's
        fate depends on what was drawn after it was.
        """
        survival = self.experience.follow(confidences, self.random)
        kept = [0] * len(survival)
        rows = self.batch
        alive = [i for i, request in enumerate(survival) if request]
        while alive:
            alive.sort(key=lambda i: -survival[i][kept[i]])
            going = []
            for i in alive:
                if survival[i][kept[i]] < self._price(rows):
                    break
                kept[i] += 1
                rows += 1
                if kept[i] < len(survival[i]):
                    going.append(i)
            alive = going
        return kept

    def _price(self, rows: int) -> float:
        """Tokens that one row more has to bring."""
        return self.worth * self.costs.row(rows, self.batch, self.most)

    def _next(self, survival: Sequence[float], random: bool) -> float:
        """P[a further token counts]: 0 for a request without a draft or at its longest."""
        rates = self.experience.rates(random)
        if not 0 < len(survival) < len(rates):
            return 0.0
        return survival[-1] * rates[len(survival)]
