# SPDX-License-Identifier: Apache-2.0
"""Tables and values as text; a cell's text is never interpreted as markup."""

import io
import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from rich.console import Console
from rich.table import Table

from vllm_hetero_spec.bench import tables
from vllm_hetero_spec.bench.figures import Spread, error_of_ratio, quantiles
from vllm_hetero_spec.bench.tables import (
    Column,
    as_data,
    markdown_table,
    meanings,
    print_json,
    side_by_side,
    terminal_table,
)


class Place(NamedTuple):
    city: str
    number: int


@dataclass(frozen=True)
class Person:
    name: str
    height: float | None
    place: Place


COLUMNS: tuple[Column[Person], ...] = (
    Column("name", lambda person: person.name),
    Column("height (m)", lambda person: tables.number(person.height), "without shoes"),
)
ROWS = (Person("a|[bold]b", 1.5, Place("x", 1)), Person("c", None, Place("y", 2)))


def drawn(table: Table) -> list[list[str]]:
    """Return the cells of each line of a table on a terminal."""
    output = io.StringIO()
    Console(file=output, width=80).print(table)
    lines = [line.replace("┃", "│") for line in output.getvalue().splitlines()]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_a_table_in_markdown() -> None:
    assert markdown_table(COLUMNS, ROWS).splitlines() == [
        "| name | height (m) |",
        "| --- | --- |",
        "| a\\|[bold]b | 1.50 |",
        "| c | - |",
    ]


def test_tables_on_a_terminal() -> None:
    table = terminal_table(COLUMNS, ROWS, "people [1]")
    assert [column.justify for column in table.columns] == ["left", "right"]
    assert drawn(table) == [["name", "height (m)"], ["a|[bold]b", "1.50"], ["c", "-"]]
    beside = side_by_side(COLUMNS, {"one": ROWS[0], "two": ROWS[1]})
    assert drawn(beside) == [
        ["", "one", "two"],
        ["name", "a|[bold]b", "c"],
        ["height (m)", "1.50", "-"],
    ]
    assert drawn(side_by_side(COLUMNS, {"two": ROWS[1]})) == [["", "two"], ["name", "c"]]


def test_text_is_printed_as_it_is() -> None:
    """Neither as an emoji nor as markup, and a backslash at the end stays one."""
    text, output = "x[start:end:2] [bold] \\", io.StringIO()
    tables.say(Console(file=output), text)
    assert output.getvalue() == f"{text}\n"
    assert drawn(tables.drawn(["a", "b"], [["x", "\\"]])) == [["a", "b"], ["x", "\\"]]


def test_meanings_are_of_the_columns_that_have_one() -> None:
    assert meanings(COLUMNS) == "height (m): without shoes."


def test_rows_are_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    person = {"name": "c", "height": None, "place": {"city": "y", "number": 2}}
    assert as_data(ROWS[1]) == person
    print_json({"people": ROWS[1:], 1: (2, 3)})
    assert json.loads(capsys.readouterr().out) == {"people": [person], "1": [2, 3]}


def test_values() -> None:
    assert tables.count(1234567.0) == "1,234,567"
    assert tables.milliseconds(1.2345) == "1,234.5"
    assert tables.mebibytes(3 << 20) == "3"
    assert tables.percent(0.123) == "12.3%"
    assert tables.ratio(Spread(1.5, 1.25, 2, 1.3, 1.6, rounds=3)) == "1.50x (1.25-2.00)"
    assert tables.ratio(Spread(1.5, 1.5, 1.5, 1.5, 1.5, rounds=1)) == "1.50x"
    assert tables.tail(quantiles([0.5])) == "500.0 / 500.0 / 500.0"
    nothing = (
        tables.number(None), tables.milliseconds(None), tables.mebibytes(None),
        tables.percent(None), tables.ratio(None), tables.median(None), tables.tail(None),
    )  # fmt: skip
    assert set(nothing) == {"-"}


def test_the_error_of_a_ratio_is_that_of_its_groups() -> None:
    # With equal groups it is the standard error of their mean.
    assert error_of_ratio([1.0, 2.0, 3.0], [1.0] * 3) == pytest.approx(1 / 3**0.5)
    assert error_of_ratio([2.0, 4.0], [1.0, 2.0]) == pytest.approx(0.0)
    assert error_of_ratio([1.0], [2.0]) is None
    assert error_of_ratio([0.0, 0.0], [0.0, 0.0]) is None
