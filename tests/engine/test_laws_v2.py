# SPDX-License-Identifier: Apache-2.0
"""Distributions of samples on Model Runner V2: run `laws_v2.py` in its own process."""

import os
import subprocess
import sys

import pytest
from harness import HERE, v2_environment

LONG = "HETERO_SPEC_SAMPLES" in os.environ
pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(36_000 if LONG else 1200)]


@pytest.mark.parametrize("way", ["installed", "ahead", "0.33"])
def test_samples_of_v2_follow_the_targets_law(way: str, request: pytest.FixtureRequest) -> None:
    """Run all tests on the installed release, and a few on vLLM 0.33.

    The distribution does not depend on the release. The few tests show that its sampler calls the
    plugin's.
    """
    pytest.importorskip("triton")
    chosen = {
        "installed": "not slrs" if not LONG else "",
        "ahead": "slrs" if not LONG else "",
        "0.33": "races or (log_prob and tli)",
    }
    folders = [request.getfixturevalue("runs_033")] if way == "0.33" else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", str(HERE / "laws_v2.py")]
    environment = v2_environment(*folders) | {"V2_AHEAD": str(int(way == "ahead"))}
    done = subprocess.run(
        [*command, "-k", chosen[way]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
