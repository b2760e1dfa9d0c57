# SPDX-License-Identifier: Apache-2.0
"""Engines with known speeds and counters, so that every figure can be checked by hand."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_hetero_spec.bench.load import Load, Sample, Trace
from vllm_hetero_spec.bench.plan import EngineId, Measurement, make_plan
from vllm_hetero_spec.bench.results import Contents, Results
from vllm_hetero_spec.bench.run import run_plan
from vllm_hetero_spec.bench.suite import Suite, SuiteDrafter, Target

# A valid suite file.
GOOD = """\
targets:
  - model: org/big
    drafters: [org/small]
datasets:
  code: {builtin: mixed, count: 2}
"""
PROMPTS = ("one", "two")
SUITE = Suite(
    name="fake",
    targets=(
        Target(
            name="big",
            model="org/big",
            drafters=(SuiteDrafter("small", "org/small"),),
            datasets=("code",),
        ),
    ),
    methods=("slem",),
    prompts={"big": {"code": PROMPTS}},
    max_tokens=8,
)
HEADER: dict[str, Any] = {
    "started": "2025-01-01 00:00:00 +0000",
    "digest": SUITE.digest,
    "suite": SUITE.described(),
    "engines_at_once": 8,
    "gpu": False,
    "widened": {},
    "provenance": {
        "versions": {"vllm": "0.32.0", "torch": None},
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "gpus": []},
        "source": {},
    },
}


def suite(**changes: Any) -> Suite:
    """Return SUITE with changes."""
    return dataclasses.replace(SUITE, **changes)


def trace(token_ids: list[int], seconds: float = 1.0) -> Trace:
    """Return a request sent at 0 whose tokens arrive one by one, evenly until `seconds`."""
    count = len(token_ids)
    times = [seconds * (i + 1) / count for i in range(count)]
    return Trace(token_ids, "text", 0.0, times, [1] * count)


def sample(token_ids: list[list[int]], seconds: float, **counters: Any) -> Sample:
    """Return a run of `seconds`, with one request for each list of token ids."""
    return Sample([trace(ids, seconds) for ids in token_ids], seconds, **counters)


@dataclass
class Fakes:
    """Starts engines that answer from tables by method, and records the events."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each run; the last repeats
    outputs: dict[str, list[int]] = field(default_factory=dict)  # token ids for every prompt
    refuse: dict[str, BaseException] = field(default_factory=dict)  # raised by the start
    fail: dict[tuple[str, int], BaseException] = field(default_factory=dict)  # by number of the run
    log: list[tuple[str, str]] = field(default_factory=list)  # "start", "run" or "close"; method
    loads: list[Load] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)
    runners: dict[str, str] = field(default_factory=dict)  # "V2" by default for vLLM's engines
    failures: list[tuple[str, str]] = field(default_factory=list)  # cell and sentence of a run

    def start(self, engine: EngineId, **_: Any) -> "FakeEngine":
        self.log.append(("start", engine.method))
        if error := self.refuse.get(engine.method):
            raise error
        return FakeEngine(engine, self)

    def order(self, event: str = "run") -> list[str]:
        """Return the methods of all events of one kind."""
        return [method for kind, method in self.log if kind == event]

    @property
    def up(self) -> list[str]:
        """Engines that have been started, not refused, and not closed."""
        started = [m for m in self.order("start") if m not in self.refuse]
        for method in self.order("close"):
            started.remove(method)
        return started


@dataclass
class FakeEngine:
    """An engine of `Fakes`."""

    engine: EngineId
    fakes: Fakes

    def run(self, load: Load) -> Sample:
        method = self.engine.method
        number = self.fakes.runs.get(method, 0)
        self.fakes.runs[method] = number + 1
        if error := self.fakes.fail.get((method, number)):
            raise error
        self.fakes.log.append(("run", method))
        self.fakes.loads.append(load)
        seconds = self.fakes.seconds.get(method, [1.0])
        ids = self.fakes.outputs.get(method, [1, 2, 3, 4])
        drafted: dict[str, Any] = {}
        if self.engine.drafter is not None:
            drafted = {
                "drafts": 4,
                "draft_tokens": 10,
                "accepted_tokens": 6,
                "accepted_per_position": [3, 2, 1],
                "worker": {
                    "drafter_tokens": 12,
                    "translate_seconds": 0.25,
                    "forward_seconds": 0.5,
                    "propose_seconds": 1.0,
                    "verify_seconds": 0.125,
                    "skipped": {"no_blocks": 2, "no_text": 0},
                },
            }
        return sample(
            [ids] * len(load.prompts),
            seconds[min(number, len(seconds) - 1)],
            peak_memory_bytes=3 << 20,
            runner=self.fakes.runners.get(method, "" if method.startswith("hf_") else "V2"),
            **drafted,
        )

    def close(self) -> None:
        self.fakes.log.append(("close", self.engine.method))


@dataclass
class Silent:
    """A reporter that prints nothing and records failures."""

    fakes: Fakes

    def begin(self, runs: Collection[Measurement]) -> None: ...

    def starting(self, engine: EngineId) -> None: ...

    def started(self, engine: EngineId, seconds: float) -> None: ...

    def measured(self, run: Measurement, sample: Sample, seconds: float) -> None: ...

    def failed(self, run: Measurement, sentence: str) -> None:
        self.fakes.failures.append((str(run.cell), sentence))


def measured(folder: Path, fakes: Fakes, asked: Suite = SUITE, at_once: int = 8) -> Contents:
    """Run a suite on fakes in the same way as the command, and return its results."""
    results = Results(folder, HEADER | {"digest": asked.digest, "suite": asked.described()})
    try:
        plan = make_plan(asked, at_once, lambda target, drafter: "they differ")
        run_plan(plan, asked, results, fakes.start, Silent(fakes))
    finally:
        results.close()
    return results.contents
