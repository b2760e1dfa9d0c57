# SPDX-License-Identifier: Apache-2.0
"""Progress of a benchmark: one line for each start and each run, with the time left."""

import statistics
from collections.abc import Collection, Sequence

from rich.console import Console

from vllm_hetero_spec.bench.load import Sample
from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement
from vllm_hetero_spec.bench.tables import say
from vllm_hetero_spec.errors import one_line


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
