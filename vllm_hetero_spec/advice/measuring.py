# SPDX-License-Identifier: Apache-2.0
"""Measures drafters beside the target alone, in the interleaved rounds of `bench`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm_hetero_spec.bench.engines import on_gpu, vllm_config
from vllm_hetero_spec.bench.figures import Row, Spread, rows_of
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.plan import Cell, EngineId, make_plan
from vllm_hetero_spec.bench.progress import Reporter
from vllm_hetero_spec.bench.report import notes, widened_targets
from vllm_hetero_spec.bench.results import Contents, Results
from vllm_hetero_spec.bench.run import Start, run_plan
from vllm_hetero_spec.bench.suite import ALONE, Suite

DATASET = "prompts"  # the only one of a suite


@dataclass(frozen=True)
class Candidate:
    """A drafter with a method, as it was measured.

    Attributes:
        engine: It, in `bench`'s words.
        config: Its `--speculative-config`.
        rows: One for each load, in order; fewer where a load failed.
        failure: Why some are missing, in a sentence; "" where none is.
    """

    engine: EngineId
    config: dict[str, Any]
    rows: Sequence[Row]
    failure: str = ""

    @property
    def speedup(self) -> Spread | None:
        """The geometric mean over all loads; None where one of them failed.

        Its low and high are those of the loads' lows and highs, so that no round lies outside.
        """
        spreads = [row.speedup for row in self.rows if row.speedup is not None]
        if self.failure or not spreads:
            return None

        def mean(values: Iterable[float]) -> float:
            return prod(values) ** (1 / len(spreads))

        return Spread(
            mean(spread.median for spread in spreads),
            mean(spread.low for spread in spreads),
            mean(spread.high for spread in spreads),
            mean(spread.quartile1 for spread in spreads),
            mean(spread.quartile3 for spread in spreads),
            rounds=min(spread.rounds for spread in spreads),
        )

    @property
    def faster_loads(self) -> list[str]:
        """The loads under which it is faster than the target alone in all rounds."""
        return [
            f"batch {row.cell.batch_size}, temperature {row.cell.temperature:g}"
            for row in self.rows
            if row.speedup is not None and row.speedup.low > 1
        ]

    @property
    def faster(self) -> bool:
        """Whether it is faster than the target alone in all rounds."""
        return self.speedup is not None and self.speedup.low > 1

    @property
    def slower(self) -> bool:
        """Whether it is slower than the target alone in all rounds."""
        return self.speedup is not None and self.speedup.high < 1


@dataclass(frozen=True)
class Measured:
    """All that was measured.

    Attributes:
        rows: Of every load the target alone, then the candidates.
        candidates: Most speedup first, those that failed last.
        notes: What a reader of the figures must know of how they came about.
    """

    rows: Sequence[Row]
    candidates: Sequence[Candidate]
    notes: Sequence[str] = ()

    @property
    def ranking(self) -> list[Candidate]:
        """Candidates that no load failed for, the fastest first."""
        return [candidate for candidate in self.candidates if not candidate.failure]

    @property
    def failures(self) -> list[str]:
        """Of engines, each with the drafter's name."""
        failed = (each for each in self.candidates if each.failure)
        return [f"{engine_name(each.engine)}: {each.failure}" for each in failed]

    @property
    def recommended(self) -> Candidate | None:
        """The fastest one; None where none is faster than the target alone."""
        return next((candidate for candidate in self.ranking if candidate.faster), None)

    def verdict(self, candidate: Candidate) -> str:
        """What the rounds say of a candidate, in a clause."""
        best, speedup = self.recommended, candidate.speedup
        if speedup is None:
            return "failed"
        if candidate is best:
            return "recommended"
        if candidate.slower:
            return "slower than the target alone"
        if not candidate.faster:
            return "not told apart from the target alone"
        if best is not None and best.speedup is not None and speedup.high >= best.speedup.low:
            return "faster, not told apart from the recommended one"
        return "faster than the target alone"


def engine_name(engine: EngineId) -> str:
    """What tables call an engine."""
    return f"{engine.drafter} ({engine.method})" if engine.drafter else "target alone"


def measure(suite: Suite, at_once: int, start: Start, reporter: Reporter) -> Measured:
    """Run a suite of one target; a drafter that fails is noted, and the others go on.

    Args:
        suite: Its target, drafters, methods and loads.
        at_once: Engines that may be up together.
        start: Starts an engine.
        reporter: Is told how it gets on.

    Raises:
        MeasurementError: The target alone fails.
    """
    plan = make_plan(suite, at_once, lambda target, drafter: None)
    widened = widened_targets(suite.targets)
    results = Results(header={"widened": widened, "gpu": on_gpu(), "engines_at_once": at_once})
    run_plan(plan, suite, results, start, reporter)
    for cell, reason in results.contents.errors.items():
        if cell.engine.method == ALONE:
            raise MeasurementError(f"the target alone: {reason}")
    return _measured(suite, results.contents)


def _measured(suite: Suite, contents: Contents) -> Measured:
    (target,) = suite.targets
    rows = rows_of(contents)
    candidates = []
    for drafter in target.drafters:
        for method in suite.methods:
            engine = EngineId(target.name, method, drafter.name, *suite.num_speculative_tokens)
            candidates.append(
                Candidate(
                    engine,
                    vllm_config(engine, drafter) or {},
                    [row for row in rows if row.cell.engine == engine],
                    _failure(engine, contents.errors),
                )
            )
    candidates.sort(key=lambda each: -each.speedup.median if each.speedup else 0.0)
    return Measured(rows, candidates, notes(contents))


def _failure(engine: EngineId, errors: dict[Cell, str]) -> str:
    reasons = (reason for cell, reason in errors.items() if cell.engine == engine)
    return "; ".join(dict.fromkeys(reasons))
