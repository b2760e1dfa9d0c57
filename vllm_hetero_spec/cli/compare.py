# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec compare`: the target alone beside the target with a drafter."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from vllm_hetero_spec.cli.comparison import Comparison
from vllm_hetero_spec.cli.options import DEFAULT, MODEL, add_engines, add_load, add_output, positive
from vllm_hetero_spec.config import METHODS, ConfigError, parse
from vllm_hetero_spec.inputs.model_folder import check_model, widened_columns
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.measure.load import Load, Sample
from vllm_hetero_spec.measure.vllm_engine import EngineSpec, VllmEngine


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "compare",
        help="run a target alone and with a drafter; print speed, acceptance and equality",
        description="Runs the target with the drafter and alone, each in an engine of its own "
        "after a warm-up, and prints both side by side.",
    )
    parser.add_argument("target", help=MODEL)
    parser.add_argument("drafter", help=f"{MODEL}; any tokenizer")
    add_load(parser, longest=96)
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=1,
        metavar="N",
        help="requests that run at the same time (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=DEFAULT)
    parser.add_argument("--method", choices=METHODS, default=METHODS[0], help=DEFAULT)
    parser.add_argument(
        "--num-speculative-tokens",
        type=positive,
        default=4,
        metavar="K",
        help="lookahead in target tokens (default: %(default)s)",
    )
    add_engines(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure and print.

    Raises:
        ConfigError: The models, prompts or options cannot be used.
        MeasurementError: An engine failed.
    """
    if arguments.temperature < 0:
        raise ConfigError(f"--temperature is {arguments.temperature}; it must not be negative.")
    target = check_model(arguments.target, "target")
    drafter = check_model(arguments.drafter, "drafter")
    prompts = load_prompts(arguments.prompts, arguments.num_prompts)
    speculative = {
        "method": arguments.method,
        "model": drafter,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        **arguments.speculative_config,
    }
    # Refused here rather than by an engine that takes a while to start.
    parse(
        speculative,
        target_tensor_parallel=arguments.engine_args.get("tensor_parallel_size", 1),
    )
    load = Load(
        prompts=prompts,
        max_tokens=arguments.max_tokens,
        batch_size=arguments.batch_size,
        temperature=arguments.temperature,
    )
    progress = Console(stderr=True)
    measured = {}
    # The run with the drafter comes first: a drafter that vLLM refuses is refused at once.
    for name, config in (("with the drafter", speculative), ("alone", None)):
        spec = EngineSpec(target, config, arguments.batch_size, arguments.engine_args)
        with progress.status(f"measuring the target {name} ..."):
            measured[name] = _measure(spec, load, verbose=arguments.verbose)
    comparison = Comparison(
        target=target,
        drafter=drafter,
        prompts=prompts,
        greedy=arguments.temperature == 0,
        alone=measured["alone"],
        speculative=measured["with the drafter"],
        widened=widened_columns(target),
    )
    if arguments.json:
        json.dump(comparison.as_json(), sys.stdout, indent=2)
        print()
    else:
        comparison.show(Console())


def _measure(spec: EngineSpec, load: Load, *, verbose: bool) -> Sample:
    with VllmEngine(spec, verbose=verbose) as engine:
        return engine.run(load)
