# SPDX-License-Identifier: Apache-2.0
"""Run a plan: start engines, measure round by round, and record each run when it ends."""

import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from vllm_hetero_spec.bench.child_process import EngineProcess
from vllm_hetero_spec.bench.load import Load, MeasurementError, Sample
from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement, Plan
from vllm_hetero_spec.bench.progress import ProgressReporter
from vllm_hetero_spec.bench.results import Results
from vllm_hetero_spec.bench.suite import Suite
from vllm_hetero_spec.errors import ConfigError

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
