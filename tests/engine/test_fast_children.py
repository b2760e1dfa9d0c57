# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 and draft trees in the fast tier: one child process for each model runner."""

import pytest
from child_tests import run_in_child, v1_environment
from harness import v2_environment

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("demo_pair")]

SAME = "test_same_tokens_as_the_target_alone"
ON_V1 = [
    "grown_trees.py::test_trees_change_no_token[fixed]",
    "grown_trees.py::test_trees_accept_more_than_chains[fixed]",
]
ON_V2 = [
    "default_path_v2.py::test_the_default_path_is_short",
    "default_path_v2.py::test_no_optional_feature_runs",
    f"identity_v2.py::{SAME}[batch 8]",
    f"identity_v2.py::{SAME}[mixed parameters]",
    f"identity_v2.py::{SAME}[structured output]",
    f"identity_v2.py::{SAME}[preemption]",
    "laws_v2.py::test_samples_follow_the_targets_law[tli-block]",
    "laws_v2.py::test_races_are_those_of_the_seed[drafter]",
    "test_parallel_drafter.py::test_a_perfect_drafter_is_accepted_whole[roomy]",
    f"tree_runs.py::{SAME}[small blocks]",
    "tree_runs.py::test_races_are_those_without_drafts[small blocks]",
    "tree_runs.py::test_faults_are_caught[small blocks-no_tails]",
    "tree_runs.py::test_faults_are_caught[small blocks-no_copies_home]",
]


@pytest.fixture(scope="module")
def on_v1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_in_child(ON_V1, v1_environment(), tmp_path_factory.mktemp("v1"))


@pytest.fixture(scope="module")
def on_v2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("triton")
    environment = v2_environment() | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    return run_in_child(ON_V2, environment, tmp_path_factory.mktemp("v2"))


@pytest.mark.parametrize("test", ON_V1)
def test_on_v1(on_v1: dict[str, str], test: str) -> None:
    assert on_v1[test] == ""


@pytest.mark.parametrize("test", ON_V2)
def test_on_v2(on_v2: dict[str, str], test: str) -> None:
    assert on_v2[test] == ""
