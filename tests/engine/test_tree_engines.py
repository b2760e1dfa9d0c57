# SPDX-License-Identifier: Apache-2.0
"""Draft trees on each model runner and release, each file of tests in a process of its own."""

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
# Trees that are known to be right and wrong, and the drafter's own.
FILES = ("tree_runs.py", "grown_trees.py")
WAYS = {  # which settings; together all on each runner
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
        path = environment["PYTHONPATH"].partition(os.pathsep)[2]  # without what makes it V2
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
