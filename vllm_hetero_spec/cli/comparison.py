# SPDX-License-Identifier: Apache-2.0
"""Two measurements of one target side by side, for people and for programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_hetero_spec.measure.load import Sample

_SAMPLES = 2
_SAMPLE_LENGTH = 240  # characters


@dataclass(frozen=True)
class Comparison:
    """A target measured alone and with a drafter.

    Attributes:
        target: Name or folder.
        drafter: Name or folder.
        prompts: The prompts of both measurements.
        greedy: Temperature 0, where both must generate the same tokens.
        alone: The target alone.
        speculative: The target with the drafter.
        widened: Zero and all MLP columns of a target made slower on purpose.
    """

    target: str
    drafter: str
    prompts: Sequence[str]
    greedy: bool
    alone: Sample
    speculative: Sample
    widened: tuple[int, int] | None = None

    @property
    def identical(self) -> int | None:
        """Prompts completed with the same tokens by both; None if sampled."""
        if not self.greedy:
            return None
        pairs = zip(self.alone.traces, self.speculative.traces, strict=True)
        return sum(alone.token_ids == other.token_ids for alone, other in pairs)

    @property
    def speedup(self) -> float:
        """Ratio of tokens per second."""
        return self.speculative.tokens_per_second / self.alone.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """Every figure of the table, under stable names; times in seconds."""
        worker = self.speculative.worker
        return {
            "target": self.target,
            "drafter": self.drafter,
            "target_zero_mlp_columns": self.widened[0] if self.widened else 0,
            "prompts": len(self.prompts),
            "identical": self.identical,
            "speedup": self.speedup,
            "alone": _speed(self.alone),
            "speculative": {
                **_speed(self.speculative),
                "acceptance_length": self.speculative.acceptance_length,
                "drafts": self.speculative.drafts,
                "draft_tokens": self.speculative.draft_tokens,
                "accepted_tokens": self.speculative.accepted_tokens,
                "drafter_tokens": worker["drafter_tokens"],
                **{name: worker[name] for name in _TIMES},
                "skipped": worker["skipped"],
            },
        }

    def show(self, console: Console) -> None:
        """Print sample texts and the table."""
        pairs = zip(self.prompts, self.alone.traces, self.speculative.traces, strict=True)
        for prompt, *traces in list(pairs)[:_SAMPLES]:
            alone, speculative = (trace.text for trace in traces)
            console.rule("a prompt's end and its completion", align="left")
            console.print(f"[dim]{escape(_end(prompt))}[/]", end="", highlight=False)
            console.print(f"[bold]{escape(_start(speculative))}[/]", highlight=False)
            if self.greedy and alone != speculative:
                console.print("[red]the target alone wrote:[/]")
                console.print(escape(_start(alone)), highlight=False)
        console.rule()
        console.print(f"target   {self.target}", highlight=False, soft_wrap=True)
        if self.widened:
            zero, columns = self.widened
            console.print(
                f"         widened with zero MLP columns: {zero:,} of {columns:,} add nothing but "
                "cost",
                highlight=False,
            )
        console.print(f"drafter  {self.drafter}", highlight=False, soft_wrap=True)
        console.print(self._table())

    def _table(self) -> Table:
        table = Table("", "target alone", "with drafter")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, alone, speculative in self._rows():
            table.add_row(name, alone, speculative)
        return table

    def _rows(self) -> list[tuple[str, str, str]]:
        alone, speculative, worker = self.alone, self.speculative, self.speculative.worker
        length = speculative.acceptance_length
        rows = [
            ("token-identical", "", self._verdict()),
            ("tokens generated", f"{alone.tokens:,}", f"{speculative.tokens:,}"),
            (
                "tokens / s",
                f"{alone.tokens_per_second:.1f}",
                f"{speculative.tokens_per_second:.1f}",
            ),
            ("speedup", "", f"{self.speedup:.2f}x"),
            ("time to first token, median", _ms(_ttft(alone)), _ms(_ttft(speculative))),
            ("time per output token, median", _ms(_tpot(alone)), _ms(_tpot(speculative))),
            ("acceptance length", "1", f"{length:.2f}" if length else "no drafts"),
            ("drafts", "", f"{speculative.drafts:,}"),
            ("target tokens proposed", "", f"{speculative.draft_tokens:,}"),
            ("target tokens accepted", "", f"{speculative.accepted_tokens:,}"),
            ("drafter tokens generated", "", f"{worker['drafter_tokens']:,}"),
        ]
        rows += [(label, "", f"{worker[name]:.2f} s") for name, label in _TIMES.items()]
        rows.append(("time in all", f"{alone.seconds:.2f} s", f"{speculative.seconds:.2f} s"))
        skipped = {reason: count for reason, count in worker["skipped"].items() if count}
        rows += [(f"skipped: {reason}", "", f"{count:,}") for reason, count in skipped.items()]
        if not skipped:
            rows.append(("skipped", "", "none"))
        return rows

    def _verdict(self) -> str:
        if self.identical is None:
            return "not compared (sampled)"
        count = f"{self.identical} of {len(self.prompts)} prompts"
        return f"yes: {count}" if self.identical == len(self.prompts) else f"no: {count}"


# Counters of the worker that are times, as the table names them.
_TIMES = {
    "propose_seconds": "proposing, in all",
    "forward_seconds": "  drafter forwards",
    "translate_seconds": "  translating",
    "verify_seconds": "verifying (sampler only)",
}


def _speed(sample: Sample) -> dict[str, float | None]:
    return {
        "tokens": sample.tokens,
        "seconds": sample.seconds,
        "tokens_per_second": sample.tokens_per_second,
        "median_ttft_seconds": _ttft(sample),
        "median_tpot_seconds": _tpot(sample),
    }


def _ttft(sample: Sample) -> float:
    return median(trace.ttft for trace in sample.traces)


def _tpot(sample: Sample) -> float | None:
    """None where no completion took more than one step."""
    known = [tpot for trace in sample.traces if (tpot := trace.tpot) is not None]
    return median(known) if known else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _end(text: str) -> str:
    return text if len(text) <= _SAMPLE_LENGTH else "..." + text[-_SAMPLE_LENGTH:]


def _start(text: str) -> str:
    return text if len(text) <= _SAMPLE_LENGTH else text[:_SAMPLE_LENGTH] + "..."
