# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec compare`: the target alone beside the target with a drafter.

A suite of two engines and one round, for the plan, the figures and the tables of `bench`.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_hetero_spec.bench import engines
from vllm_hetero_spec.bench.engines import vocabularies_differ
from vllm_hetero_spec.bench.figures import Row, rows_of
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.plan import Measurement, make_plan
from vllm_hetero_spec.bench.progress import Reporter
from vllm_hetero_spec.bench.report import COUNTS, TIMES, acceptance_length, runner_notes
from vllm_hetero_spec.bench.results import Results
from vllm_hetero_spec.bench.run import run_plan
from vllm_hetero_spec.bench.suite import Drafter, Suite, Target, check_drafter, short_name
from vllm_hetero_spec.bench.tables import (
    NONE,
    Column,
    as_data,
    count,
    number,
    print_json,
    side_by_side,
    widened,
)
from vllm_hetero_spec.cli.options import DEFAULT, MODEL, add_engines, add_load, add_output, positive
from vllm_hetero_spec.config import DEFAULT_METHOD, METHODS
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.model_folder import check_model, widened_columns
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.inputs.weights import fetch_weights

_DATASET = "prompts"
_SAMPLES = 2
_SAMPLE_LENGTH = 240  # characters
_COARSE = ("bfloat16", "float16")
_TIES = (
    "In {dtype} a tie between two tokens may fall otherwise in a step that verifies a draft, as "
    "with all speculation in vLLM, and texts differ from there on; they should not with "
    '--engine-args \'{{"dtype": "float32"}}\'.'
)


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "compare",
        help="run a target alone and with a drafter; print speed, acceptance and equality",
        description="Runs the target with the drafter and alone, one engine after the other, each "
        "after a warm-up, and prints both side by side. `bench` does it for many at once.",
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
    parser.add_argument("--method", choices=METHODS, default=DEFAULT_METHOD, help=DEFAULT)
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
        MeasurementError: An engine refused the models, or failed.
    """
    suite = _suite(arguments)
    results = Results()
    plan = make_plan(suite, 1, vocabularies_differ)
    # The drafter comes first: one that vLLM refuses is refused at once.
    plan = replace(plan, waves=plan.waves[::-1])
    (target,) = suite.targets
    for model in (target.model, target.drafters[0].model):
        fetch_weights(model, target.engine)
    start = functools.partial(engines.start, suite=suite, at_once=1, verbose=arguments.verbose)
    with _Reporter(Console(stderr=True)) as reporter:
        run_plan(plan, suite, results, start, reporter)
    alone, drafted = rows_of(results.contents)
    if arguments.json:
        print_json(_as_json(suite, alone, drafted))
        return
    texts = {
        each.run.cell: [trace.text for trace in each.sample.traces]
        for each in results.contents.samples
    }
    prompts = suite.prompts[alone.cell.engine.target][_DATASET]
    compared = list(zip(prompts, texts[alone.cell], texts[drafted.cell], strict=True))
    notes = runner_notes(results.contents)
    if len(prompts) < arguments.num_prompts:
        source = arguments.prompts or "the built-in text"
        notes = [
            f"--num-prompts is {arguments.num_prompts}; {source} holds {len(prompts)}.",
            *notes,
        ]
    _show(suite, alone, drafted, compared[:_SAMPLES], notes)


def _suite(arguments: argparse.Namespace) -> Suite:
    if not 0 <= arguments.temperature <= 10:
        raise ConfigError(
            f"--temperature is {arguments.temperature}; it must be a number from 0 to 10."
        )
    model = check_model(arguments.target, "target")
    drafter = check_model(arguments.drafter, "drafter")
    # By name, as a refusal calls them.
    target = Target(
        name=short_name(model),
        model=model,
        drafters=(
            Drafter(
                name=short_name(drafter),
                model=drafter,
                speculative=arguments.speculative_config,
            ),
        ),
        datasets=(_DATASET,),
        engine=arguments.engine_args,
    )
    wanted = max(arguments.num_prompts, arguments.batch_size)
    prompts = load_prompts(arguments.prompts, wanted)
    if arguments.batch_size > len(prompts):
        raise ConfigError(
            f"batch size {arguments.batch_size} needs as many prompts, and "
            f"{arguments.prompts or 'the built-in text'} holds {len(prompts)}; give a longer file "
            "with --prompts, or a smaller --batch-size."
        )
    methods, lookahead = (arguments.method,), arguments.num_speculative_tokens
    check_drafter(target, target.drafters[0], methods, lookahead)
    return Suite(
        name="compare",
        targets=(target,),
        methods=methods,
        prompts={target.name: {_DATASET: tuple(prompts)}},
        batch_sizes=(arguments.batch_size,),
        temperatures=(arguments.temperature,),
        num_speculative_tokens=(lookahead,),
        max_tokens=arguments.max_tokens,
        repeats=1,
    )


class _Reporter(Reporter):
    """Gives up at the first failure, as there is nothing to compare then."""

    def failed(self, run: Measurement, sentence: str) -> None:
        raise MeasurementError(sentence)


def _as_json(suite: Suite, alone: Row, drafted: Row) -> dict[str, Any]:
    """Every figure, as in `bench`'s summary; times in seconds."""
    (target,) = suite.targets
    widening = widened_columns(target.model)
    assert drafted.speedup is not None
    return {
        "target": target.model,
        "drafter": target.drafters[0].model,
        "method": drafted.cell.engine.method,
        "target_zero_mlp_columns": widening[0] if widening else 0,
        "prompts": alone.figures.requests,
        "identical": drafted.identical[0] if drafted.identical else None,
        "speedup": drafted.speedup.median,
        "alone": as_data(alone.figures),
        "speculative": as_data(drafted.figures),
    }


