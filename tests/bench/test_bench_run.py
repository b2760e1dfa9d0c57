# SPDX-License-Identifier: Apache-2.0
"""Runs of a plan on engines that work, fail and are interrupted."""

from pathlib import Path

import pytest
from bench_fakes import PROMPTS, Fakes, measured, suite

from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.results import Contents, read_results
from vllm_hetero_spec.errors import ConfigError


def recorded(contents: Contents) -> list[tuple[str, int]]:
    return [(r.run.cell.engine.method, r.run.round) for r in contents.samples]


def test_engines_start_before_anything_is_measured_and_end_after(tmp_path: Path) -> None:
    fakes = Fakes()
    measured(tmp_path, fakes)
    assert fakes.log == [
        ("start", "alone"), ("start", "slem"),
        ("run", "alone"), ("run", "slem"),
        ("run", "slem"), ("run", "alone"),
        ("run", "alone"), ("run", "slem"),
        ("close", "alone"), ("close", "slem"),
    ]  # fmt: skip
    assert recorded(read_results(tmp_path)) == [
        ("alone", 0), ("slem", 0), ("slem", 1), ("alone", 1), ("alone", 2), ("slem", 2),
    ]  # fmt: skip


def test_alone_stays_up_from_wave_to_wave(tmp_path: Path) -> None:
    fakes = Fakes()
    measured(tmp_path, fakes, suite(peers=("alone", "vllm_tli"), repeats=1), at_once=2)
    assert fakes.log == [
        ("start", "alone"), ("start", "slem"), ("run", "alone"), ("run", "slem"),
        ("close", "slem"),
        ("start", "vllm_tli"), ("run", "alone"), ("run", "vllm_tli"),
        ("close", "alone"), ("close", "vllm_tli"),
    ]  # fmt: skip


def test_loads_are_the_suites_and_seeds_the_rounds(tmp_path: Path) -> None:
    fakes = Fakes()
    measured(tmp_path, fakes, suite(seed=7, max_tokens=5, top_p=0.5, ignore_eos=True))
    assert {load.prompts for load in fakes.loads} == {PROMPTS}
    assert [load.seed for load in fakes.loads] == [7, 7, 9, 9, 11, 11]
    first = fakes.loads[0]
    assert (first.max_tokens, first.top_p, first.ignore_eos) == (5, 0.5, True)


def test_without_a_seed_nothing_is_seeded(tmp_path: Path) -> None:
    fakes = Fakes()
    measured(tmp_path, fakes, suite(seed=None))
    assert {load.seed for load in fakes.loads} == {None}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_or_a_bug_keeps_what_is_done_and_ends_engines(
    tmp_path: Path, error: type[BaseException]
) -> None:
    fakes = Fakes(fail={("slem", 1): error()})
    with pytest.raises(error):
        measured(tmp_path, fakes)
    assert fakes.up == []
    assert recorded(read_results(tmp_path)) == [("alone", 0), ("slem", 0)]


def test_a_rerun_measures_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, Fakes(fail={("alone", 1): KeyboardInterrupt()}))
    again = Fakes()
    measured(tmp_path, again)
    # Only `alone` was missing in round 1.
    assert again.order() == ["alone", "alone", "slem"]
    done = read_results(tmp_path)
    assert sorted(recorded(done)) == [(m, i) for m in ("alone", "slem") for i in range(3)]
    assert [r.session for r in done.samples] == [0, 0, 0, 1, 1, 1]


def test_a_failing_cell_is_recorded_and_the_rest_runs(tmp_path: Path) -> None:
    asked = suite(temperatures=(0.0, 1.0), repeats=2)
    fakes = Fakes(fail={("slem", 0): MeasurementError("the engine died")})
    measured(tmp_path, fakes, asked)
    contents = read_results(tmp_path)
    assert {str(cell): why for cell, why in contents.errors.items()} == {
        "big/slem/small/k4/code/b1/t0": "the engine died"
    }
    assert fakes.failures == [("big/slem/small/k4/code/b1/t0", "the engine died")] * 2
    # The engine is started again for its other cell, whose rounds all run.
    assert fakes.order("start") == ["alone", "slem", "slem"]
    assert fakes.order().count("slem") == 2
    assert fakes.order().count("alone") == 4
    assert fakes.up == []


def test_a_refused_load_leaves_the_engine_up(tmp_path: Path) -> None:
    asked = suite(temperatures=(0.0, 1.0), repeats=1)
    fakes = Fakes(fail={("slem", 0): ConfigError("the prompt is too long")})
    measured(tmp_path, fakes, asked)
    assert fakes.order("start") == ["alone", "slem"]
    assert list(read_results(tmp_path).errors.values()) == ["the prompt is too long"]


@pytest.mark.parametrize("error", [ConfigError("no such drafter"), MeasurementError("no memory")])
def test_an_engine_that_does_not_start_fails_all_its_cells(
    tmp_path: Path, error: Exception
) -> None:
    asked = suite(temperatures=(0.0, 1.0))
    fakes = Fakes(refuse={"slem": error})
    measured(tmp_path, fakes, asked)
    assert fakes.order("start") == ["alone", "slem"]
    assert fakes.order() == ["alone"] * 6
    assert len(fakes.failures) == 6
    assert list(read_results(tmp_path).errors.values()) == [str(error)] * 2


def test_failed_cells_are_tried_again(tmp_path: Path) -> None:
    measured(tmp_path, Fakes(refuse={"slem": MeasurementError("no memory")}))
    assert len(read_results(tmp_path).errors) == 1
    again = Fakes()
    measured(tmp_path, again)
    contents = read_results(tmp_path)
    assert contents.errors == {}
    assert again.order() == ["alone", "slem", "slem", "alone", "alone", "slem"]


def test_skipped_cells_are_recorded_once(tmp_path: Path) -> None:
    asked = suite(peers=("alone", "draft_model"))
    measured(tmp_path, Fakes(), asked)
    measured(tmp_path, Fakes(), asked)
    text = (tmp_path / "results.jsonl").read_text()
    assert text.count('"skipped", ') == 1
    assert list(read_results(tmp_path).skipped.values()) == ["they differ"]
