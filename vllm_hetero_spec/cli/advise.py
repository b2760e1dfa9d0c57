# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec advise`: rank drafters for a target by measured speedup."""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from vllm_hetero_spec.bench import engines, tables
from vllm_hetero_spec.bench.advise import (
    Candidate,
    DrafterFacts,
    Measured,
    compared,
    engine_name,
    look_at,
    prospects,
)
from vllm_hetero_spec.bench.figures import Row
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.plan import make_plan
from vllm_hetero_spec.bench.report import acceptance_length, conditions
from vllm_hetero_spec.bench.results import Results
from vllm_hetero_spec.bench.run import ProgressReporter, run_plan
from vllm_hetero_spec.bench.suite import ALONE, Suite
from vllm_hetero_spec.bench.tables import Column
from vllm_hetero_spec.cli.options import (
    DEFAULT,
    MODEL,
    PROMPTS,
    add_load,
    dictionary,
    positive,
    suite_of,
)
from vllm_hetero_spec.inputs.known_drafters import KnownDrafter, known_for
from vllm_hetero_spec.inputs.model_folder import widened_columns
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.options import DEFAULT_METHOD, METHODS
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import documents_of


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="rank drafters for a target; print the configuration to paste",
        description="Compares tokenizers, then measures short loads with each drafter beside the "
        "target alone, in interleaved rounds and with the controller that will run. The "
        "configuration that it prints is one that it has measured.",
    )
    parser.add_argument("target", help=MODEL)
    drafters = f"{MODEL}; any tokenizer (default: public ones, of which those here are measured)"
    parser.add_argument("drafters", nargs="*", metavar="drafter", help=drafters)
    add_load(parser, longest=64, lookahead=8)
    several: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    what = "requests that run at the same time (default: 1 8)"
    parser.add_argument("--batch-sizes", type=positive, default=[1, 8], help=what, **several)
    what = "default: 0 1"
    parser.add_argument("--temperatures", type=float, default=[0.0, 1.0], help=what, **several)
    what = f"measure each of these (default: {DEFAULT_METHOD}, which chooses for a pair)"
    methods = [DEFAULT_METHOD]
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=methods, help=what)
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help=DEFAULT)
    what = (
        "engines that are up together (default: on GPUs 2, which share the memory, on a CPU as "
        "many as fit); 1 where the memory holds no two copies of the target"
    )
    parser.add_argument("--engines-at-once", type=positive, metavar="N", help=what)
    what = "stop before any weights are read"
    parser.add_argument("--statistics-only", action="store_true", help=what)
    what = (
        "measure each drafter in several ways side by side: by name, further keys of "
        '--speculative-config, as {"chain": {}, "tree": {"tree_nodes": 8}}'
    )
    parser.add_argument("--settings", type=dictionary, default={}, metavar="JSON", help=what)
    what = "run code of the models' repositories"
    parser.add_argument("--trust-remote-code", action="store_true", help=what)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Compare, measure and print; if some drafters fail, print the others and then raise."""
    given, public = arguments.drafters, dict[str, Any]()
    if not given:
        known = known_for(arguments.target, arguments.trust_remote_code)
        given = [each.name for each in known if each.is_local]
        public = {"known": [each._asdict() | {"is_local": each.is_local} for each in known]}
        if not arguments.json:
            _show_known(known, Console())
        if not given:
            if arguments.json:
                tables.print_json({"target": arguments.target, **public})
            return
    suite = suite_of(
        arguments,
        given,
        arguments.methods,
        arguments.batch_sizes,
        arguments.temperatures,
        name="advise",
        repeats=arguments.repeats,
        engines_at_once=arguments.engines_at_once,
    )
    if not arguments.statistics_only:
        engines.check_arguments(suite)
    (target,) = suite.targets
    file = arguments.prompts
    documents = load_prompts(file) if file else documents_of(CALIBRATION_TEXT)
    dtype = arguments.speculative_config.get("dtype") or arguments.engine_args.get("dtype")
    dtype = str(dtype or ("auto" if engines.on_gpu() else "float32"))
    sequences = suite.batch_sizes[-1]
    drafters = look_at(target, documents, dtype, sequences, arguments.statistics_only)
    used = [facts.drafter for facts in drafters if not facts.not_measured]
    measured = Measured()
    if used:
        apart = tuple(each for drafter in used for each in drafter.in_each_setting())
        suite = replace(suite, targets=(replace(target, drafters=apart),))
        measured = _measure(suite, arguments.verbose)
    if arguments.json:
        tables.print_json(_as_json(arguments.target, suite, drafters, measured) | public)
    else:
        _show(arguments.target, drafters, measured, Console())
    if measured.failures:
        raise MeasurementError("; ".join(measured.failures))


def _show_known(found: Sequence[KnownDrafter], console: Console) -> None:
    """Print public drafters, with the command that fetches one that is not on this machine."""
    say = functools.partial(tables.say, console)
    if not found:
        say("The target is so small that no known drafter is much faster.")
        return
    say("Public drafters, the most promising first (figures of their model cards):", "bold")
    for each in found:
        kind = "parallel drafter, " if each.parallel else ""
        chat = "chat template" if each.chat else "no chat template"
        say(f"{each.name}: {'on this machine' if each.is_local else 'hf download ' + each.name}")
        say(
            f"  {kind}{each.millions:,} M parameters, {each.layers} layers, {each.tokenizer} "
            f"tokenizer, languages: {each.languages}, {chat}, licence: {each.licence}",
            "dim",
        )


def _measure(suite: Suite, verbose: bool) -> Measured:
    """Measure all drafters, of which some may fail; MeasurementError if the target alone fails."""
    header = conditions(suite)
    at_once = header["engines_at_once"]
    start = functools.partial(engines.start, suite=suite, at_once=at_once, verbose=verbose)
    results = Results(header=header)
    plan = make_plan(suite, at_once, lambda target, drafter: None)
    run_plan(plan, suite, results, start, ProgressReporter(Console(stderr=True)))
    for cell, reason in results.contents.errors.items():
        if cell.engine.method == ALONE:
            raise MeasurementError(f"the target alone: {reason}")
    return compared(suite, results.contents)


def _of_text(
    name: str, key: str, meaning: str, write: Callable[[float | None], str] = tables.percent
) -> Column[DrafterFacts]:
    return Column(name, lambda facts: write(getattr(facts.statistics, key)), meaning)


_TOKENIZERS: tuple[Column[DrafterFacts], ...] = (
    Column("drafter", lambda facts: facts.drafter.name),
    _of_text("omega_T", "omega_t", "target tokens that the drafter has too"),
    _of_text("omega_K", "omega_k", "target tokens that some drafter token begins"),
    _of_text("target spans", "target_straddle", "target tokens with a drafter boundary inside"),
    _of_text("drafter spans", "drafter_straddle", "the reverse"),
    _of_text("tokens", "tokens_ratio", "of the drafter for each target's", tables.number),
)
_LOADS: tuple[Column[Row], ...] = (
    Column("temp.", lambda row: f"{row.cell.temperature:g}"),
    Column("batch", lambda row: str(row.cell.batch_size)),
    Column("drafter", lambda row: engine_name(row.cell.engine)),
    Column("tok/s", lambda row: tables.number(row.figures.tokens_per_second.median, 1)),
    Column("acceptance", acceptance_length),
    Column("speedup", lambda row: tables.ratio(row.speedup)),
)
_LOADS_NOTE = (
    "tok/s and speedup are medians over rounds of the whole load, prompts included; a speedup is "
    "over the target alone in the same round, with its range. Acceptance is the acceptance length, "
    "1 + accepted / drafts; a dash where nothing was drafted."
)


def _show(
    target: str, drafters: Sequence[DrafterFacts], measured: Measured, console: Console
) -> None:
    say = functools.partial(tables.say, console)
    say(f"target   {target}")
    known = [facts for facts in drafters if facts.statistics is not None]
    console.print(tables.terminal_table(_TOKENIZERS, known, "tokenizers on the text"))
    say(tables.meanings(_TOKENIZERS), "dim")
    for facts in drafters:
        if facts.statistics is not None:
            say(f"{facts.drafter.name}: {_memory_and_method(facts)}.")
        if facts.not_measured:
            say(f"{facts.drafter.name}: {facts.not_measured}", "yellow")
    if not measured.rows:
        return
    console.print(tables.terminal_table(_LOADS, measured.rows, "loads"))
    for note in (_LOADS_NOTE, *measured.notes):
        say(note, "dim")
    for failure in measured.failures:
        say(f"not measured: {failure}", "red")
    ranking = measured.ranking
    for candidate in ranking:
        if not any(row.figures.drafts for row in candidate.rows):
            skipped = dict.fromkeys(why for row in candidate.rows for why in row.figures.skipped)
            reasons = ", ".join(skipped) or "the controller left the target alone"
            say(f"{engine_name(candidate.engine)}: nothing was drafted ({reasons}).", "yellow")
    if not ranking:
        return
    lines = [
        (str(place), engine_name(each.engine), tables.ratio(each.speedup), measured.verdict(each))
        for place, each in enumerate(ranking, 1)
    ]
    title = "ranking, by the geometric mean over the loads"
    console.print(tables.drawn(("", "drafter", "speedup", "verdict"), lines, title))
    for sentence in prospects(measured.rows, ranking[0].rows, ranking[0].config):
        say(f"{engine_name(ranking[0].engine)}: {sentence}")
    if measured.recommended is None:
        say(_none_is_faster(ranking), "bold")
        return
    say("--speculative-config", "bold")
    say(f"'{json.dumps(measured.recommended.config)}'", "bold")


def _memory_and_method(facts: DrafterFacts) -> str:
    memory, suggested = facts.memory, facts.suggested
    assert memory is not None  # it is known where the statistics are
    assert suggested is not None
    weights, kv = map(tables.mebibytes, (memory.weight_bytes, memory.kv_bytes))
    return (
        f"{weights} MiB of weights, {kv} MiB of KV for batch {memory.sequences} of "
        f"{memory.tokens:,} tokens; the tokenizers suggest {suggested.method} for sampled requests "
        f"({suggested.reason})"
    )


def _none_is_faster(ranking: Sequence[Candidate]) -> str:
    partly = [
        f"{engine_name(candidate.engine)} at {'; '.join(candidate.faster_loads)}"
        for candidate in ranking
        if candidate.faster_loads
    ]
    if partly:
        return (
            f"No drafter makes the target faster over all of these loads. {'. '.join(partly)}: "
            "name these with --batch-sizes and --temperatures for a configuration."
        )
    if all(candidate.slower for candidate in ranking):
        return "The target alone is faster than with any drafter under these loads."
    return (
        "No drafter makes the target faster in all rounds of these loads; more --repeats and "
        "longer completions resolve small differences."
    )


def _as_json(
    name: str, suite: Suite, drafters: Sequence[DrafterFacts], measured: Measured
) -> dict[str, Any]:
    """JSON output; times in seconds, shares between 0 and 1."""
    (target,) = suite.targets
    alone = [row for row in measured.rows if row.cell.engine.drafter is None]
    return {
        "target": name,
        "target_zero_mlp_columns": (widened_columns(target.model) or (0, 0))[0],
        "load": {
            "prompts": len(suite.prompts[target.name][PROMPTS]),
            "max_tokens": suite.max_tokens,
            "batch_sizes": suite.batch_sizes,
            "temperatures": suite.temperatures,
            "repeats": suite.repeats,
            "num_speculative_tokens": suite.num_speculative_tokens[0],
        },
        "drafters": [_drafter(facts) for facts in drafters],
        "target_alone": [_load(row) for row in alone],
        "measured": [_candidate(measured, each) for each in measured.candidates],
        "recommended": measured.recommended and measured.recommended.config,
    }


def _candidate(measured: Measured, candidate: Candidate) -> dict[str, Any]:
    return {
        "drafter": candidate.engine.drafter,
        "method": candidate.engine.method,
        "speculative_config": candidate.config,
        "failure": candidate.failure,
        "speedup": candidate.speedup,
        "verdict": measured.verdict(candidate),
        "loads": [_load(row) for row in candidate.rows],
    }


def _drafter(facts: DrafterFacts) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": facts.drafter.name,
        "model": facts.drafter.model,
        "not_measured": facts.not_measured,
    }
    if facts.statistics is None or facts.memory is None:
        return data
    return data | {
        "statistics": {
            **tables.as_data(facts.statistics),
            "drafter_tokens_per_target_token": facts.statistics.tokens_ratio,
            "shared_tokens": facts.shared_tokens,
        },
        "suggested_method": facts.suggested,
        "memory": {**tables.as_data(facts.memory), "kv_bytes": facts.memory.kv_bytes},
    }


def _load(row: Row) -> dict[str, Any]:
    return {
        "temperature": row.cell.temperature,
        "batch_size": row.cell.batch_size,
        "tokens_per_second": row.figures.tokens_per_second.median,
        "speedup": row.speedup,
        "acceptance_length": row.figures.acceptance_length,
        "acceptance_error": row.figures.acceptance_error,
        "identical": row.identical,
        "skipped": row.figures.skipped,
    }
