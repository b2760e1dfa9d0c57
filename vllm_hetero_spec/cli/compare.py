# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec compare`: measure a target with a drafter and alone, one round each."""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_hetero_spec.bench import engines, tables
from vllm_hetero_spec.bench.figures import Row, rows_of
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.plan import Measurement, make_plan
from vllm_hetero_spec.bench.report import COUNTS, TIMES, acceptance_length, runner_notes
from vllm_hetero_spec.bench.results import Results
from vllm_hetero_spec.bench.run import ProgressReporter, run_plan
from vllm_hetero_spec.bench.suite import Target
from vllm_hetero_spec.bench.tables import Column
from vllm_hetero_spec.cli.options import DEFAULT, MODEL, PROMPTS, add_load, positive, suite_of
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.model_folder import widened_columns
from vllm_hetero_spec.inputs.weights import fetch_weights
from vllm_hetero_spec.options import DEFAULT_METHOD, METHODS

_SAMPLES = 2
_SAMPLE_LENGTH = 240  # characters
_COARSE = ("bfloat16", "float16")
_TIES = (
    "In {dtype} a tie between two tokens may fall otherwise in a step that verifies a draft, as "
    "with all speculation in vLLM, and texts differ from there on; they should not with "
    '--engine-args \'{{"dtype": "float32"}}\'.'
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="run a target alone and with a drafter; print speed, acceptance and equality",
        description="Runs the target with the drafter and alone, one engine after the other, each "
        "after a warm-up, and prints both side by side. `bench` does it for many at once.",
    )
    parser.add_argument("target", help=MODEL)
    parser.add_argument("drafter", help=f"{MODEL}; any tokenizer")
    add_load(parser, longest=96, lookahead=4)
    what = f"requests that run at the same time ({DEFAULT})"
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help=what)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=DEFAULT)
    parser.add_argument("--method", choices=METHODS, default=DEFAULT_METHOD, help=DEFAULT)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.temperature <= 10:
        raise ConfigError(
            f"--temperature is {arguments.temperature}; it must be a number from 0 to 10."
        )
    suite = suite_of(
        arguments,
        [arguments.drafter],
        [arguments.method],
        [arguments.batch_size],
        [arguments.temperature],
        name="compare",
        repeats=1,
    )
    engines.check_arguments(suite)
    (target,) = suite.targets
    plan = make_plan(suite, 1, engines.vocabularies_differ)
    # The engine with the drafter runs first, so that a refused drafter is reported at once.
    plan = replace(plan, waves=plan.waves[::-1])
    for model in (target.model, target.drafters[0].model):
        fetch_weights(model, target.engine)
    start = functools.partial(engines.start, suite=suite, at_once=1, verbose=arguments.verbose)
    results = Results()
    run_plan(plan, suite, results, start, _Reporter(Console(stderr=True)))
    alone, drafted = rows_of(results.contents)
    if arguments.json:
        tables.print_json(_as_json(target, alone, drafted))
        return
    texts = {
        each.run.cell: [trace.text for trace in each.sample.traces]
        for each in results.contents.samples
    }
    prompts = suite.prompts[target.name][PROMPTS]
    notes = runner_notes(results.contents)
    if len(prompts) < arguments.num_prompts:
        source = arguments.prompts or "the built-in text"
        asked = f"--num-prompts is {arguments.num_prompts}"
        notes = [f"{asked}; {source} contains {len(prompts)} prompts.", *notes]
    completions = list(zip(prompts, texts[alone.cell], texts[drafted.cell], strict=True))
    _show(target, alone, drafted, completions[:_SAMPLES], notes)


class _Reporter(ProgressReporter):
    """Raises at the first failure, because nothing is left to compare."""

    def failed(self, run: Measurement, sentence: str) -> None:
        raise MeasurementError(sentence)


def _as_json(target: Target, alone: Row, drafted: Row) -> dict[str, Any]:
    """JSON output with figures as in the summary of `bench`; times in seconds."""
    assert drafted.speedup is not None
    return {
        "target": target.model,
        "drafter": target.drafters[0].model,
        "method": drafted.cell.engine.method,
        "target_zero_mlp_columns": (widened_columns(target.model) or (0, 0))[0],
        "prompts": alone.figures.requests,
        "identical": drafted.identical[0] if drafted.identical else None,
        "speedup": drafted.speedup.median,
        "alone": alone.figures,
        "speculative": drafted.figures,
    }


def _show(
    target: Target,
    alone: Row,
    drafted: Row,
    texts: Sequence[tuple[str, str, str]],
    notes: list[str],
) -> None:
    """Print samples (prompt, completion alone, with the drafter), the table, and its notes."""
    console = Console(highlight=False, emoji=False)
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
    tables.say(console, f"target   {target.model}")
    tables.say(console, f"drafter  {target.drafters[0].model}")
    if widening := widened_columns(target.model):
        console.print(tables.widened("the target", widening))
    both = {"target alone": alone, "with the drafter": drafted}
    console.print(tables.side_by_side(_COLUMNS, both))
    if coarse and drafted.identical and drafted.identical[0] < drafted.identical[1]:
        notes = [*notes, _TIES.format(dtype=drafted.figures.dtype)]
    for note in notes:
        tables.say(console, note)


def _verdict(row: Row) -> str:
    if row.cell.engine.drafter is None:
        return tables.NONE
    if row.identical is None:
        return "not compared (sampled)"
    same, every = row.identical
    return f"{'yes' if same == every else 'no'}: {same} of {every} prompts"


_COLUMNS: tuple[Column[Row], ...] = (
    Column("token-identical", _verdict),
    Column("tokens generated", lambda row: tables.count(row.figures.tokens)),
    *TIMES,
    Column(
        "acceptance length",
        lambda row: acceptance_length(row) if row.figures.drafts else "no drafts",
    ),
    *COUNTS,
    Column("time in all (s)", lambda row: tables.number(row.figures.seconds)),
)


def _cut(text: str, end: bool = False) -> str:
    if len(text) <= _SAMPLE_LENGTH:
        return text
    return "..." + text[-_SAMPLE_LENGTH:] if end else text[:_SAMPLE_LENGTH] + "..."
