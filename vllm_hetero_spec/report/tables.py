# SPDX-License-Identifier: Apache-2.0
"""Tables of rows, for terminals, for Markdown, and as data for programs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from rich.markup import escape
from rich.table import Table

from vllm_hetero_spec.report.values import NONE

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        name: Its head.
        value: What it shows of a row; `report.values` writes numbers.
        help: What the figure means, as a clause.
    """

    name: str
    value: Callable[[Row], str]
    help: str = ""


def markdown_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """One line per row, in Markdown."""
    lines = [[column.name for column in columns], ["---"] * len(columns)]
    lines += [[column.value(row).replace("|", "\\|") for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def terminal_table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], title: str | None = None
) -> Table:
    """One line per row; columns of numbers on the right."""
    lines = [[column.value(row) for column in columns] for row in rows]
    return _drawn([column.name for column in columns], lines, title)


def side_by_side(
    columns: Sequence[Column[Row]],
    rows: Mapping[str, Row],
    title: str | None = None,
) -> Table:
    """One line per column and one column per row, under its name; lines of dashes are left out."""
    lines = [[column.name, *map(column.value, rows.values())] for column in columns]
    kept = [line for line in lines if set(line[1:]) - {NONE, ""}]
    return _drawn(["", *rows], kept, title, numbers=range(1, 1 + len(rows)))


def meanings(columns: Sequence[Column[Any]]) -> str:
    """What the columns mean, for the line below a table."""
    return "; ".join(f"{column.name}: {column.help}" for column in columns if column.help) + "."


def as_data(value: Any) -> Any:
    """Dataclasses and named tuples as dictionaries, for JSON."""
    if is_dataclass(value):
        return {field.name: as_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return as_data(value._asdict())
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    return value


def print_json(data: Any) -> None:
    """Write one JSON object to standard output."""
    json.dump(as_data(data), sys.stdout, indent=2)
    print()


def _drawn(
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    title: str | None,
    numbers: Sequence[int] | None = None,
) -> Table:
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
        table.add_row(*map(escape, line))
    return table


def _is_of_numbers(lines: Sequence[Sequence[str]], index: int) -> bool:
    cells = [line[index].removeprefix(NONE) for line in lines]
    return all(not cell or cell[0].isdigit() for cell in cells)
