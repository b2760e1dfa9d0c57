# SPDX-License-Identifier: Apache-2.0
"""The tables of a report: which figures stand in which column, and what they mean."""

from vllm_hetero_spec.bench.rows import Row
from vllm_hetero_spec.report.tables import Column
from vllm_hetero_spec.report.values import (
    NONE,
    count,
    mebibytes,
    median,
    number,
    ratio,
    tail,
    with_error,
)


def acceptance_length(row: Row) -> str:
    """1 + accepted / drafts, with its standard error over prompts."""
    return with_error(row.figures.acceptance_length, row.figures.acceptance_error)


CELL: tuple[Column[Row], ...] = (
    Column("dataset", lambda row: row.cell.dataset),
    Column("target", lambda row: row.cell.engine.target),
    Column("method", lambda row: row.cell.engine.method),
    Column("drafter", lambda row: row.cell.engine.drafter or NONE),
    Column(
        "K",
        lambda row: count(row.cell.engine.lookahead),
        "lookahead in target tokens, for Hugging Face's method in the drafter's",
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
    Column("peak memory (MiB)", lambda row: mebibytes(row.figures.peak_memory_bytes)),
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
SPECULATION = (*CELL, *COUNTS)
