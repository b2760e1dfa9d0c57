# SPDX-License-Identifier: Apache-2.0
"""`measure_draft_ahead.py`: the table, and the engines that the script runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from measure_draft_ahead import AHEAD, ALONE, COLUMNS, SERIAL, Run, report

from vllm_hetero_spec.bench.load import Sample, Trace

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def run_of(seconds: float, steps: list[tuple[int, ...]], drafts: int = 0) -> Run:
    """Return a run with 9 tokens in `seconds` after the first token, and 2 accepted per draft."""
    trace = Trace(list(range(10)), "", 0.0, [1.0, 1.0 + seconds], [1, 9])
    return Run(Sample([trace], 1.0 + seconds, drafts, 4 * drafts, 2 * drafts), steps)


def test_a_run_counts_look_ups_after_drafts() -> None:
    steps = [(0, 0, 0, 0), (0, 0, 0, 1), (3, 1, 0, 1), (2, 2, 0, 1), (0, 2, 0, 2), (1, 2, 1, 2)]
    found = run_of(1.0, steps)
    assert found.rate == 9
    assert found.look_ups() == (1, 2)


def test_the_table_compares_engines_within_rounds() -> None:
    steps = [(0, 0, 0, 0), (4, 1, 0, 0), (4, 2, 0, 0), (4, 2, 0, 1)]
    runs = {
        ALONE: [run_of(9.0, [(0, 0, 0, 0)] * 10), run_of(18.0, [(0, 0, 0, 0)] * 10)],
        SERIAL: [run_of(3.0, [(4, 0, 0, 0)] * 4, 4), run_of(6.0, [(4, 0, 0, 0)] * 4, 4)],
        AHEAD: [run_of(2.0, steps, 4), run_of(4.0, steps, 4)],
    }
    *table, told, same = report(runs).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if "|" in line]
    assert cells[0] == list(COLUMNS)
    assert cells[2:] == [
        [ALONE, "0.8", "1.00x", "", ""],
        [SERIAL, "2.2", "3.00x", "3.00", ""],
        [AHEAD, "3.4", "4.50x", "3.00", "0.50"],
    ]
    assert told == f"{AHEAD} / {SERIAL}: 1.50x (1.50-1.50)"
    assert same == "same tokens: 3 of 3 engines"


@pytest.mark.full
@pytest.mark.engine
def test_engines_of_all_kinds_write_the_same(demo_pair: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    command = [
        sys.executable, str(SCRIPTS / "measure_draft_ahead.py"),
        "--target", str(demo_pair / "target"), "--drafter", str(demo_pair / "drafter"),
        "--prompts", str(demo_pair / "prompts.jsonl"), "--cores", str(cores[0]), str(cores[-1]),
        "--rounds", "1", "--requests", "2", "--tokens", "16", "--dsi", "1", "3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same tokens: 5 of 5 engines" in done.stdout
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    named = {line[0].strip(): [cell.strip() for cell in line] for line in lines}
    at = COLUMNS.index("tokens per draft")
    assert float(named[SERIAL][at]) > 1
    assert float(named[AHEAD][at]) > 1
    simulated = [line for line in done.stdout.splitlines() if line.startswith("simulated")]
    assert [line.count("tok/s") + line.count("DSI") for line in simulated] == [3, 3, 3]
