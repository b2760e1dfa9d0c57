# SPDX-License-Identifier: Apache-2.0
"""Run a plan: start engines, measure round by round, and record each run when it ends."""

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from vllm_hetero_spec.bench.child_process import EngineProcess
from vllm_hetero_spec.bench.load import Load, MeasurementError, Sample
from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement, Plan
from vllm_hetero_spec.bench.results import Results
from vllm_hetero_spec.bench.suite import Suite
from vllm_hetero_spec.bench.tables import say
from vllm_hetero_spec.errors import ConfigError, one_line


class TimeLeft:
    """Estimates the time left from the last run of each cell, or from runs of similar cells."""

    def __init__(self) -> None:
        self._runs: dict[Cell, float] = {}
        self._starts: list[float] = []

    def ran(self, cell: Cell, seconds: float) -> None:
        self._runs[cell] = seconds

    def started(self, seconds: float) -> None:
        self._starts.append(seconds)

    def seconds(self, runs: Sequence[Measurement], starts: int) -> float | None:
        """Estimate for runs and a number of engine starts; None before the first run."""
        if not self._runs:
            return None
        start = statistics.mean(self._starts) if self._starts else 0.0
        return sum(self._expected(run.cell) for run in runs) + starts * start

    def _expected(self, cell: Cell) -> float:
        for like in (lambda c: c == cell, lambda c: c[1:] == cell[1:], lambda c: c[2] == cell[2]):
            if alike := [seconds for other, seconds in self._runs.items() if like(other)]:
                return statistics.mean(alike)
        return statistics.mean(self._runs.values())


class ProgressReporter:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._left: list[Measurement] = []
        self._total = 0
        self._up = set[EngineId]()
        self._estimate = TimeLeft()

    def begin(self, runs: Collection[Measurement]) -> None:
        """Set the runs to come, in order."""
        self._left = list(runs)
        self._total = len(runs)

    def starting(self, engine: EngineId) -> None:
        say(self._console, f"starting {engine}")

    def started(self, engine: EngineId, seconds: float) -> None:
        """Record the end of a start, successful or not; writes nothing."""
        self._up.add(engine)
        self._estimate.started(seconds)

    def measured(self, run: Measurement, sample: Sample, seconds: float) -> None:
        """Report a run that took `seconds`, including its warm-up."""
        self._estimate.ran(run.cell, seconds)
        length = sample.acceptance_length
        accepted = f", acceptance length {length:.2f}" if length else ""
        self._done(run, f"{sample.tokens_per_second:.1f} tok/s{accepted}")

    def failed(self, run: Measurement, sentence: str) -> None:
        """Report that a run or the start of its engine failed."""
        self._done(run, f"failed: {one_line(sentence)}")

    def _done(self, run: Measurement, how: str) -> None:
        self._left.remove(run)
        engines = {left.cell.engine for left in self._left} - self._up
        seconds = self._estimate.seconds(self._left, len(engines))
        left = f"; about {_duration(seconds)} left" if seconds and self._left else ""
        count = self._total - len(self._left)
        done = f"[{count}/{self._total}] {run.cell}, round {run.round + 1}"
        say(self._console, f"{done}: {how}{left}")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{max(round(seconds), 1)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


Start = Callable[[EngineId], EngineProcess]


def load_of(run: Measurement, suite: Suite) -> Load:
    """Load of a run. Seeds differ between rounds; all engines of a round have the same seed."""
    cell = run.cell
    prompts = suite.prompts[cell.engine.target][cell.dataset]
    seed = None if suite.seed is None else suite.seed + run.round * len(prompts)
    return Load(
        prompts=prompts,
        max_tokens=suite.max_tokens,
        batch_size=cell.batch_size,
        temperature=cell.temperature,
        top_p=suite.top_p,
        seed=seed,
        ignore_eos=suite.ignore_eos,
    )


def run_plan(
    plan: Plan, suite: Suite, results: Results, start: Start, reporter: ProgressReporter
) -> None:
    """Measure all runs that are not recorded yet.

    After a failed run the other rounds of its cell are skipped, and the engine restarts for other
    cells. If an engine does not start, all its cells fail. A later call tries failed cells again.
    """
    for cell, reason in plan.skipped.items():
        results.skip(cell, reason)
    waves = plan.pending(results.done)
    reporter.begin([run for wave in waves for run in wave])
    engines = _Engines(start, reporter)
    try:
        for wave in waves:
            engines.keep_only(dict.fromkeys(run.cell.engine for run in wave))
            failed = set[Cell]()
            for run in wave:
                if run.cell in failed:
                    reporter.failed(run, results.contents.errors[run.cell])
                    continue
                try:
                    sample, seconds = engines.run(run.cell.engine, load_of(run, suite))
                except (ConfigError, MeasurementError) as error:
                    failed.add(run.cell)
                    results.failed(run.cell, str(error))
                    reporter.failed(run, str(error))
                else:
                    results.measured(run, sample)
                    reporter.measured(run, sample, seconds)
    finally:
        engines.keep_only(())


class _Engines:
    """Engines that are up, and reasons of those that did not start."""

    def __init__(self, start: Start, reporter: ProgressReporter) -> None:
        self._start = start
        self._reporter = reporter
        self._up: dict[EngineId, EngineProcess] = {}
        self._refused: dict[EngineId, str] = {}

    def keep_only(self, wanted: Collection[EngineId]) -> None:
        """End all other engines, then start the missing ones, so that all run before measuring."""
        ended = [self._up.pop(engine) for engine in list(self._up) if engine not in wanted]
        # In parallel, because each engine takes seconds to end.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda engine: engine.close(), ended))
        for engine in wanted:
            # `run` raises the same error later for each cell of the engine.
            with contextlib.suppress(MeasurementError):
                self._running(engine)

    def run(self, engine: EngineId, load: Load) -> tuple[Sample, float]:
        """Run a load, and return its sample and the seconds it took; an engine that fails ends."""
        running = self._running(engine)
        began = time.perf_counter()
        try:
            return running.run(load), time.perf_counter() - began
        except MeasurementError:
            self._up.pop(engine).close()
            raise

    def _running(self, engine: EngineId) -> EngineProcess:
        """Return an engine, started if necessary; MeasurementError if it does not start."""
        if engine in self._refused:
            raise MeasurementError(self._refused[engine])
        if engine not in self._up:
            self._reporter.starting(engine)
            began = time.perf_counter()
            try:
                self._up[engine] = self._start(engine)
            except (ConfigError, MeasurementError) as error:
                self._refused[engine] = str(error)
                raise MeasurementError(str(error)) from error
            finally:
                self._reporter.started(engine, time.perf_counter() - began)
        return self._up[engine]
