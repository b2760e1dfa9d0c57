# SPDX-License-Identifier: Apache-2.0
"""Format figures as text, as tables for terminals and Markdown, and as JSON."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm_hetero_spec.bench.figures import Quantiles, Spread

Row = TypeVar("Row")
NONE = "-"
_MIB = 1 << 20


@dataclass(frozen=True)
class Column(Generic[Row]):
    name: str
    value: Callable[[Row], str]
    help: str = ""  # meaning of the figure, as a clause


def markdown_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    lines = [[column.name for column in columns], ["---"] * len(columns)]
    lines += [[column.value(row).replace("|", "\\|") for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def terminal_table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], title: str | None = None
) -> Table:
    """Table with one line per row; columns of numbers are right-aligned."""
    lines = [[column.value(row) for column in columns] for row in rows]
    return drawn([column.name for column in columns], lines, title)


def side_by_side(
    columns: Sequence[Column[Row]], rows: Mapping[str, Row], title: str | None = None
) -> Table:
    """Transposed table: one line per column, one table column per row, no lines of dashes only."""
    lines = [[column.name, *map(column.value, rows.values())] for column in columns]
    kept = [line for line in lines if set(line[1:]) - {NONE, ""}]
    return drawn(["", *rows], kept, title, numbers=range(1, 1 + len(rows)))


def meanings(columns: Sequence[Column[Any]]) -> str:
    """Explanation of the columns, as a line below a table."""
    return "; ".join(f"{column.name}: {column.help}" for column in columns if column.help) + "."


def as_data(value: Any) -> Any:
    """Convert dataclasses and named tuples to dictionaries, for JSON."""
    if is_dataclass(value):
        return {field.name: as_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return as_data(value._asdict())
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    return value


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line of text as it is: without markup, emoji, colors of its own or line breaks."""
    console.print(text, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Write one JSON object to standard output."""
    json.dump(as_data(data), sys.stdout, indent=2)
    print()


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    return number(value, 0)


def milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else number(1e3 * seconds, 1)


def mebibytes(size: float | None) -> str:
    return NONE if size is None else count(size / _MIB)


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def ratio(found: Spread | None) -> str:
    """A speedup, with its range if there are several rounds."""
    if found is None:
        return NONE
    bounds = f" ({found.low:.2f}-{found.high:.2f})" if found.rounds > 1 else ""
    return f"{found.median:.2f}x{bounds}"


def median(found: Quantiles | None) -> str:
    return milliseconds(found.median if found else None)


def tail(found: Quantiles | None) -> str:
    return " / ".join(map(milliseconds, (found.median, found.p90, found.p99))) if found else NONE


def widened(target: str, columns: tuple[int, int]) -> str:
    """Note about a target that was made slower on purpose."""
    zero, every = columns
    return (
        f"{target} is a model widened with zero MLP columns: {zero:,} of {every:,} add nothing but "
        "cost. Its speeds show speculation at that ratio of costs, and nothing about a real pair."
    )


def drawn(
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    title: str | None = None,
    numbers: Sequence[int] | None = None,
) -> Table:
    """Table of texts; `numbers` are right-aligned columns, by default those of numbers."""
    table = Table(
        *map(escape, heads),
        title=None if title is None else escape(title),
        title_justify="left",
        title_style="bold",
    )
    for index, column in enumerate(table.columns):
        if index in numbers if numbers is not None else _is_of_numbers(lines, index):
            column.justify = "right"
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _is_of_numbers(lines: Sequence[Sequence[str]], index: int) -> bool:
    cells = [line[index].removeprefix(NONE) for line in lines]
    return all(not cell or cell[0].isdigit() for cell in cells)
