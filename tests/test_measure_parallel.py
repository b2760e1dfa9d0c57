# SPDX-License-Identifier: Apache-2.0
"""Drafting in a process of its own, measured: the table, and the script's engines in counts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _parallel_model import Step
from measure_parallel import ALONE, COLUMNS, PARALLEL, SERIAL, Run, report

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.measure.load import Sample, Trace

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def run_of(seconds: float, steps: list[Step], drafts: int = 0, **counted: Any) -> Run:
    """9 tokens behind a first one, in so many seconds; two more tokens than drafts are accepted."""
    trace = Trace(list(range(10)), "", 0.0, [1.0, 1.0 + seconds], [1, 9])
    worker = {**DraftStats().as_dict(), **counted}
    sample = Sample([trace], 1.0 + seconds, drafts, 4 * drafts, 2 * drafts, worker=worker)
    return Run(sample, steps)


def test_a_run_says_what_was_found_behind_a_draft_and_behind_none() -> None:
    steps = [Step(0), Step(0, 0, 0, 1), Step(3, 1, 0, 1), Step(2, 2, 0, 1), Step(0, 2, 0, 2)]
    steps.append(Step(1, 2, 1, 2))
    found = run_of(1.0, steps)
    assert found.rate == 9
    assert found.found(drafted=True) == (1, 0, 1)
    assert found.found(drafted=False) == (1, 1, 1)


def test_the_table_compares_engines_within_rounds() -> None:
    steps = [Step(0), Step(0, 0, 0, 0), Step(4, 1), Step(4, 2), Step(4, 3)]
    inline = {"propose_seconds": 0.5, "forward_seconds": 0.4, "forwards": 16}
    ahead = {"propose_seconds": 0.1, "forward_seconds": 0.5, "forwards": 20, "drafts_ahead": 3}
    runs = {
        ALONE: [run_of(9.0, [Step(0)] * 10), run_of(18.0, [Step(0)] * 10)],
        SERIAL: [run_of(3.0, steps, 4, **inline), run_of(6.0, steps, 4, **inline)],
        PARALLEL: [run_of(2.0, steps, 4, **ahead), run_of(4.0, steps, 4, **ahead)],
    }
    *table, told, same = report(runs).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if "|" in line]
    assert all(len(line) == len(COLUMNS) for line in cells)
    named = {line[0]: dict(zip(COLUMNS, line, strict=True)) for line in cells[2:]}
    assert named[SERIAL]["of alone"] == "3.00x"
    assert named[PARALLEL]["tokens per draft"] == "3.00"
    assert named[PARALLEL]["hits behind a draft"] == "1.00"
    assert named[SERIAL]["hits behind a draft"] == named[ALONE]["t_D (ms)"] == "-"
    assert named[SERIAL]["t_D (ms)"] == named[PARALLEL]["t_D (ms)"] == "25.0"
    assert named[SERIAL]["t_V (ms)"] == "1000.0"  # (4 + 7 - 2 * 0.5) s in 10 steps
    assert named[SERIAL]["plugin (ms)"] == named[PARALLEL]["plugin (ms)"] == "20.00"
    # 3 tokens in a step of 1 s and four forwards of 25 ms; the median of 3 and 1.5 tokens a second.
    assert named[SERIAL]["of the formula"] == "0.83"
    assert told == f"{PARALLEL} / {SERIAL}: 1.50x (1.50-1.50)"
    assert same == "same tokens: 3 of 3 engines"


@pytest.mark.full
@pytest.mark.engine
def test_engines_of_all_kinds_write_the_same(demo_pair: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    command = [
        sys.executable, str(SCRIPTS / "measure_parallel.py"),
        "--target", str(demo_pair / "target"), "--drafter", str(demo_pair / "drafter"),
        "--prompts", str(demo_pair / "prompts.jsonl"), "--cores", str(cores[0]), str(cores[-1]),
        "--rounds", "1", "--requests", "2", "--tokens", "16", "--lookups", "2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same tokens: 4 of 4 engines" in done.stdout
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    named = {line[0].strip(): [cell.strip() for cell in line] for line in lines}
    at = COLUMNS.index("tokens per draft")
    assert float(named[SERIAL][at]) > 1
    assert float(named[PARALLEL][at]) > 1
    assert "look-ups at batch 2" in done.stdout
