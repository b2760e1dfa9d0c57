# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster for each test file of this folder, ended after its tests."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray_cluster import RayCluster


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator["RayCluster"]:
    from vllm.platforms import current_platform

    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'vllm-hetero-spec[ray]'")
    if not current_platform.is_cpu():
        pytest.skip("needs vLLM's CPU build, whose devices the tests give to Ray as GPUs")
    from ray_cluster import started

    with started() as cluster:
        yield cluster
