# SPDX-License-Identifier: Apache-2.0
"""Run a plan: start engines, measure round by round, and record each run when it ends."""

import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from vllm_hetero_spec.bench.child_process import EngineProcess
from vllm_hetero_spec.bench.load import Load, MeasurementError
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
                elif not _measure(run, suite, results, engines, reporter):
                    failed.add(run.cell)
    finally:
        engines.keep_only(())


def _measure(
    run: Measurement,
    suite: Suite,
    results: Results,
    engines: "_Engines",
    reporter: ProgressReporter,
) -> bool:
    """Return True if the run succeeded."""
    engine = run.cell.engine
    try:
        running = engines.running(engine)
        began = time.perf_counter()
        sample = running.run(load_of(run, suite))
    except (ConfigError, MeasurementError) as error:
        if isinstance(error, MeasurementError):
            engines.end(engine)
        results.failed(run.cell, str(error))
        reporter.failed(run, str(error))
        return False
    results.measured(run, sample)
    reporter.measured(run, sample, time.perf_counter() - began)
    return True


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
            # `running` raises the same error later for each cell of the engine.
            with contextlib.suppress(MeasurementError):
                self.running(engine)

    def running(self, engine: EngineId) -> EngineProcess:
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

    def end(self, engine: EngineId) -> None:
        if engine in self._up:
            self._up.pop(engine).close()
