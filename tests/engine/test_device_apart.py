# SPDX-License-Identifier: Apache-2.0
"""Run `apart_engines.py`, engines on a device that `device_apart.py` simulates, in processes."""

import os

import pytest
from child_tests import environment_of, passed

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
    ahead = f"{runner}, ahead"
    environment = os.environ if runner == "V1" else environment_of(ahead, request)
    passed(["apart_engines.py"], environment, CHOSEN[runner])
