# SPDX-License-Identifier: Apache-2.0
"""Plots of a report: speedup by batch size, acceptance by position, speed per user and in total.

There is one file per target and plot, with a panel per dataset and temperature.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_hetero_spec.bench.figures import Row
from vllm_hetero_spec.bench.values import optional

_PANEL = (5.0, 3.6)  # inches


def write_plots(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw the plots for which the rows have figures, and return the files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = optional("matplotlib.figure", "drawing plots").Figure
    written = []
    for target in dict.fromkeys(row.cell.engine.target for row in rows):
        own = [row for row in rows if row.cell.engine.target == target]
        file_name = re.sub(r"[^\w.-]", "_", target)
        for name, keep, draw in _PICTURES:
            kept = [row for row in own if keep(row)]
            if kept:
                path = folder / f"{name}-{file_name}.png"
                _picture(figure, kept, draw, f"{target}: {name.replace('-', ' ')}").savefig(
                    path, dpi=120
                )
                written.append(path)
    return written


def _picture(
    figure_class: Any, rows: Sequence[Row], draw: Callable[[Any, list[Row]], None], title: str
) -> Any:
    datasets = list(dict.fromkeys(row.cell.dataset for row in rows))
    temperatures = sorted({row.cell.temperature for row in rows})
    width, height = _PANEL
    figure = figure_class(
        figsize=(width * len(temperatures), height * len(datasets)), layout="constrained"
    )
    figure.suptitle(title)
    panels = figure.subplots(len(datasets), len(temperatures), squeeze=False)
    for line, dataset in zip(panels, datasets, strict=True):
        for panel, temperature in zip(line, temperatures, strict=True):
            here = [row for row in rows if row.cell[1::2] == (dataset, temperature)]
            panel.set_title(f"{dataset}, temperature {temperature:g}", fontsize="medium")
            draw(panel, here)
            if here:
                panel.legend(fontsize="small")
            panel.grid(alpha=0.3)
    return figure


def _lines(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    """Label and rows of each engine, sorted by batch size."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.cell.batch_size):
        _, method, drafter, lookahead = row.cell.engine
        label = f"{method}, {drafter}, K={lookahead}" if drafter else method
        lines.setdefault(label, []).append(row)
    return lines.items()


def _speedup(panel: Any, rows: list[Row]) -> None:
    for label, line in _lines(rows):
        points = [(row.cell.batch_size, row.speedup) for row in line if row.speedup]
        sizes = [size for size, _ in points]
        medians = [speedup.median for _, speedup in points]
        below = [speedup.median - speedup.low for _, speedup in points]
        above = [speedup.high - speedup.median for _, speedup in points]
        panel.errorbar(sizes, medians, yerr=[below, above], marker="o", capsize=3, label=label)
    panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xscale("log", base=2)
    batches = sorted({row.cell.batch_size for row in rows})
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.set(xlabel="requests in flight", ylabel="speedup over the target alone")


def _acceptance(panel: Any, rows: list[Row]) -> None:
    longest = 0
    # Acceptance hardly depends on the batch size, so only the smallest one is drawn.
    for label, (row, *_) in _lines(rows):
        shares = row.figures.acceptance_per_position
        panel.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        longest = max(longest, len(shares))
    panel.set_xticks(range(1, longest + 1))
    panel.set(ylim=(0, 1), xlabel="position in the draft", ylabel="drafts accepted up to here")


def _pareto(panel: Any, rows: list[Row]) -> None:
    for label, line in _lines(rows):
        per_user = [1 / row.figures.tpot.median for row in line if row.figures.tpot]
        total = [row.figures.tokens_per_second.median for row in line if row.figures.tpot]
        panel.plot(per_user, total, marker="o", label=label)
        for row, *point in zip(line, per_user, total, strict=False):
            size = str(row.cell.batch_size)
            panel.annotate(size, point, (3, 3), textcoords="offset points", fontsize=7)
    panel.set(xlabel="tokens/s of one user (1 / TPOT)", ylabel="tokens/s of all users")


_Draw = Callable[[Any, list[Row]], None]
_PICTURES: tuple[tuple[str, Callable[[Row], bool], _Draw], ...] = (
    ("speedup-by-batch", lambda row: row.speedup is not None, _speedup),
    ("acceptance-by-position", lambda row: bool(row.figures.acceptance_per_position), _acceptance),
    ("users-and-throughput", lambda row: row.figures.tpot is not None, _pareto),
)
