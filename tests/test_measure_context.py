# SPDX-License-Identifier: Apache-2.0
"""What a bounded context saves, counted in engines of the script."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "measure_context.py"

pytestmark = [pytest.mark.full, pytest.mark.engine]


def test_a_shorter_context_reads_and_holds_less(demo_pair: Path) -> None:
    models = ["--target", str(demo_pair / "target"), "--drafter", str(demo_pair / "drafter")]
    load = ["--contexts", "128", "512", "--requests", "3", "--tokens", "600", "--pool", "67108864"]
    command = [sys.executable, str(SCRIPT), *models, *load]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = [[int(cell.replace(",", "")) for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[0] for row in rows] == [128, 512]
    (_, held, _, read, drafts), (_, more_held, _, more_read, _) = rows
    assert 0 < held < more_held
    assert 0 < read < more_read
    assert drafts > 0
