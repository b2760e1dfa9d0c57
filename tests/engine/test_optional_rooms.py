# SPDX-License-Identifier: Apache-2.0
"""The default path does not need the code of an optional feature."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
IDENTITY = f"{HERE / 'test_identity.py'}::test_same_tokens_as_the_target_alone[pair-batch 8]"
TREES = f"{HERE / 'test_branches.py'}"
ROOMS = {
    "draft trees": "trees,engine.trees",
    "drafting ahead": "engine.ahead",
    "copies": "engine.copies",
    "parallel drafters": "engine.drafter.parallel",
    "SLRS": "slrs,engine.drafter.slrs_spans",
    "fuzzy verification": "verify.fuzzy,engine.verifier.fuzzy_report",
}


def run_without(rooms: str, tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "without_rooms.py"), rooms, "-q", "-n", "0", tests]
    return subprocess.run(command, cwd=HERE.parent.parent, capture_output=True, text=True)


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("feature", ROOMS)
def test_a_chain_is_drafted_without_it(feature: str) -> None:
    done = run_without(ROOMS[feature], IDENTITY)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "1 passed" in done.stdout


def test_the_modules_are_empty() -> None:
    """Tests of a feature fail without its modules."""
    done = run_without(ROOMS["draft trees"], TREES)
    assert done.returncode in (1, 2), done.stdout + done.stderr  # of failed tests or imports
    assert "test_branches.py" in done.stdout
    assert " passed" not in done.stdout
