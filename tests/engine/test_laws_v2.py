# SPDX-License-Identifier: Apache-2.0
"""Laws of samples on Model Runner V2, in a process of its own: see `laws_v2.py`."""

import os
import subprocess
import sys

import pytest
from harness import HERE, v2_environment

LONG = "HETERO_SPEC_SAMPLES" in os.environ
pytestmark = [pytest.mark.engine, pytest.mark.timeout(36_000 if LONG else 1200)]


@pytest.mark.parametrize("release", ["installed", "0.33"])
def test_samples_of_v2_follow_the_targets_law(release: str, request: pytest.FixtureRequest) -> None:
    """Of the other release what shows that its sampler takes ours: the law has no release."""
    pytest.importorskip("triton")
    folders, chosen = [], ["-k", ""]
    if release == "0.33":
        folders, chosen = [request.getfixturevalue("runs_033")], ["-k", "races or log_prob"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", str(HERE / "laws_v2.py")]
    done = subprocess.run(
        [*command, *chosen], env=v2_environment(*folders), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
