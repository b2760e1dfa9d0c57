# SPDX-License-Identifier: Apache-2.0
"""Draft trees on each model runner and release, each file of tests in a process of its own."""

import os
import subprocess
import sys

import pytest
from harness import HERE, v2_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("demo_pair"),
]
# Trees that are known to be right and wrong; which settings, all where nothing is said.
KNOWN = {
    "V1": "",
    "V2": "",
    "V2, ahead": "large or tight",
    "V2, 0.33": "small or wrong",
}
GROWN = {"V1": "", "V2": "", "V2, ahead": "goodput", "V2, 0.33": "fixed"}  # the drafter's own
RUNS = [("tree_runs.py", *run) for run in KNOWN.items()]
RUNS += [("grown_trees_v2.py", *run) for run in GROWN.items()]


@pytest.mark.parametrize(("file", "way", "which"), RUNS)
def test_trees_keep_the_targets_tokens(
    file: str, way: str, which: str, request: pytest.FixtureRequest
) -> None:
    folders = [request.getfixturevalue("runs_033")] if "0.33" in way else []
    environment = v2_environment(*folders) | {"V2_AHEAD": str(int("ahead" in way))}
    if "V1" in way:
        path = environment["PYTHONPATH"].partition(os.pathsep)[2]  # without what makes it V2
        environment = os.environ | {"PYTHONPATH": path}
    else:
        pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", str(HERE / file)]
    done = subprocess.run([*command, "-k", which], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
