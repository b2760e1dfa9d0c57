# SPDX-License-Identifier: Apache-2.0
"""Engines on a simulated GPU: no unexpected synchronization, no mix of host and device tensors.

`device_apart.py` simulates the device. The checks are in `apart_engines.py`, which runs in
processes of its own.
"""

import os
import subprocess
import sys

import pytest
from harness import HERE, v2_environment

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.usefixtures("demo_pair")]


# pytest expressions that select drafting methods. A method that is the same on both runners is
# tested on one of them.
CHOSEN = {
    "V1": "not fuzzy and not timed",
    "V2": "not block and not slrs and not slem",
    "V2 of 0.33": "hetero",
}


@pytest.mark.parametrize("runner", CHOSEN)
def test_engines_on_a_device_apart(runner: str, request: pytest.FixtureRequest) -> None:
    """V2 uses asynchronous scheduling, as on a GPU."""
    environment = dict(os.environ)
    if runner != "V1":
        pytest.importorskip("triton")
        folders = [request.getfixturevalue("runs_033")] if "0.33" in runner else []
        environment = v2_environment(*folders) | {"V2_AHEAD": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-k", CHOSEN[runner]]
    done = subprocess.run(
        [*command, str(HERE / "apart_engines.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