def _show(
    suite: Suite,
    alone: Row,
    drafted: Row,
    texts: Sequence[tuple[str, str, str]],
    notes: Sequence[str],
) -> None:
    """Print some (prompt, completion alone, with the drafter), the table, and notes below it."""
    console = Console(highlight=False)
    coarse = drafted.figures.dtype in _COARSE
    for prompt, own, other in texts:
        console.rule("a prompt's end and its completion", align="left")
        console.print(f"[dim]{escape(_cut(prompt, end=True))}[/]", end="")
        console.print(f"[bold]{escape(_cut(other))}[/]")
        if drafted.identical and own != other:
            colour = "yellow" if coarse else "red"
            console.print(f"[{colour}]the target alone wrote:[/]")
            console.print(escape(_cut(own)))
    console.rule()
    (target,) = suite.targets
    for role, model in (("target ", target.model), ("drafter", target.drafters[0].model)):
        console.print(f"{role}  {model}", markup=False, soft_wrap=True)
    if widening := widened_columns(target.model):
        console.print(widened("the target", widening))
    console.print(side_by_side(_COLUMNS, {"target alone": alone, "with the drafter": drafted}))
    if coarse and drafted.identical and drafted.identical[0] < drafted.identical[1]:
        notes = [*notes, _TIES.format(dtype=drafted.figures.dtype)]
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


def _verdict(row: Row) -> str:
    if row.cell.engine.drafter is None:
        return NONE
    if row.identical is None:
        return "not compared (sampled)"
    same, every = row.identical
    return f"{'yes' if same == every else 'no'}: {same} of {every} prompts"


_COLUMNS: tuple[Column[Row], ...] = (
    Column("token-identical", _verdict),
    Column("tokens generated", lambda row: count(row.figures.tokens)),
    *TIMES,
    Column(
        "acceptance length",
        lambda row: acceptance_length(row) if row.figures.drafts else "no drafts",
    ),
    *COUNTS,
    Column("time in all (s)", lambda row: number(row.figures.seconds)),
)


def _cut(text: str, end: bool = False) -> str:
    if len(text) <= _SAMPLE_LENGTH:
        return text
    return "..." + text[-_SAMPLE_LENGTH:] if end else text[:_SAMPLE_LENGTH] + "..."
