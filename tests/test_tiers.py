# SPDX-License-Identifier: Apache-2.0
"""A command line selects tests marked `full` only on demand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FULL = "bench/test_advise.py::test_real_advice"


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        (["tests/bench"], False),
        (["tests/bench", "--full"], True),
        (["tests/bench/test_advise.py"], True),
        (["tests/bench", "-m", "full"], True),
    ],
)
def test_full_tests_run_on_demand(arguments: list[str], selected: bool, tmp_path: Path) -> None:
    out = tmp_path / "collected.json"
    command = [sys.executable, str(TESTS / "collected.py"), str(out), *arguments]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found.get(f"tests/{FULL}") is (True if selected else None)
    assert (False in found.values()) is ("-m" not in arguments)
