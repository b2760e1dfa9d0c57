# SPDX-License-Identifier: Apache-2.0
"""Advice as it is told: tables and a line to paste for people, stable names for programs."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from vllm_hetero_spec.advice.drafters import DrafterFacts
from vllm_hetero_spec.advice.measuring import DATASET, Candidate, Measured, engine_name
from vllm_hetero_spec.advice.prospects import prospects
from vllm_hetero_spec.bench.figures import Row
from vllm_hetero_spec.bench.suite import Suite
from vllm_hetero_spec.bench.tables import (
    NONE,
    Column,
    as_data,
    meanings,
    mebibytes,
    number,
    percent,
    ratio,
    terminal_table,
    with_error,
)
from vllm_hetero_spec.inputs.model_folder import widened_columns


def _of_text(
    name: str, key: str, meaning: str, write: Callable[[float | None], str] = percent
) -> Column[DrafterFacts]:
    return Column(name, lambda facts: write(getattr(facts.statistics, key)), meaning)


_TOKENIZERS: tuple[Column[DrafterFacts], ...] = (
    Column("drafter", lambda facts: facts.drafter.name),
    _of_text("omega_T", "omega_t", "target tokens that the drafter has too"),
    _of_text("omega_K", "omega_k", "target tokens that some drafter token begins"),
    _of_text("target spans", "target_straddle", "target tokens with a drafter boundary inside"),
    _of_text("drafter spans", "drafter_straddle", "the reverse"),
    _of_text("tokens", "tokens_ratio", "of the drafter for each target's", number),
)
_LOADS: tuple[Column[Row], ...] = (
    Column("temp.", lambda row: f"{row.cell.temperature:g}"),
    Column("batch", lambda row: str(row.cell.batch_size)),
    Column("drafter", lambda row: engine_name(row.cell.engine)),
    Column("tok/s", lambda row: number(row.figures.tokens_per_second.median, 1)),
    Column(
        "acceptance",
        lambda row: with_error(row.figures.acceptance_length, row.figures.acceptance_error),
    ),
    Column("speedup", lambda row: ratio(row.speedup)),
)
_LOADS_NOTE = (
    "tok/s and speedup are medians over rounds of the whole load, prompts included; a speedup is "
    "over the target alone in the same round, with its range. Acceptance is the acceptance length, "
    "1 + accepted / drafts; a dash where nothing was drafted."
)


def show(
    target: str, drafters: Sequence[DrafterFacts], measured: Measured | None, console: Console
) -> None:
    """Print everything; None where nothing was measured."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)

    say(f"target   {target}")
    known = [facts for facts in drafters if facts.statistics is not None]
    console.print(terminal_table(_TOKENIZERS, known, "tokenizers on the text"))
    say(meanings(_TOKENIZERS), "dim")
    for facts in drafters:
        if facts.statistics is not None:
            say(f"{facts.drafter.name}: {_memory_and_method(facts)}.")
        if facts.not_measured:
            say(f"{facts.drafter.name}: {facts.not_measured}", "yellow")
    if measured is None:
        return
    console.print(terminal_table(_LOADS, measured.rows, "loads"))
    for note in (_LOADS_NOTE, *measured.notes):
        say(note, "dim")
    for failure in measured.failures:
        say(f"not measured: {failure}", "red")
    for candidate in measured.ranking:
        if not any(row.figures.drafts for row in candidate.rows):
            skipped = dict.fromkeys(why for row in candidate.rows for why in row.figures.skipped)
            reasons = ", ".join(skipped) or "the controller left the target alone"
            say(f"{engine_name(candidate.engine)}: nothing was drafted ({reasons}).", "yellow")
    if not measured.ranking:
        return
    ranking: tuple[Column[Candidate], ...] = (
        Column("", lambda candidate: str(measured.ranking.index(candidate) + 1)),
        Column("drafter", lambda candidate: engine_name(candidate.engine)),
        Column("speedup", lambda candidate: ratio(candidate.speedup)),
        Column("verdict", measured.verdict),
    )
    title = "ranking, by the geometric mean over the loads"
    console.print(terminal_table(ranking, measured.ranking, title))
    first = measured.ranking[0]
    for sentence in prospects(measured.rows, first.rows, first.config):
        say(f"{engine_name(first.engine)}: {sentence}")
    if measured.recommended is None:
        say(_none_is_faster(measured), "bold")
        return
    say("--speculative-config", "bold")
    say(f"'{json.dumps(measured.recommended.config)}'", "bold")


