# SPDX-License-Identifier: Apache-2.0
"""The tables of a report: which figures stand in which column, and how they are written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_hetero_spec.bench.figures import Quantiles, Spread
from vllm_hetero_spec.bench.rows import Row

_MIB = 1 << 20
_NONE = "-"


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and what it shows of a row."""

    head: str
    show: Callable[[Row], str]


def markdown_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = [[column.head for column in columns], ["---"] * len(columns)]
    lines += [[column.show(row).replace("|", "\\|") for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _milliseconds(found: Quantiles | None) -> str:
    return f"{found.median * 1e3:.1f}" if found else _NONE


def _tail(found: Quantiles | None) -> str:
    values = (found.median, found.p90, found.p99) if found else ()
    return " / ".join(f"{value * 1e3:.1f}" for value in values) or _NONE


def _ratio(found: Spread | None) -> str:
    return f"{found.median:.2f}x ({found.low:.2f}-{found.high:.2f})" if found else _NONE


def _rate(found: Spread) -> str:
    return f"{found.median:.1f}"


def _seconds(found: float | None) -> str:
    return f"{found:.2f}" if found is not None else _NONE


def _count(found: float | None) -> str:
    return f"{found:,.0f}" if found is not None else _NONE


def _shares(found: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in found) or _NONE


_CELL = (
    Column("dataset", lambda row: row.cell.dataset),
    Column("target", lambda row: row.cell.engine.target),
    Column("method", lambda row: row.cell.engine.method),
    Column("drafter", lambda row: row.cell.engine.drafter or _NONE),
    Column("K", lambda row: _count(row.cell.engine.lookahead)),
    Column("temperature", lambda row: f"{row.cell.temperature:g}"),
    Column("batch", lambda row: str(row.cell.batch_size)),
)
SPEED = (
    *_CELL,
    Column("TTFT (ms)", lambda row: _milliseconds(row.figures.ttft)),
    Column("TPOT (ms)", lambda row: _milliseconds(row.figures.tpot)),
    Column("tok/s", lambda row: _rate(row.figures.tokens_per_second)),
    Column("speedup", lambda row: _ratio(row.speedup)),
    Column("over hf_alone", lambda row: _ratio(row.speedup_over_hf)),
    Column("acceptance length", lambda row: _seconds(row.figures.acceptance_length)),
    Column("identical", lambda row: " of ".join(map(str, row.identical or ())) or _NONE),
)
SPEED_NOTE = (
    "TTFT and TPOT are medians over requests, tok/s the median over rounds. A speedup is the "
    "median, with the range, of the ratios to `alone` in the same round. Acceptance length is "
    "1 + accepted / drafts. Identical counts, at temperature 0, the prompts whose tokens are in "
    "every round those of `alone`, for Hugging Face's method those of `hf_alone`. K is in target "
    "tokens, for Hugging Face's method in the drafter's."
)
LATENCY = (
    *_CELL,
    Column("TTFT p50 / p90 / p99 (ms)", lambda row: _tail(row.figures.ttft)),
    Column("TPOT p50 / p90 / p99 (ms)", lambda row: _tail(row.figures.tpot)),
    Column("ITL p50 / p90 / p99 (ms)", lambda row: _tail(row.figures.itl)),
    Column("tokens", lambda row: _count(row.figures.tokens)),
    Column("peak memory (MiB)", lambda row: _count(row.figures.peak_memory_bytes / _MIB)),
)
LATENCY_NOTE = (
    "TPOT is a request's time per token after the first arrival; ITL the gaps between arrivals, "
    "which bring several tokens where drafts are accepted."
)
SPECULATION = (
    *_CELL,
    Column("drafts", lambda row: _count(row.figures.drafts)),
    Column("drafter tokens", lambda row: _count(row.figures.drafter_tokens)),
    Column("proposed", lambda row: _count(row.figures.draft_tokens)),
    Column("accepted", lambda row: _count(row.figures.accepted_tokens)),
    Column(
        "accepted at position 1, 2, ...", lambda row: _shares(row.figures.acceptance_per_position)
    ),
    Column("translating (s)", lambda row: _seconds(row.figures.translate_seconds)),
    Column("drafting (s)", lambda row: _seconds(row.figures.forward_seconds)),
    Column("proposing in all (s)", lambda row: _seconds(row.figures.propose_seconds)),
    Column("verifying (s)", lambda row: _seconds(row.figures.verify_seconds)),
    Column(
        "undrafted",
        lambda row: ", ".join(f"{why} {n:,}" for why, n in row.figures.skipped.items()) or _NONE,
    ),
)
SPECULATION_NOTE = (
    "Sums over all rounds. Proposed and accepted are target tokens; the share accepted at a "
    "position is of all drafts. Verifying is the sampler alone. A dash is what an engine does not "
    "count."
)
