# SPDX-License-Identifier: Apache-2.0
"""Short loads on engines of one target, one engine after the other: alone, then with drafters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_hetero_spec.advice.prediction import Prediction, foresee
from vllm_hetero_spec.measure.load import Engine, Load, MeasurementError, Sample
from vllm_hetero_spec.measure.vllm_engine import EngineSpec

Start = Callable[[EngineSpec], Engine]
# Told what is measured now, in a few words, once for each load.
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What every engine is to generate.

    Attributes:
        prompts: Texts, each completed once by a load.
        max_tokens: Longest completion, in target tokens.
        batch_sizes: Requests at the same time, rising; none above the number of prompts.
        temperatures: 0 is greedy; rising.
        repeats: How often each load runs.
        lookahead: Target tokens of every draft, of which the shorter ones are foreseen.
    """

    prompts: Sequence[str]
    max_tokens: int
    batch_sizes: Sequence[int]
    temperatures: Sequence[float]
    repeats: int
    lookahead: int

    def loads(self) -> Iterator[tuple[float, int, Load]]:
        """(temperature, batch size, first load) of every pair of them; seeds as of `bench`."""
        for temperature in self.temperatures:
            for size in self.batch_sizes:
                yield (
                    temperature,
                    size,
                    Load(self.prompts, self.max_tokens, size, temperature, seed=0),
                )

    def count(self, engines: int) -> int:
        """Loads of the target alone and of as many engines with drafters."""
        pairs = len(self.temperatures) * len(self.batch_sizes)
        return pairs * (self.repeats + engines * (self.repeats + 1))

    def repeated(self, load: Load) -> Iterator[Load]:
        """A load with seeds of its own for every repeat, those of `bench`."""
        for turn in range(self.repeats):
            yield replace(load, seed=turn * len(self.prompts))


Alone = Mapping[float, Mapping[int, Sequence[Sample]]]  # by temperature and batch size


def measure_alone(engine: Engine, plan: Plan, tell: Tell) -> Alone:
    """The target alone under every load.

    Raises:
        ConfigError: The engine refused a load.
        MeasurementError: It failed.
    """
    found: dict[float, dict[int, list[Sample]]] = {t: {} for t in plan.temperatures}
    for temperature, size, load in plan.loads():
        found[temperature][size] = list(_repeat(engine, plan, load, tell))
    return found


def measure_drafter(
    engine: Engine, plan: Plan, alone: Alone, method: str, tell: Tell
) -> dict[tuple[float, int], Prediction]:
    """What a drafter gives under every load, by temperature and batch size.

    Raises:
        ConfigError: The engine refused a load.
        MeasurementError: It failed, or nothing was drafted.
    """
    found = {}
    for temperature, size, load in plan.loads():
        tell(_words(load, "reading"))
        read = engine.run(replace(load, max_tokens=1))
        drafted = list(_repeat(engine, plan, load, tell))
        try:
            found[temperature, size] = foresee(
                alone[temperature],
                drafted,
                read,
                slots=size,
                lookahead=plan.lookahead,
                max_tokens=plan.max_tokens,
                one_more=temperature == 0 or method == "slem",
            )
        except ValueError as error:
            raise MeasurementError(f"{_words(load)}: {error}{_skipped(drafted)}") from error
    return found


def fixed_config(config: Mapping[str, Any], lookahead: int) -> dict[str, Any]:
    """A speculative configuration with which every draft is as long as it can be."""
    return {**config, "num_speculative_tokens": lookahead, "controller": "fixed"}


def _repeat(engine: Engine, plan: Plan, load: Load, tell: Tell) -> Iterator[Sample]:
    for each in plan.repeated(load):
        tell(_words(load))
        yield engine.run(each)


def _words(load: Load, *first: str) -> str:
    return ", ".join([*first, f"batch {load.batch_size}", f"temperature {load.temperature:g}"])


def _skipped(samples: Sequence[Sample]) -> str:
    reasons = {
        reason: None
        for sample in samples
        for reason, count in sample.worker["skipped"].items()
        if count
    }
    return f" (skipped: {', '.join(reasons)})" if reasons else ""
