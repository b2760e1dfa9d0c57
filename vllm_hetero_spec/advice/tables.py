# SPDX-License-Identifier: Apache-2.0
"""Advice for people: tables, the order of what was measured, and one line to paste."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_hetero_spec.advice.findings import Advice, Candidate, DrafterFindings, Place
from vllm_hetero_spec.advice.pairs import PairView

_NOTE = (
    "Times in ms. t_V: a step of the target alone; verify: one that verifies {plan.lookahead} "
    "tokens of each request; t_D: a forward of the drafter; k: the best lookahead. Speedup: tokens "
    "per second of the whole load ({prompts} prompts, {plan.max_tokens} tokens each, reading the "
    "prompts included), over those of the target alone, as `bench` has it, and where 90 % of "
    "resampled requests and repeats lie."
)
_TOKENIZER_NOTE = (
    "omega_T: target tokens that the drafter has; omega_K: that some drafter token begins; spans: "
    "tokens with the other's boundary inside; tokens: of the drafter for one of the target. "
    "`vllm-hetero-spec inspect` tells more of a pair."
)


def show(advice: Advice, console: Console) -> None:
    """Print everything."""
    console.print(f"target   {advice.target}", highlight=False, markup=False, soft_wrap=True)
    if advice.widened:
        zero, columns = advice.widened
        console.print(
            f"         widened with zero MLP columns: {zero:,} of {columns:,} add nothing but cost",
            highlight=False,
        )
    views = [(each.name, each.view) for each in advice.drafters if each.view is not None]
    console.print(_tokenizers(views))
    console.print(_TOKENIZER_NOTE, highlight=False, style="dim")
    for drafter in advice.drafters:
        _show_drafter(advice, drafter, console)
    ranking = advice.ranking()
    if not ranking:
        return
    plan = advice.plan
    console.print(_NOTE.format(plan=plan, prompts=len(plan.prompts)), highlight=False, style="dim")
    console.print(_ranking(advice, ranking))
    recommended = advice.recommended()
    if recommended is None:
        console.print(
            "[bold]The target alone is faster than with any drafter under all of these loads.[/]"
        )
        return
    if plan.batch_sizes[-1] > 1:
        console.print(
            "The default controller, goodput, drafts less far or not at all where that is faster, "
            "as with larger batches.",
            highlight=False,
        )
    console.print("[bold]--speculative-config[/]")
    console.print(
        f"'{json.dumps(recommended)}'", highlight=False, markup=False, soft_wrap=True, style="bold"
    )


def _show_drafter(advice: Advice, drafter: DrafterFindings, console: Console) -> None:
    console.rule(f"drafter {escape(drafter.name)}", align="left")
    if drafter.view is not None:
        console.print(f"memory   {drafter.memory}", highlight=False)
        for temperature in advice.plan.temperatures:
            methods = " > ".join(choice.method for choice in drafter.view.methods(temperature))
            console.print(
                f"methods  at temperature {temperature:g} by the tokenizers: {methods}",
                highlight=False,
            )
    if drafter.stopped:
        console.print(drafter.stopped, highlight=False, markup=False, style="yellow")
    for candidate in drafter.candidates:
        if candidate.failure:
            sentence = f"{candidate.method} could not be measured: {candidate.failure}"
            console.print(sentence, highlight=False, markup=False, style="red")
        else:
            console.print(_measured(candidate))


def _table(title: str, *columns: str, numbers: int = 1) -> Table:
    """With numbers from a column on."""
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for column in table.columns[numbers:]:
        column.justify = "right"
    return table


def _tokenizers(drafters: Sequence[tuple[str, PairView]]) -> Table:
    heads = "omega_T", "omega_K", "target spans", "drafter spans", "tokens"
    table = _table("tokenizers on the text", "drafter", *heads)
    for name, view in drafters:
        found, ratio = view.statistics, view.tokens_ratio
        shares = found.omega_t, found.omega_k, found.target_straddle, found.drafter_straddle
        table.add_row(
            escape(Path(name).name),
            *(f"{share:.1%}" for share in shares),
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return table


def _measured(candidate: Candidate) -> Table:
    table = Table(
        *("temp", "batch", "t_V", "verify", "t_D", "k", "tokens/step", "speedup"),
        title=f"{candidate.method}: {escape(candidate.why)}",
        title_justify="left",
        title_style="bold",
    )
    for column in table.columns:
        column.justify = "right"
        column.no_wrap = True
    for (temperature, size), found in candidate.predictions.items():
        costs, best = found.costs, found.best
        table.add_row(
            f"{temperature:g}",
            str(size),
            _ms(costs.target(size, 0)),
            _ms(costs.target(size, costs.lookahead)),
            _ms(costs.drafter_step),
            str(best.lookahead),
            f"{best.tokens_per_round:.2f}",
            f"{best.speedup:.2f}x ({best.low:.2f}-{best.high:.2f})",
        )
    return table


def _ranking(advice: Advice, ranking: list[Place]) -> Table:
    loads = list(ranking[0].candidate.predictions)
    heads = [f"batch {size}, temp. {temperature:g}" for temperature, size in loads]
    table = _table("ranking", "", "drafter", "method", "k", *heads, numbers=3)
    for number, place in enumerate(ranking, 1):
        index = place.lookahead - 1
        speedups = [
            f"{found.foreseen[index].speedup:.2f}x"
            for found in place.candidate.predictions.values()
        ]
        name = Path(place.drafter.name).name
        table.add_row(
            str(number), escape(name), place.candidate.method, str(place.lookahead), *speedups
        )
    return table


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:,.0f}"
