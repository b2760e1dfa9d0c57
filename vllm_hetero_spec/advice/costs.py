# SPDX-License-Identifier: Apache-2.0
"""What the steps of a measured load took, and what they would have taken with shorter drafts.

The target's step is known alone and with the longest drafts; between the two it is a straight line
in the rows it verifies. A round of drafting is its drafter steps and what it takes beside them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from vllm_hetero_spec.advice.rounds import Round, rounds_of
from vllm_hetero_spec.measure.load import Sample


@dataclass(frozen=True)
class StepCosts:
    """Of one drafter at one batch size, in seconds.

    Attributes:
        plain: Requests -> a step of the target alone.
        verifying: Requests -> a step of the target that verifies `lookahead` tokens of each.
        lookahead: Tokens of the drafts that were measured.
        drafter_step: One forward of the drafter for the batch.
        drafter_steps: How many a round of drafting that far takes.
        beside: What such a round takes beside them.
        one_more: One of the drafter's steps is there whatever the lookahead.
    """

    plain: Mapping[int, float]
    verifying: Mapping[int, float]
    lookahead: int
    drafter_step: float
    drafter_steps: float
    beside: float
    one_more: bool = True

    def target(self, requests: int, lookahead: int) -> float:
        """A step of the target in which so many requests go on."""
        if not requests:
            return 0.0
        if not lookahead:
            return _between(self.plain, requests)
        longest = _between(self.verifying, requests)
        plain = min(_between(self.plain, requests), longest)
        return plain + (longest - plain) * lookahead / self.lookahead

    def steps(self, lookahead: int) -> float:
        """Drafter steps of a round."""
        fixed = min(1.0, self.drafter_steps) if self.one_more else 0.0
        return fixed + (self.drafter_steps - fixed) * lookahead / self.lookahead

    def drafting(self, lookahead: int) -> float:
        """A round of drafting."""
        return self.beside + self.steps(lookahead) * self.drafter_step

    def round(self, requests: int, lookahead: int) -> float:
        """A whole step: the target's and the drafts for the next."""
        return self.target(requests, lookahead) + self.drafting(lookahead)


def costs_of(
    alone: Mapping[int, Sequence[Sample]],
    drafted: Sequence[Sample],
    read: Sample,
    *,
    lookahead: int,
    one_more: bool,
) -> StepCosts:
    """The costs behind measured loads.

    Args:
        alone: Batch size -> the target alone, repeated.
        drafted: With drafts of `lookahead` tokens at one batch size, repeated.
        read: The same prompts for one token each: what reading them takes.
        lookahead: Of the drafts.
        one_more: One of the drafter's steps is there whatever the lookahead.

    Raises:
        ValueError: No completion went on behind its first token, or nothing was drafted.
    """
    rounds = list(chain.from_iterable(map(rounds_of, drafted)))
    plain = _means(chain.from_iterable(map(rounds_of, chain(*alone.values()))))
    longest = _means(rounds)
    drafts = sum(sample.drafts for sample in drafted)
    if not (plain and longest and drafts):
        raise ValueError("completions of one token alone, or nothing drafted")
    steps = sum(sample.worker["drafter_tokens"] for sample in drafted) / drafts
    # All proposing but the drafter's reading of the prompts, a round's share of it.
    proposing = _grown(drafted, read, "propose_seconds") / len(rounds)
    forwards = min(proposing, _grown(drafted, read, "forward_seconds") / len(rounds))
    return StepCosts(
        plain=plain,
        verifying={n: max(0.0, seconds - proposing) for n, seconds in longest.items()},
        lookahead=lookahead,
        drafter_step=forwards / steps,
        drafter_steps=steps,
        beside=proposing - forwards,
        one_more=one_more,
    )


def prompts_seconds(sample: Sample, step: Callable[[int], float]) -> float:
    """What a load took for reading its prompts.

    Args:
        sample: The load.
        step: Seconds of a step in which so many requests go on and none is read, which may be 0.
    """
    return sum(max(0.0, r.seconds - step(r.decoding)) for r in rounds_of(sample) if r.reading)


def _means(rounds: Iterable[Round]) -> dict[int, float]:
    """Requests that go on -> seconds of a step, of steps that read no prompts."""
    found = defaultdict[int, list[float]](list)
    for each in rounds:
        if not each.reading:
            found[each.decoding].append(each.seconds)
    return {count: sum(seconds) / len(seconds) for count, seconds in sorted(found.items())}


def _between(points: Mapping[int, float], at: float) -> float:
    """On the straight line between the nearest points, in order; beyond them the last one."""
    return float(np.interp(at, list(points), list(points.values())))


def _grown(drafted: Sequence[Sample], read: Sample, counter: str) -> float:
    """Of a counter, beyond what reading the prompts takes."""
    total = sum(sample.worker[counter] for sample in drafted)
    return max(0.0, float(total - len(drafted) * read.worker[counter]))
