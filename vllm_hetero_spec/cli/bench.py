# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec bench`: measure a suite of targets, drafters, methods and peers."""

import argparse
import contextlib
import functools
import shlex
import signal
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_hetero_spec.bench import engines
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.plan import Plan, make_plan
from vllm_hetero_spec.bench.report import MARKDOWN, conditions, print_speed, write_report
from vllm_hetero_spec.bench.results import Contents, Results, read_results
from vllm_hetero_spec.bench.run import ProgressReporter, run_plan
from vllm_hetero_spec.bench.suite import Suite, read_suite
from vllm_hetero_spec.bench.tables import say
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.weights import fetch_weights
from vllm_hetero_spec.machine import provenance

_RESULTS = Path("bench-results")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a suite of pairs, methods and loads beside their peers",
        description="Runs every engine of a suite on the same loads in interleaved rounds, records "
        "each run at once, and writes tables. Interrupted, it goes on where it was when it is "
        "called again.",
    )
    parser.add_argument("suite", type=Path, nargs="?", metavar="SUITE.yaml")
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    parser.add_argument("--out", help=f"default: {_RESULTS}/<name of the suite>", **folder)
    what = "start over; what is recorded is kept as .bak"
    parser.add_argument("--fresh", action="store_true", help=what)
    what = (
        "only cells with this in their names, as TARGET/METHOD/DRAFTER/k4/DATASET/b1/t0; *, ? and "
        "[..] are wildcards; what they are compared with comes along"
    )
    parser.add_argument("--only", metavar="PATTERN", help=what)
    parser.add_argument("--report", help="only write tables of results in DIR", **folder)
    parser.add_argument("--verbose", action="store_true", help="let engines write to stderr")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is not recorded yet, then report; some cells may have failed."""
    if (arguments.suite is None) == (arguments.report is None):
        raise ConfigError("give a suite to run, or --report DIR for results that are there.")
    progress = Console(stderr=True)
    if arguments.report is not None:
        _report(arguments.report, read_results(arguments.report))
        return
    suite = read_suite(arguments.suite)
    engines.check_arguments(suite)
    folder = arguments.out or _RESULTS / suite.name
    header = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "digest": suite.digest,
        "suite": suite.described(),
        **conditions(suite),
        "provenance": provenance(),
    }
    with contextlib.closing(Results(folder, header, fresh=arguments.fresh)) as results:
        _measure(arguments, suite, results, progress)
    _report(folder, results.contents)
    if failed := len(results.contents.errors):
        raise MeasurementError(f"{failed} cell(s) failed; the reasons are in {folder / MARKDOWN}.")


def _measure(
    arguments: argparse.Namespace, suite: Suite, results: Results, progress: Console
) -> None:
    # The value of the first session, so that all sessions have the same waves.
    at_once = results.contents.header["engines_at_once"]
    plan = make_plan(suite, at_once, engines.vocabularies_differ, arguments.only)
    pending = {run.cell.engine for wave in plan.pending(results.done) for run in wave}
    for target in suite.targets:
        names = {engine.drafter for engine in pending if engine.target == target.name}
        for drafter in target.drafters:
            if drafter.name in names:
                fetch_weights(drafter.model, target.engine)
        if names:
            fetch_weights(target.model, target.engine)
    start = functools.partial(
        engines.start, suite=suite, at_once=at_once, verbose=arguments.verbose
    )
    # Engines end with this process on SIGTERM, too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_plan(plan, suite, results, start, ProgressReporter(progress))
    except KeyboardInterrupt:
        say(progress, _interrupted(arguments, plan, results))
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(arguments: argparse.Namespace, plan: Plan, results: Results) -> str:
    left = sum(map(len, plan.pending(results.done)))
    command = ["vllm-hetero-spec", "bench", str(arguments.suite)]
    for option in ("out", "only"):
        if value := getattr(arguments, option):
            command += [f"--{option}", str(value)]
    return (
        f"interrupted: {len(results.done)} runs are recorded, {left} are left; go on with\n"
        f"  {shlex.join(command)}"
    )


def _report(folder: Path, contents: Contents) -> None:
    rows = write_report(folder, contents)
    console = Console()
    print_speed(contents, rows, console)
    say(console, f"written: {folder / MARKDOWN}")
