# SPDX-License-Identifier: Apache-2.0
"""Run the tests of draft trees on each model runner and vLLM release, each in a child process."""

import os
import subprocess
import sys

import pytest
from harness import HERE, v2_environment

pytestmark = [
    pytest.mark.full,
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("demo_pair"),
]
# Tests of given trees, with known faults, and of trees that the drafter makes.
FILES = ("tree_runs.py", "grown_trees.py")
WAYS = {  # settings to run (pytest -k); each runner has all of them
    "V1": "large or tight or rank or fixed",
    "V2": "small or tight or untested or rank or fixed",
    "V2, ahead": "large or goodput",
    "V2, 0.33": "small or untested or fixed",
}


@pytest.mark.parametrize("way", WAYS)
def test_trees_keep_the_targets_tokens(way: str, request: pytest.FixtureRequest) -> None:
    folders = [request.getfixturevalue("runs_033")] if "0.33" in way else []
    environment = v2_environment(*folders) | {"V2_AHEAD": str(int("ahead" in way))}
    if "V1" in way:
        path = environment["PYTHONPATH"].partition(os.pathsep)[2]  # without the folder that sets V2
        environment = os.environ | {"PYTHONPATH": path}
    else:
        pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-k", WAYS[way]]
    done = subprocess.run(
        [*command, *(str(HERE / file) for file in FILES)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
