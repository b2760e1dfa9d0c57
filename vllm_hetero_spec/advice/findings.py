# SPDX-License-Identifier: Apache-2.0
"""All that is found out about drafters of a target, their order, and the one to take.

A drafter serves requests of all kinds with one configuration, and the default controller leaves the
target alone where drafting does not pay: what a configuration is worth at a batch size is the
geometric mean over temperatures of its speedups, those below 1 counted as 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_hetero_spec.advice.measuring import Plan
from vllm_hetero_spec.advice.memory import Memory
from vllm_hetero_spec.advice.pairs import PairView
from vllm_hetero_spec.advice.prediction import Prediction

Predictions = Mapping[tuple[float, int], Prediction]  # by temperature and batch size


@dataclass
class Candidate:
    """A drafter with a method.

    Attributes:
        method: Its name.
        why: Why it was measured, in a clause.
        predictions: Of every load, empty until it is measured.
        failure: Why there are none.
    """

    method: str
    why: str
    predictions: Predictions = field(default_factory=dict)
    failure: str = ""


@dataclass
class DrafterFindings:
    """One drafter.

    Attributes:
        name: As the user wrote it.
        model: As engines are told.
        view: What the tokenizers say; None where they cannot be bridged.
        memory: What it takes; None as above.
        stopped: Why it was not looked at further, in a sentence; "" where it was.
        candidates: Its methods that were measured.
    """

    name: str
    model: str
    view: PairView | None = None
    memory: Memory | None = None
    stopped: str = ""
    candidates: list[Candidate] = field(default_factory=list)

    def best_method(self, temperatures: Sequence[float]) -> Candidate:
        """The method to measure, by what the tokenizers say.

        At temperature 0 every method drafts as SLEM, so that one engine serves both.
        """
        assert self.view is not None
        warm = [t for t in temperatures if t > 0]
        if not warm:
            return Candidate("slem", "temperature 0: every method drafts so")
        first = self.view.methods(max(warm))[0]
        return Candidate(first.method, first.reason)


@dataclass(frozen=True)
class Place:
    """Where a candidate stands in the ranking.

    Attributes:
        drafter: Whose it is.
        candidate: It.
        batch_size: At which its lookahead was chosen.
        lookahead: Worth most there.
    """

    drafter: DrafterFindings
    candidate: Candidate
    batch_size: int
    lookahead: int

    @property
    def pays(self) -> bool:
        """Whether it is faster than the target alone under any load."""
        return any(each.best.speedup > 1 for each in self.candidate.predictions.values())


@dataclass
class Advice:
    """Everything.

    Attributes:
        target: As the user wrote it.
        widened: Zero and all MLP columns of a target made slower on purpose.
        plan: What was measured.
        drafters: In the order they were given.
        further: Further keys of the speculative configuration.
    """

    target: str
    widened: tuple[int, int] | None
    plan: Plan
    drafters: list[DrafterFindings]
    further: Mapping[str, Any] = field(default_factory=dict)

    def ranking(self) -> list[Place]:
        """All that was measured, the best first.

        A lookahead is chosen at the smallest batch size where any pays: at larger ones the
        controller drafts less far.
        """
        ranked = [
            (self._worth(candidate.predictions), Place(drafter, candidate, *where))
            for drafter in self.drafters
            for candidate in drafter.candidates
            if candidate.predictions
            for where in [self._choose(candidate.predictions)]
        ]
        ranked.sort(key=lambda pair: pair[0], reverse=True)
        return [place for _, place in ranked]

    def recommended(self) -> dict[str, Any] | None:
        """The speculative configuration to take; None where the target alone is fastest."""
        place = next(iter(self.ranking()), None)
        if place is None or not place.pays:
            return None
        return {
            "method": place.candidate.method,
            "model": place.drafter.model,
            "num_speculative_tokens": place.lookahead,
            **self.further,
        }

    @property
    def failures(self) -> list[str]:
        """Of engines, each with the drafter's name."""
        return [
            f"{drafter.name} ({candidate.method}): {candidate.failure}"
            for drafter in self.drafters
            for candidate in drafter.candidates
            if candidate.failure
        ]

    def _choose(self, predictions: Predictions) -> tuple[int, int]:
        """(batch size, lookahead)."""
        for size in self.plan.batch_sizes:
            worths = self._worths(predictions, size)
            if max(worths) > 1:
                return size, 1 + worths.index(max(worths))
        size = self.plan.batch_sizes[0]
        losses = self._worths(predictions, size, least=0.0)
        return size, 1 + losses.index(max(losses))

    def _worth(self, predictions: Predictions) -> list[float]:
        """What a candidate is worth at its best, by batch size; then without the controller."""
        sizes = self.plan.batch_sizes
        return [max(self._worths(predictions, size)) for size in sizes] + [
            max(self._worths(predictions, size, least=0.0)) for size in sizes
        ]

    def _worths(self, predictions: Predictions, size: int, least: float = 1.0) -> list[float]:
        """Of lookahead 1, 2, ... at a batch size."""
        columns = zip(
            *(
                [max(least, foreseen.speedup) for foreseen in predictions[t, size].foreseen]
                for t in self.plan.temperatures
            ),
            strict=True,
        )
        return [math.prod(column) ** (1 / len(column)) for column in columns]
