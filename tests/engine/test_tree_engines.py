# SPDX-License-Identifier: Apache-2.0
"""Run the tests of draft trees on each model runner and vLLM release, each in a child process."""

import pytest
from child_tests import environment_of, passed

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
    passed(FILES, environment_of(way, request), WAYS[way])
