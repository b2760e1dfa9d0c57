# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec advise`: which drafter, method and lookahead make a target fastest."""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vllm_hetero_spec.advice.as_json import as_json
from vllm_hetero_spec.advice.findings import Advice, DrafterFindings
from vllm_hetero_spec.advice.measuring import Plan, fixed_config
from vllm_hetero_spec.advice.tables import show
from vllm_hetero_spec.advice.work import Task, Work
from vllm_hetero_spec.cli.options import DEFAULT, MODEL, add_engines, add_load, add_output, positive
from vllm_hetero_spec.config import METHODS, ConfigError, parse
from vllm_hetero_spec.inputs.model_folder import check_model, widened_columns
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.measure.load import MeasurementError
from vllm_hetero_spec.measure.vllm_engine import VllmEngine
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import documents_of


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "advise",
        help="rank drafters and methods for a target; print the configuration to paste",
        description="Compares tokenizers, measures short loads alone and with each drafter, and "
        "foresees from them the speedup of every lookahead.",
    )
    parser.add_argument("target", help=MODEL)
    parser.add_argument("drafters", nargs="+", metavar="drafter", help=f"{MODEL}; any number")
    add_load(parser, longest=32)
    parser.add_argument(
        "--batch-sizes",
        type=positive,
        nargs="+",
        default=[1, 8],
        metavar="N",
        help="requests that run at the same time (default: 1 8)",
    )
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        metavar="T",
        help="default: 0 1",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=positive,
        default=4,
        metavar="K",
        help="longest lookahead, in target tokens; it is measured, and shorter ones are foreseen "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        choices=METHODS,
        nargs="+",
        default=[],
        help="measure these (default: the one that the tokenizers suggest)",
    )
    parser.add_argument("--repeats", type=positive, default=2, metavar="N", help=DEFAULT)
    parser.add_argument(
        "--statistics-only", action="store_true", help="stop before any weights are read"
    )
    add_engines(parser)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code of the models' repositories"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Look, measure and print.

    Raises:
        ConfigError: The models, prompts or options cannot be used.
        MeasurementError: An engine failed; what the others did is printed.
    """
    target = check_model(arguments.target, "target")
    names = dict.fromkeys(arguments.drafters)
    drafters = [DrafterFindings(name, check_model(name, "drafter")) for name in names]
    plan = _plan(arguments)
    _check(arguments, plan, drafters)
    file = arguments.prompts
    task = Task(
        target=target,
        plan=plan,
        documents=documents_of(CALIBRATION_TEXT)
        if file is None
        else load_prompts(file, sys.maxsize),
        methods=arguments.methods,
        speculative=arguments.speculative_config,
        engine=arguments.engine_args,
        trust_remote_code=arguments.trust_remote_code,
    )
    with _Bar() as bar:
        work = Work(task, functools.partial(VllmEngine, verbose=arguments.verbose), bar)
        work.look(drafters)
        if arguments.statistics_only:
            work.stop(drafters, "--statistics-only")
        work.find_weights(drafters)
        work.measure([drafter for drafter in drafters if not drafter.stopped])
    advice = Advice(
        arguments.target, widened_columns(target), plan, drafters, arguments.speculative_config
    )
    if arguments.json:
        json.dump(as_json(advice), sys.stdout, indent=2)
        print()
    else:
        show(advice, Console())
    if advice.failures:
        raise MeasurementError("; ".join(advice.failures))


def _plan(arguments: argparse.Namespace) -> Plan:
    sizes = sorted(set(arguments.batch_sizes))
    prompts = load_prompts(arguments.prompts, max(arguments.num_prompts, sizes[-1]))
    return Plan(
        prompts=prompts,
        max_tokens=arguments.max_tokens,
        batch_sizes=sizes,
        temperatures=sorted(set(arguments.temperatures)),
        repeats=arguments.repeats,
        lookahead=arguments.num_speculative_tokens,
    )


def _check(arguments: argparse.Namespace, plan: Plan, drafters: Sequence[DrafterFindings]) -> None:
    """Refuse what could only fail later."""
    if plan.temperatures[0] < 0:
        raise ConfigError(f"a temperature is {plan.temperatures[0]}; it must not be negative.")
    if plan.batch_sizes[-1] > len(plan.prompts):
        source = arguments.prompts or "the built-in text"
        raise ConfigError(
            f"batch size {plan.batch_sizes[-1]} needs as many prompts, and {source} holds "
            f"{len(plan.prompts)}; give a longer file with --prompts, or smaller --batch-sizes."
        )
    if plan.max_tokens < plan.lookahead + 2:
        raise ConfigError(
            f"--max-tokens is {plan.max_tokens}; a draft of {plan.lookahead} tokens needs "
            f"{plan.lookahead + 2} at least."
        )
    for drafter in drafters:
        for method in arguments.methods or METHODS[:1]:
            config = {"method": method, "model": drafter.model, **arguments.speculative_config}
            parse(
                fixed_config(config, plan.lookahead),
                target_tensor_parallel=arguments.engine_args.get("tensor_parallel_size", 1),
            )


class _Bar:
    """Says how the work gets on: on the error stream, on terminals only; it leaves nothing."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, loads: int) -> None:
        self._progress.update(self._task, total=loads)

    def say(self, words: str) -> None:
        self._progress.update(self._task, description=words)

    def advance(self) -> None:
        self._progress.advance(self._task)
