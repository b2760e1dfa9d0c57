# SPDX-License-Identifier: Apache-2.0
"""Engines with a given speed in each round, so that figures can be checked by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm_hetero_spec.bench.engines import vllm_config
from vllm_hetero_spec.bench.load import Load, Sample, Trace
from vllm_hetero_spec.bench.plan import EngineId
from vllm_hetero_spec.bench.suite import Suite, SuiteDrafter
from vllm_hetero_spec.options import parse

# CONFIG of a small model; WORKER are the counters of a drafter.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "vocab_size": 300,
}
WORKER = {
    "drafter_tokens": 12,
    "propose_seconds": 0.4,
    "forward_seconds": 0.3,
    "translate_seconds": 0.05,
    "verify_seconds": 0.02,
    "skipped": {"no_blocks": 7, "drafter_error": 0},
}
PROMPTS = ("one", "two", "three", "four")
ALONE = None


@dataclass(frozen=True)
class World:
    """Behavior of an engine."""

    speeds: Sequence[float] = (12.0,)  # tokens per second in each round; the sequence repeats
    at_batch: dict[int, float] = field(default_factory=dict)  # factors on the speed; 1 by default
    accepted: int | None = 2  # tokens of each draft of 3 tokens; None if nothing is drafted
    refuse: BaseException | None = None  # raised at the start
    fail_at: tuple[int, BaseException] | None = None  # batch size at which a load raises this


@dataclass
class Fakes:
    """Starts fake engines, by the drafter's name; `ALONE` is the target alone."""

    worlds: dict[str | None, World] = field(default_factory=lambda: {ALONE: World((10.0,))})
    runs: list[tuple[str | None, Load]] = field(default_factory=list)
    configs: list[dict[str, Any] | None] = field(default_factory=list)  # of all started engines
    suites: list[Suite] = field(default_factory=list)  # of all started engines
    up: list[str | None] = field(default_factory=list)  # running engines
    most_up: int = 0  # largest length of `up` so far

    def start(self, engine: EngineId, suite: Suite, at_once: int, *, verbose: bool) -> "FakeEngine":
        (target,) = suite.targets
        drafters: dict[str | None, SuiteDrafter] = {each.name: each for each in target.drafters}
        config = vllm_config(engine, drafters.get(engine.drafter))
        if config is not None:
            parse(config)
        world = self.worlds.get(engine.drafter, World())
        if world.refuse is not None:
            raise world.refuse
        self.configs.append(config)
        self.suites.append(suite)
        self.up.append(engine.drafter)
        self.most_up = max(self.most_up, len(self.up))
        return FakeEngine(engine.drafter, world, self)


@dataclass
class Answers:
    """Starts engines that return one fixed sample without and one with a drafter."""

    alone: Sample
    speculative: Sample
    started: list[str] = field(default_factory=list)

    def start(self, engine: EngineId, **_: object) -> SimpleNamespace:
        self.started.append(engine.method)
        found = self.alone if engine.drafter is None else self.speculative
        return SimpleNamespace(run=lambda load: found, close=lambda: None)


@dataclass
class FakeEngine:
    """An engine of `Fakes`."""

    drafter: str | None
    world: World
    fakes: Fakes

    def run(self, load: Load) -> Sample:
        assert self.drafter in self.fakes.up
        world = self.world
        if world.fail_at is not None and load.batch_size == world.fail_at[0]:
            raise world.fail_at[1]
        self.fakes.runs.append((self.drafter, load))
        assert load.seed is not None
        turn = load.seed // len(load.prompts)
        speed = world.speeds[turn % len(world.speeds)] * world.at_batch.get(load.batch_size, 1.0)
        seconds = load.max_tokens * len(load.prompts) / speed
        ids = list(range(load.max_tokens))
        step = 1 + (world.accepted or 0)
        later = load.max_tokens - 1
        counts = [1, *[step] * (later // step), *[1] * (later % step)]
        times = [seconds * (index + 1) / len(counts) for index in range(len(counts))]
        traces = [Trace(ids, "", 0.0, times, counts) for _ in load.prompts]
        if self.drafter is None:
            return Sample(traces, seconds)
        if world.accepted is None:
            return Sample(traces, seconds, worker={"skipped": {"untranslatable": 3, "no_text": 0}})
        drafts = later // step * len(load.prompts)
        return Sample(traces, seconds, drafts, 3 * drafts, world.accepted * drafts)

    def close(self) -> None:
        self.fakes.up.remove(self.drafter)
