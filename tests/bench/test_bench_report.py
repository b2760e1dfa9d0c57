# SPDX-License-Identifier: Apache-2.0
"""The report of fake engines with known figures."""

import dataclasses
import io
from pathlib import Path

import pytest
from bench_fakes import HEADER, SUITE, Fakes, measured, suite
from rich.console import Console

from vllm_hetero_spec.bench.figures import Row, rows_of
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.report import markdown, notes, print_speed
from vllm_hetero_spec.bench.results import read_results
from vllm_hetero_spec.errors import ConfigError

# 8 tokens per run: 4, 2 and 8 tokens per second alone, 8 with the method.
SECONDS = {"alone": [2.0, 4.0, 1.0], "slem": [1.0]}


def row_of(rows: list[Row], method: str) -> Row:
    (found,) = (row for row in rows if row.cell.engine.method == method)
    return found


def table_lines(text: str, title: str) -> list[str]:
    """Return the lines of a table, without head and rule."""
    section = text.split(f"## {title}\n\n")[1]
    return section.split("\n\n")[0].splitlines()[2:]


def test_a_reference_measured_again_counts_once(tmp_path: Path) -> None:
    contents = measured(tmp_path, Fakes(SECONDS))
    again = dataclasses.replace(contents.samples[0], session=1)
    assert again.run.cell.engine.method == "alone"
    contents.samples.append(again)
    alone = row_of(rows_of(contents), "alone")
    assert (alone.figures.requests, alone.figures.tokens_per_second.rounds) == (6, 3)


def test_the_row_of_a_method_in_the_table_of_speeds(tmp_path: Path) -> None:
    contents = measured(tmp_path, Fakes(SECONDS))
    text = markdown(contents, rows_of(contents))
    assert table_lines(text, "Speed") == [
        "| code | big | alone | - | - | 0 | 1 | 500.0 | 500.0 | 4.0 | - | - | - | - | - |",
        "| code | big | slem | small | 4 | 0 | 1 | 250.0 | 250.0 | 8.0 | 2.00x (1.00-4.00) | - | - "
        "| 2.50 | 2 of 2 |",
    ]


def test_hugging_face_is_compared_with_both_references(tmp_path: Path) -> None:
    seconds = {"alone": [1.0], "hf_alone": [4.0], "hf_assisted": [2.0]}
    outputs = {"hf_alone": [9, 9, 9, 9], "hf_assisted": [9, 9, 9, 9]}
    asked = suite(peers=("hf_assisted",))
    rows = rows_of(measured(tmp_path, Fakes(seconds, outputs), asked))
    order = [row.cell.engine.method for row in rows]
    assert order == ["alone", "slem", "hf_alone", "hf_assisted"]
    assisted = row_of(rows, "hf_assisted")
    assert assisted.speedup.median == pytest.approx(0.5)
    assert assisted.speedup_over_hf.median == pytest.approx(2.0)
    assert assisted.identical == (2, 2)  # as hf_alone, not as alone
    alone = row_of(rows, "hf_alone")
    assert alone.speedup.median == pytest.approx(0.25)
    assert (alone.identical, alone.speedup_over_hf) == (None, None)


def test_settings_are_compared_with_the_first(tmp_path: Path) -> None:
    """Rounds are compared one by one, whichever setting runs first."""
    (target,) = SUITE.targets
    (drafter,) = target.drafters
    each = dataclasses.replace(drafter, settings={"a": {}, "b": {}}).in_each_setting()
    asked = suite(targets=(dataclasses.replace(target, drafters=tuple(each)),))
    seconds = {"slem": [1.0, 0.5, 1.0, 0.4, 0.25, 1.0]}  # a b, a b, b a
    alone, first, other = rows_of(measured(tmp_path, Fakes(seconds), asked))
    assert [row.cell.engine.drafter for row in (first, other)] == ["small:a", "small:b"]
    assert (alone.speedup_over_first, first.speedup_over_first) == (None, None)
    found = other.speedup_over_first
    assert (found.median, found.low, found.high) == pytest.approx((2.5, 2.0, 4.0))


def test_without_a_reference_there_is_no_speedup(tmp_path: Path) -> None:
    contents = measured(tmp_path, Fakes(refuse={"alone": MeasurementError("no memory")}))
    (row,) = rows_of(contents)
    assert (row.speedup, row.identical) == (None, None)
    assert "## Failed\n\n- no memory: `big/alone/code/b1/t0`\n" in markdown(contents, [row])


def test_no_table_of_speculation_without_drafts(tmp_path: Path) -> None:
    contents = measured(tmp_path, Fakes(refuse={"slem": ConfigError("no such drafter")}))
    assert "## Speculation" not in markdown(contents, rows_of(contents))


def test_repaired_sampling_is_noted(tmp_path: Path) -> None:
    asked = suite(peers=("alone", "vllm_tli"), temperatures=(0.0, 1.0))
    contents = measured(tmp_path / "a", Fakes(), asked)
    (note,) = notes(contents)
    assert note.startswith("vllm_tli: on CPUs vLLM expands sampling parameters")
    assert note in markdown(contents, rows_of(contents))
    assert notes(dataclasses.replace(contents, header=contents.header | {"gpu": True})) == []
    greedy = measured(tmp_path / "b", Fakes(), suite(peers=("alone", "vllm_tli")))
    assert notes(greedy) == []


def test_another_model_runner_is_noted(tmp_path: Path) -> None:
    """Results read from a file have the note too; old results without a runner have none."""
    asked = suite(peers=("alone", "vllm_tli", "hf_alone"))
    measured(tmp_path, Fakes(runners={"vllm_tli": "V1"}), asked)
    contents = read_results(tmp_path)
    (note,) = notes(contents)
    assert note.startswith("vllm_tli: on vLLM's Model Runner V1, the target alone on V2, so")
    assert row_of(rows_of(contents), "vllm_tli").figures.runner == "V1"
    before = measured(tmp_path / "before", Fakes(runners={"vllm_tli": ""}), asked)
    assert notes(before) == []


def test_widened_targets_and_single_engines_are_noted(tmp_path: Path) -> None:
    contents = measured(tmp_path, Fakes())
    contents.header |= {"widened": {"big": [60, 64]}, "engines_at_once": 1}
    widened, alone = notes(contents)
    assert widened.startswith("big is a model widened with zero MLP columns: 60 of 64 add nothing")
    assert "One engine was up at a time" in alone


def test_changes_between_sessions_are_noted(tmp_path: Path) -> None:
    contents = measured(tmp_path, Fakes())
    contents.resumed.append({"started": "later", "provenance": HEADER["provenance"]})
    text = markdown(contents, rows_of(contents))
    assert "gone on with later" in text
    assert "changed between sessions" not in text
    contents.resumed.append({"started": "now", "provenance": {"versions": {}}})
    assert "changed between sessions" in markdown(contents, rows_of(contents))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_is_printed(tmp_path: Path, terminal: bool) -> None:
    contents = measured(tmp_path, Fakes(SECONDS))
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=250, no_color=True)
    print_speed(contents, rows_of(contents), console)
    assert "2.00x (1.00-4.00)" in output.getvalue()
    assert ("| --- |" in output.getvalue()) != terminal
