# SPDX-License-Identifier: Apache-2.0
"""The speed of every lookahead, foreseen from one that was measured.

What was measured is replayed with shorter drafts: the same texts, in which the drafter is right in
the same places, at the cost of shorter steps. The replay only says how a lookahead differs from the
measured one, whose own steps are taken as they are. A speedup is what `vllm-hetero-spec bench`
reports: tokens per second of the whole load, prompts included, over those of the target alone. The
target reads prompts alike with a drafter and without: what that takes is one figure, of all runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_hetero_spec.advice.costs import StepCosts, costs_of, prompts_seconds
from vllm_hetero_spec.advice.rounds import Story, acceptance_of, story_of
from vllm_hetero_spec.measure.load import Sample

_RESAMPLES = 200
_INTERVAL = (5, 95)  # percent
_DRAWS = 20  # of what is not known of a text, for the figure itself


@dataclass(frozen=True)
class Foreseen:
    """One lookahead.

    Attributes:
        lookahead: Target tokens of a draft, at most.
        speedup: Tokens per second over those of the target alone, for the whole load.
        low, high: Where it lies in 90 % of resampled requests and repeats.
        decode_speedup: The same of full steps behind the prompts alone.
        tokens_per_round: Of a request: what was accepted and one more.
    """

    lookahead: int
    speedup: float
    low: float
    high: float
    decode_speedup: float
    tokens_per_round: float


@dataclass(frozen=True)
class Prediction:
    """A drafter under one load.

    Attributes:
        costs: Of its steps.
        acceptance: By position, (times tested, times accepted).
        foreseen: Of lookahead 1, 2, ... up to the one that was measured.
        measured_speedup: Of that one, by the clock.
        alone_tokens_per_second: Of the target alone, by the clock.
        reading: Seconds for which the target reads all prompts.
    """

    costs: StepCosts
    acceptance: Sequence[tuple[int, int]]
    foreseen: Sequence[Foreseen]
    measured_speedup: float
    alone_tokens_per_second: float
    reading: float

    @property
    def best(self) -> Foreseen:
        """The fastest lookahead."""
        return max(self.foreseen, key=lambda each: each.speedup)


def schedule(rounds: Sequence[int], slots: int) -> Counter[int]:
    """How many steps a load takes, by the requests that go on in them.

    Args:
        rounds: Of each request in order, steps behind the one that reads its prompt.
        slots: Requests at the same time; the next one starts when one ends.

    Returns:
        Number of requests that go on -> steps; 0 are steps that only read prompts.
    """
    found = Counter[int]()
    waiting = list(reversed(rounds))
    active: list[int] = []
    while waiting or active:
        new = [waiting.pop() for _ in range(min(slots - len(active), len(waiting)))]
        found[len(active)] += 1
        active = [left - 1 for left in active if left > 1] + [left for left in new if left]
    return found


def foresee(
    alone: Mapping[int, Sequence[Sample]],
    drafted: Sequence[Sample],
    read: Sample,
    *,
    slots: int,
    lookahead: int,
    max_tokens: int,
    one_more: bool,
) -> Prediction:
    """What every lookahead up to the measured one would give.

    Args:
        alone: Batch size -> the target alone under the same load, repeated.
        drafted: With drafts of `lookahead` tokens at batch size `slots`, repeated.
        read: The same prompts for one token each: what reading them takes.
        slots: Batch size, one of those of `alone`.
        lookahead: The measured one.
        max_tokens: Longest completion.
        one_more: Drafts take one drafter step more than their tokens need, as greedy ones do.
    """
    costs = costs_of(alone, drafted, read, lookahead=lookahead, one_more=one_more)
    plain, plain_readings = _without_prompts(alone[slots], lambda n: costs.target(n, 0))
    taken, readings = _without_prompts(drafted, lambda n: costs.round(n, lookahead))
    catching_up = read.worker["propose_seconds"]  # the drafter's own reading
    _, only_readings = _without_prompts([read], lambda n: 0.0)
    readings = np.concatenate([readings, only_readings]) - catching_up
    readings = np.concatenate([plain_readings, readings]).clip(0.0)
    runs = [
        [story_of(trace, lookahead, max_tokens) for trace in sample.traces if trace.counts]
        for sample in drafted
    ]
    stories = [story for run in runs for story in run]
    acceptance = acceptance_of(stories, lookahead)
    random = np.random.default_rng(0)
    rounds = _rounds(stories, lookahead, _deepest_rate(acceptance), random)
    replay = _Replay(costs, slots, lookahead)
    # What each repeat takes in the replay, as a mean over what is not known of its texts.
    ends = np.cumsum([len(run) for run in runs])[:-1]
    replayed = np.array(
        [
            np.mean([replay.seconds(part[:, draw]) for draw in range(_DRAWS)], axis=0)
            for part in np.split(rounds, ends)
        ]
    )
    off = taken / replayed[:, -1]
    ours = np.array([story.tokens for story in stories])
    theirs = np.array([sample.tokens for sample in alone[slots]])
    reading = float(np.median(readings))
    base = theirs.sum() / (plain + reading).sum()
    speedups = ours.sum() / (replayed * off[:, None] + reading + catching_up).sum(axis=0) / base
    resampled = []
    for _ in range(_RESAMPLES):
        again = np.median(_again(readings, random))
        others = random.integers(len(theirs), size=len(theirs))
        base = theirs[others].sum() / (plain[others] + again).sum()
        chosen = random.integers(len(stories), size=len(runs[0]))
        draws = random.integers(_DRAWS, size=len(chosen))
        seconds = replay.seconds(rounds[chosen, draws]) * _again(off, random).mean()
        resampled.append(ours[chosen].sum() / (seconds + again + catching_up) / base)
    low, high = np.percentile(resampled, _INTERVAL, axis=0)
    lengths = sum(len(story.places) for story in stories) / rounds.mean(axis=1).sum(axis=0)
    return Prediction(
        costs,
        acceptance,
        [
            Foreseen(
                lookahead=k,
                speedup=float(speedups[k - 1]),
                low=float(min(low[k - 1], speedups[k - 1])),
                high=float(max(high[k - 1], speedups[k - 1])),
                decode_speedup=float(
                    costs.target(slots, 0) * lengths[k - 1] / costs.round(slots, k)
                ),
                tokens_per_round=float(lengths[k - 1]),
            )
            for k in range(1, lookahead + 1)
        ],
        measured_speedup=_rate(drafted) / _rate(alone[slots]),
        alone_tokens_per_second=_rate(alone[slots]),
        reading=reading,
    )


class _Replay:
    """A load at the costs of every lookahead, the reading of its prompts left out."""

    def __init__(self, costs: StepCosts, slots: int, lookahead: int) -> None:
        self._slots = slots
        self._round = [
            [costs.round(n, k) for n in range(slots + 1)] for k in range(1, lookahead + 1)
        ]

    def seconds(self, rounds: np.ndarray) -> np.ndarray:
        """float64 [K]; `rounds` int64 [requests, K] as of `Story.rounds`."""
        return np.array(
            [
                sum(
                    steps * costs[requests]
                    for requests, steps in schedule(column.tolist(), self._slots).items()
                )
                for column, costs in zip(rounds.T, self._round, strict=True)
            ]
        )


def _rounds(
    stories: Sequence[Story], lookahead: int, rate: float, random: np.random.Generator
) -> np.ndarray:
    """int64 [stories, draws, K]: steps of each with every lookahead.

    Args:
        stories: Completions.
        lookahead: K.
        rate: How likely the drafter is right in a place of which nothing is known.
        random: Draws those.
    """
    return np.array(
        [
            [
                [drawn.rounds(k) for k in range(1, lookahead + 1)]
                for drawn in _drawn(story, rate, random)
            ]
            for story in stories
        ]
    )


def _drawn(story: Story, rate: float, random: np.random.Generator) -> Iterator[Story]:
    """The story with nothing unknown, drawn over and over where it was."""
    for _ in range(_DRAWS):
        places = [
            bool(random.random() < rate) if place is None else place for place in story.places
        ]
        yield replace(story, places=tuple(places))


def _deepest_rate(acceptance: Sequence[tuple[int, int]]) -> float:
    """How likely a place is right behind as many right ones as a draft has tokens."""
    tested, accepted = next((each for each in reversed(acceptance) if each[0]), (0, 0))
    return (accepted + 1) / (tested + 2)


def _without_prompts(
    samples: Sequence[Sample], step: Callable[[int], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each load without the reading of its prompts, and those of that reading."""
    readings = np.array([prompts_seconds(sample, step) for sample in samples])
    return np.array([sample.seconds for sample in samples]) - readings, readings


def _rate(samples: Sequence[Sample]) -> float:
    """Tokens per second of all together."""
    return sum(s.tokens for s in samples) / sum(s.seconds for s in samples)


def _again(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As many values, drawn from these."""
    return values[random.integers(len(values), size=len(values))]
