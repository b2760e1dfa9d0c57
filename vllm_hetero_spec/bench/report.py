# SPDX-License-Identifier: Apache-2.0
"""Report of a results file: Markdown, JSON, and a table on a terminal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_hetero_spec.bench import engines
from vllm_hetero_spec.bench.figures import Row, rows_of
from vllm_hetero_spec.bench.plan import Cell, EngineId
from vllm_hetero_spec.bench.results import Contents
from vllm_hetero_spec.bench.suite import ALONE, KINDS, Suite
from vllm_hetero_spec.bench.tables import (
    NONE,
    Column,
    as_data,
    count,
    markdown_table,
    meanings,
    mebibytes,
    median,
    number,
    ratio,
    say,
    tail,
    terminal_table,
    widened,
)
from vllm_hetero_spec.errors import one_line
from vllm_hetero_spec.inputs.model_folder import widened_columns
from vllm_hetero_spec.options import METHODS

MARKDOWN = "results.md"
SUMMARY = "summary.json"


def acceptance_length(row: Row) -> str:
    """Acceptance length with its standard error over prompts."""
    length, error = number(row.figures.acceptance_length), row.figures.acceptance_error
    return length if error is None else f"{length} ± {number(error)}"


CELL: tuple[Column[Row], ...] = (
    Column("dataset", lambda row: row.cell.dataset),
    Column("target", lambda row: row.cell.engine.target),
    Column("method", lambda row: row.cell.engine.method),
    Column("drafter", lambda row: row.cell.engine.drafter or NONE),
    Column(
        "K",
        lambda row: count(row.cell.engine.lookahead),
        "lookahead in target tokens, for Hugging Face's method in the drafter's, unless "
        "the drafter's setting has another",
    ),
    Column("temperature", lambda row: f"{row.cell.temperature:g}"),
    Column("batch", lambda row: str(row.cell.batch_size)),
)
TIMES: tuple[Column[Row], ...] = (
    Column(
        "TTFT (ms)",
        lambda row: median(row.figures.ttft),
        "time to the first token, median over requests",
    ),
    Column(
        "TPOT (ms)",
        lambda row: median(row.figures.tpot),
        "time per token after the first arrival, median over requests",
    ),
    Column(
        "tok/s",
        lambda row: number(row.figures.tokens_per_second.median, 1),
        "tokens per second of all requests, median over rounds",
    ),
    Column(
        "speedup",
        lambda row: ratio(row.speedup),
        "median, with the range, of the ratios of tok/s to `alone` in the same round",
    ),
)
SPEED: tuple[Column[Row], ...] = (
    *CELL,
    *TIMES,
    Column("over hf_alone", lambda row: ratio(row.speedup_over_hf)),
    Column(
        "over first setting",
        lambda row: ratio(row.speedup_over_first),
        "the same ratios to the first of the drafter's settings",
    ),
    Column(
        "acceptance length",
        acceptance_length,
        "1 + accepted / drafts ± its standard error over prompts",
    ),
    Column(
        "identical",
        lambda row: " of ".join(map(str, row.identical or ())) or NONE,
        "prompts at temperature 0 whose tokens are in every round those of `alone`, for Hugging "
        "Face's method those of `hf_alone`",
    ),
)
LATENCY: tuple[Column[Row], ...] = (
    *CELL,
    Column("TTFT p50 / p90 / p99 (ms)", lambda row: tail(row.figures.ttft)),
    Column("TPOT p50 / p90 / p99 (ms)", lambda row: tail(row.figures.tpot)),
    Column(
        "ITL p50 / p90 / p99 (ms)",
        lambda row: tail(row.figures.itl),
        "gaps between arrivals, which bring several tokens where drafts are accepted",
    ),
    Column("tokens", lambda row: count(row.figures.tokens)),
    Column(
        "peak memory (MiB)",
        lambda row: mebibytes(row.figures.peak_memory_bytes),
        "on GPUs tensors of the workers (for vLLM with the whole KV pool and without a drafter "
        "process of its own), on CPUs resident memory of all processes",
    ),
)
COUNTS: tuple[Column[Row], ...] = (
    Column("drafts", lambda row: count(row.figures.drafts), "sum over all rounds, as all here"),
    Column("drafter tokens", lambda row: count(row.figures.drafter_tokens)),
    Column("proposed", lambda row: count(row.figures.draft_tokens), "target tokens"),
    Column("accepted", lambda row: count(row.figures.accepted_tokens), "target tokens"),
    Column(
        "accepted at position 1, 2, ...",
        lambda row: " ".join(map(number, row.figures.acceptance_per_position)) or NONE,
        "share of all drafts",
    ),
    Column("translating (s)", lambda row: number(row.figures.translate_seconds)),
    Column("drafting (s)", lambda row: number(row.figures.forward_seconds)),
    Column("proposing in all (s)", lambda row: number(row.figures.propose_seconds)),
    Column("verifying (s)", lambda row: number(row.figures.verify_seconds), "the sampler alone"),
    Column(
        "undrafted",
        lambda row: ", ".join(f"{why} {n:,}" for why, n in row.figures.skipped.items()) or NONE,
        "requests left without a draft in a step, by reason",
    ),
)


def write_report(folder: Path, contents: Contents) -> list[Row]:
    """Write results.md and summary.json, and return the rows."""
    rows = rows_of(contents)
    (folder / MARKDOWN).write_text(markdown(contents, rows), encoding="utf-8")
    summary = {
        "suite": contents.header["suite"]["name"],
        "rows": [_as_data(row) for row in rows],
        "failed": {str(cell): reason for cell, reason in contents.errors.items()},
        "skipped": {str(cell): reason for cell, reason in contents.skipped.items()},
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return rows


def markdown(contents: Contents, rows: Sequence[Row]) -> str:
    parts = [f"# {contents.header['suite']['name']}", *_preamble(contents)]
    drafting = [row for row in rows if row.figures.drafts]
    for title, columns, shown in (
        ("Speed", SPEED, rows),
        ("Latency", LATENCY, rows),
        ("Speculation", (*CELL, *COUNTS), drafting),
    ):
        if shown:
            parts += [f"## {title}", markdown_table(columns, shown), meanings(columns)]
    parts += _listed("Failed", contents.errors)
    parts += _listed("Not measured", contents.skipped)
    return "\n\n".join(parts) + "\n"


def print_speed(contents: Contents, rows: Sequence[Row], console: Console) -> None:
    """Print the table of speeds: drawn on a terminal, otherwise as Markdown."""
    if console.is_terminal:
        console.print(terminal_table(SPEED, rows))
    else:
        say(console, markdown_table(SPEED, rows))
    for note in notes(contents):
        say(console, note)


def notes(contents: Contents) -> list[str]:
    """Sentences about conditions that affect the figures."""
    found = [widened(target, columns) for target, columns in contents.header["widened"].items()]
    cells = [recorded.run.cell for recorded in contents.samples]
    sampled = dict.fromkeys(c.engine.method for c in cells if c.temperature)
    stock = [
        m for m in sampled if m not in METHODS and KINDS[m].drafts and not KINDS[m].huggingface
    ]
    if stock and not contents.header["gpu"]:
        found.append(
            f"{', '.join(stock)}: on CPUs vLLM expands sampling parameters to draft rows wrongly, "
            "so that its own speculation cannot sample. It is measured with this package's repair "
            "of that one function, which every engine has where the plugin is loaded."
        )
    if contents.header["engines_at_once"] == 1:
        found.append(
            "One engine was up at a time: speedups compare runs that were not measured in the "
            "same period."
        )
    return found + runner_notes(contents)


def runner_notes(contents: Contents) -> list[str]:
    """Sentences about methods that ran on another model runner than the target alone."""
    runners = {
        recorded.run.cell.engine: recorded.sample.runner
        for recorded in contents.samples
        if recorded.sample.runner
    }
    apart: dict[tuple[str, str], dict[str, None]] = {}
    for engine, runner in runners.items():
        alone = runners.get(EngineId(engine.target, ALONE), runner)
        if alone != runner:
            apart.setdefault((runner, alone), {})[engine.method] = None
    return [
        f"{', '.join(methods)}: on vLLM's Model Runner {runner}, the target alone on {alone}, so "
        "that a speedup includes the difference between the runners; VLLM_USE_V2_MODEL_RUNNER=0 "
        "runs all engines on V1."
        for (runner, alone), methods in apart.items()
    ]


def conditions(suite: Suite) -> dict[str, Any]:
    """The part of a header that `notes` reads."""
    found = {target.name: widened_columns(target.model) for target in suite.targets}
    return {
        "engines_at_once": engines.at_once_for(suite),
        "gpu": engines.on_gpu(),
        # Numbers of zero and of all MLP columns.
        "widened": {name: columns for name, columns in found.items() if columns},
    }


def _preamble(contents: Contents) -> list[str]:
    header = contents.header
    suite, origin = header["suite"], header["provenance"]
    machine = origin["machine"]
    versions = ", ".join(f"{name} {found}" for name, found in origin["versions"].items() if found)
    devices = "; ".join(machine["gpus"]) or "no GPU"
    source = origin["source"]
    changed = " with changes" if source.get("dirty") else ""
    lines = [
        f"- started {header['started']}"
        + "".join(f", gone on with {session['started']}" for session in contents.resumed),
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {devices}",
        f"- {versions}" + (f", revision {source['revision'][:12]}{changed}" if source else ""),
        f"- {suite['repeats']} rounds, up to {suite['max_tokens']} tokens per prompt, "
        f"seed {suite['seed']}, {header['engines_at_once']} engines up at once at most; "
        f"suite {header['digest'][:12]}",
    ]
    if any(session["provenance"] != origin for session in contents.resumed):
        lines.append("- **versions, machine or sources changed between sessions**")
    return ["\n".join(lines), *notes(contents)]


def _listed(title: str, reasons: dict[Cell, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for cell, reason in reasons.items():
        by_reason.setdefault(one_line(reason), []).append(f"`{cell}`")
    if not by_reason:
        return []
    lines = [f"- {reason}: {', '.join(cells)}" for reason, cells in by_reason.items()]
    return [f"## {title}", "\n".join(lines)]


def _as_data(row: Row) -> dict[str, Any]:
    plain = as_data(row)
    del plain["cell"]
    return {"name": str(row.cell), **row.cell.flat(), **plain}
