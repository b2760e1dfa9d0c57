# SPDX-License-Identifier: Apache-2.0
"""Texts written by several targets at once: the target's own, whatever the schedule."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulate_dsi import COLUMNS

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "simulate_dsi.py"


@pytest.mark.full
@pytest.mark.engine
def test_every_schedule_writes_what_the_target_does(demo_pair: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    command = [
        sys.executable, str(SCRIPT), "--target", str(demo_pair / "target"),
        "--drafter", str(demo_pair / "drafter"), "--prompts", str(demo_pair / "prompts.jsonl"),
        "--cores", str(cores[0]), str(cores[-1]), "--requests", "2", "--tokens", "20",
        "--lookaheads", "3", "--servers", "1", "3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line] for line in lines[2:]]
    assert [row[0] for row in rows] == ["3"] * 5
    assert {row[COLUMNS.index("same tokens")] for row in rows} == {"2 of 2"}
    drafts = COLUMNS.index("drafted steps")
    assert all(float(row[drafts]) > 0 for row in rows if "ahead" not in row[1])
