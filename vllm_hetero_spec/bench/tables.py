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

_CELL: tuple[Column[Row], ...] = (
    Column("dataset", lambda row: row.cell.dataset),
    Column("target", lambda row: row.cell.engine.target),
    Column("method", lambda row: row.cell.engine.method),
    Column("drafter", lambda row: row.cell.engine.drafter or NONE),
    Column("K", lambda row: count(row.cell.engine.lookahead)),
    Column("temperature", lambda row: f"{row.cell.temperature:g}"),
    Column("batch", lambda row: str(row.cell.batch_size)),
)
TIMES: tuple[Column[Row], ...] = (
    Column("TTFT (ms)", lambda row: median(row.figures.ttft)),
    Column("TPOT (ms)", lambda row: median(row.figures.tpot)),
    Column("tok/s", lambda row: number(row.figures.tokens_per_second.median, 1)),
    Column("speedup", lambda row: ratio(row.speedup)),
)
ACCEPTED: tuple[Column[Row], ...] = (
    Column(
        "acceptance length",
        lambda row: with_error(row.figures.acceptance_length, row.figures.acceptance_error),
    ),
    Column("identical", lambda row: " of ".join(map(str, row.identical or ())) or NONE),
)
SPEED = (
    *_CELL,
    *TIMES,
    Column("over hf_alone", lambda row: ratio(row.speedup_over_hf)),
    *ACCEPTED,
)
SPEED_NOTE = (
    "TTFT and TPOT are medians over requests, tok/s the median over rounds. A speedup is the "
    "median, with the range, of the ratios to `alone` in the same round. Acceptance length is "
    "1 + accepted / drafts, with its standard error over prompts. Identical counts, at temperature "
    "0, the prompts whose tokens are in every round those of `alone`, for Hugging Face's method "
    "those of `hf_alone`. K is in target tokens, for Hugging Face's method in the drafter's."
)
LATENCY = (
    *_CELL,
    Column("TTFT p50 / p90 / p99 (ms)", lambda row: tail(row.figures.ttft)),
    Column("TPOT p50 / p90 / p99 (ms)", lambda row: tail(row.figures.tpot)),
    Column("ITL p50 / p90 / p99 (ms)", lambda row: tail(row.figures.itl)),
    Column("tokens", lambda row: count(row.figures.tokens)),
    Column("peak memory (MiB)", lambda row: mebibytes(row.figures.peak_memory_bytes)),
)
LATENCY_NOTE = (
    "TPOT is a request's time per token after the first arrival; ITL the gaps between arrivals, "
    "which bring several tokens where drafts are accepted."
)
COUNTS: tuple[Column[Row], ...] = (
    Column("drafts", lambda row: count(row.figures.drafts)),
    Column("drafter tokens", lambda row: count(row.figures.drafter_tokens)),
    Column("proposed", lambda row: count(row.figures.draft_tokens)),
    Column("accepted", lambda row: count(row.figures.accepted_tokens)),
    Column(
        "accepted at position 1, 2, ...",
        lambda row: " ".join(map(number, row.figures.acceptance_per_position)) or NONE,
    ),
    Column("translating (s)", lambda row: number(row.figures.translate_seconds)),
    Column("drafting (s)", lambda row: number(row.figures.forward_seconds)),
    Column("proposing in all (s)", lambda row: number(row.figures.propose_seconds)),
    Column("verifying (s)", lambda row: number(row.figures.verify_seconds)),
    Column(
        "undrafted",
        lambda row: ", ".join(f"{why} {n:,}" for why, n in row.figures.skipped.items()) or NONE,
    ),
)
SPECULATION = (*_CELL, *COUNTS)
SPECULATION_NOTE = (
    "Sums over all rounds. Proposed and accepted are target tokens; the share accepted at a "
    "position is of all drafts. Verifying is the sampler alone. A dash is what an engine does not "
    "count."
)
