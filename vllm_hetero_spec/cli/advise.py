# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec advise`: which drafter makes a target fastest, if any does."""

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console

from vllm_hetero_spec.advice.drafters import DrafterFacts, look_at
from vllm_hetero_spec.advice.measuring import DATASET, Measured, measure
from vllm_hetero_spec.advice.report import as_json, show
from vllm_hetero_spec.bench import engines
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.progress import Reporter
from vllm_hetero_spec.bench.suite import Drafter, Suite, Target, check_drafter, short_name
from vllm_hetero_spec.bench.tables import print_json
from vllm_hetero_spec.cli.options import (
    DEFAULT,
    MODEL,
    add_engines,
    add_load,
    add_output,
    dictionary,
    positive,
)
from vllm_hetero_spec.config import DEFAULT_METHOD, METHODS
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.inputs.weights import missing_weights
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import documents_of


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "advise",
        help="rank drafters for a target; print the configuration to paste",
        description="Compares tokenizers, then measures short loads with each drafter beside the "
        "target alone, in interleaved rounds and with the controller that will run. The "
        "configuration that it prints is one that it has measured.",
    )
    parser.add_argument("target", help=MODEL)
    parser.add_argument("drafters", nargs="+", metavar="drafter", help=f"{MODEL}; any number")
    add_load(parser, longest=64)
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
        default=8,
        metavar="K",
        help="longest lookahead, in target tokens; the controller drafts less far where that is "
        "faster (default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        choices=METHODS,
        nargs="+",
        default=[DEFAULT_METHOD],
        help=f"measure each of these (default: {DEFAULT_METHOD}, which chooses for a pair)",
    )
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help=DEFAULT)
    parser.add_argument(
        "--engines-at-once",
        type=positive,
        metavar="N",
        help="engines that are up together (default: on GPUs 2, which share the memory, on a CPU "
        "as many as fit); 1 where the memory holds no two copies of the target",
    )
    parser.add_argument(
        "--statistics-only", action="store_true", help="stop before any weights are read"
    )
    parser.add_argument(
        "--settings",
        type=dictionary,
        default={},
        metavar="JSON",
        help="measure each drafter in several ways side by side: by name, further keys of "
        '--speculative-config, as {"chain": {}, "tree": {"tree_nodes": 8}}',
    )
    add_engines(parser)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code of the models' repositories"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Compare, measure and print.

    Raises:
        ConfigError: The models, prompts or options cannot be used.
        MeasurementError: An engine failed; what the others did is printed.
    """
    suite = _suite(arguments)
    (target,) = suite.targets
    file, trust = arguments.prompts, arguments.trust_remote_code
    dtype = arguments.speculative_config.get("dtype") or arguments.engine_args.get("dtype")
    drafters = look_at(
        target.model,
        target.drafters,
        load_prompts(file, sys.maxsize) if file else documents_of(CALIBRATION_TEXT),
        dtype=str(dtype or ("auto" if engines.on_gpu() else "float32")),
        sequences=suite.batch_sizes[-1],
        trust_remote_code=trust,
    )
    drafters = [_left_out(target.model, facts, arguments.statistics_only) for facts in drafters]
    chosen = tuple(
        each
        for facts in drafters
        if not facts.not_measured
        for each in facts.drafter.in_each_setting()
    )
    measured = None
    if chosen:
        suite = replace(suite, targets=(replace(target, drafters=chosen),))
        measured = _measure(suite, verbose=arguments.verbose)
    if arguments.json:
        print_json(as_json(arguments.target, suite, drafters, measured))
    else:
        show(arguments.target, drafters, measured, Console())
    if measured and (failures := measured.failures):
        raise MeasurementError("; ".join(failures))


def _suite(arguments: argparse.Namespace) -> Suite:
    """What is to be measured.

    Raises:
        ConfigError: It could only fail later.
    """
    sizes = sorted(set(arguments.batch_sizes))
    prompts = load_prompts(arguments.prompts, max(arguments.num_prompts, sizes[-1]))
    if sizes[-1] > len(prompts):
        raise ConfigError(
            f"batch size {sizes[-1]} needs as many prompts, and "
            f"{arguments.prompts or 'the built-in text'} holds {len(prompts)}; give a longer file "
            "with --prompts, or smaller --batch-sizes."
        )
    trust = {"trust_remote_code": True} if arguments.trust_remote_code else {}
    target = Target(
        name=short_name(arguments.target),
        model=arguments.target,
        drafters=tuple(_drafters(arguments)),
        datasets=(DATASET,),
        engine=trust | arguments.engine_args,
    )
    for drafter in target.drafters:
        check_drafter(target, drafter, arguments.methods, arguments.num_speculative_tokens)
    return Suite(
        name="advise",
        targets=(target,),
        methods=tuple(dict.fromkeys(arguments.methods)),
        prompts={target.name: {DATASET: tuple(prompts)}},
        batch_sizes=tuple(sizes),
        temperatures=tuple(sorted(set(arguments.temperatures))),
        num_speculative_tokens=(arguments.num_speculative_tokens,),
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
        engines_at_once=arguments.engines_at_once,
    )


def _drafters(arguments: argparse.Namespace) -> Iterator[Drafter]:
    """Each drafter once, under the last part of its name where no other has the same."""
    names = dict.fromkeys(arguments.drafters)
    shared = Counter(map(short_name, names))
    for name in names:
        short = short_name(name)
        yield Drafter(
            name=short if shared[short] == 1 else name,
            model=name,
            speculative=arguments.speculative_config,
            settings=arguments.settings,
        )


def _left_out(target: str, facts: DrafterFacts, statistics_only: bool) -> DrafterFacts:
    """Says why no engine is started with a drafter, where none is."""
    if facts.not_measured:
        return facts
    if statistics_only:
        return replace(facts, not_measured="not measured: --statistics-only.")
    reason = missing_weights(target) or missing_weights(facts.drafter.model)
    return replace(facts, not_measured=f"not measured: {reason}.") if reason else facts


def _measure(suite: Suite, *, verbose: bool) -> Measured:
    at_once = engines.at_once_for(suite)
    start = functools.partial(engines.start, suite=suite, at_once=at_once, verbose=verbose)
    with Reporter(Console(stderr=True)) as reporter:
        return measure(suite, at_once, start, reporter)
