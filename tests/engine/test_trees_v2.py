# SPDX-License-Identifier: Apache-2.0
"""Draft trees on Model Runner V2, each file of tests in a process of its own."""

import subprocess
import sys
from typing import Any

import pytest
from harness import HERE, v2_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("file", ["trees_v2.py", "grown_trees_v2.py"])
@pytest.mark.parametrize("way", ["installed", "0.33"])
def test_trees_keep_the_targets_tokens(way: str, file: str, request: Any) -> None:
    """Of trees that are known to be right and wrong, and of the drafter's own."""
    pytest.importorskip("triton")
    folders = [request.getfixturevalue("runs_033")] if way == "0.33" else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", str(HERE / file)]
    done = subprocess.run(command, env=v2_environment(*folders), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