def as_json(
    target: str, suite: Suite, drafters: Sequence[DrafterFacts], measured: Measured | None
) -> dict[str, Any]:
    """The same under stable names; times in seconds, shares between 0 and 1."""
    widened = widened_columns(suite.targets[0].model)
    data: dict[str, Any] = {
        "target": target,
        "target_zero_mlp_columns": widened[0] if widened else 0,
        "load": {
            "prompts": len(suite.prompts[suite.targets[0].name][DATASET]),
            "max_tokens": suite.max_tokens,
            "batch_sizes": suite.batch_sizes,
            "temperatures": suite.temperatures,
            "repeats": suite.repeats,
            "num_speculative_tokens": suite.num_speculative_tokens[0],
        },
        "drafters": [_drafter(facts) for facts in drafters],
        "target_alone": [],
        "measured": [],
        "recommended": None,
    }
    if measured is not None:
        alone = [row for row in measured.rows if row.cell.engine.drafter is None]
        data["target_alone"] = [_load(row) for row in alone]
        data["measured"] = [_candidate(measured, candidate) for candidate in measured.candidates]
        data["recommended"] = measured.recommended and measured.recommended.config
    return data


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
            **as_data(facts.statistics),
            "drafter_tokens_per_target_token": facts.statistics.tokens_ratio,
            "shared_tokens": facts.shared_tokens,
        },
        "suggested_method": as_data(facts.suggested),
        "memory": {**as_data(facts.memory), "kv_bytes": facts.memory.kv_bytes},
    }


def _candidate(measured: Measured, candidate: Candidate) -> dict[str, Any]:
    return {
        "drafter": candidate.engine.drafter,
        "method": candidate.engine.method,
        "speculative_config": candidate.config,
        "failure": candidate.failure,
        "speedup": as_data(candidate.speedup),
        "verdict": measured.verdict(candidate),
        "loads": [_load(row) for row in candidate.rows],
    }


def _load(row: Row) -> dict[str, Any]:
    return {
        "temperature": row.cell.temperature,
        "batch_size": row.cell.batch_size,
        "tokens_per_second": row.figures.tokens_per_second.median,
        "speedup": as_data(row.speedup),
        "acceptance_length": row.figures.acceptance_length,
        "acceptance_error": row.figures.acceptance_error,
        "identical": row.identical,
        "skipped": row.figures.skipped,
    }


def _memory_and_method(facts: DrafterFacts) -> str:
    memory, suggested = facts.memory, facts.suggested
    if memory is None or suggested is None:
        return NONE
    return (
        f"{mebibytes(memory.weight_bytes)} MiB of weights, {mebibytes(memory.kv_bytes)} MiB of KV "
        f"for batch {memory.sequences} of {memory.tokens:,} tokens; the tokenizers suggest "
        f"{suggested.method} for sampled requests ({suggested.reason})"
    )


def _none_is_faster(measured: Measured) -> str:
    partly = [
        f"{engine_name(candidate.engine)} at {'; '.join(candidate.faster_loads)}"
        for candidate in measured.ranking
        if candidate.faster_loads
    ]
    if partly:
        return (
            f"No drafter makes the target faster over all of these loads. {'. '.join(partly)}: "
            "name these with --batch-sizes and --temperatures for a configuration."
        )
    if all(candidate.slower for candidate in measured.ranking):
        return "The target alone is faster than with any drafter under these loads."
    return (
        "No drafter makes the target faster in all rounds of these loads; more --repeats and "
        "longer completions tell small differences apart."
    )
