# SPDX-License-Identifier: Apache-2.0
"""Default CPU cores of a drafter process; no engine runs."""

import os
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import LogicalCPUInfo

from vllm_hetero_spec.engine.ahead.deployment import free_cores
from vllm_hetero_spec.engine.ahead.supervisor import _environment
from vllm_hetero_spec.errors import ConfigError

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU build")

Free = Callable[..., list[int]]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """`free_cores` in a worker whose main thread OpenMP has bound to one core."""

    def of(
        bound: str,
        allowed: Collection[int],
        *,
        siblings: int = 1,
        executor: str = "mp",
        **ranks: Any,
    ) -> list[int]:
        affinity = {os.getppid(): {*allowed}, 0: {min(allowed)}}
        cpus = [LogicalCPUInfo(core, core // siblings, 0) for core in range(64)]
        with monkeypatch.context() as patch:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
            patch.setattr(os, "sched_getaffinity", affinity.__getitem__)
            patch.setattr(os, "sched_setaffinity", lambda pid, cores: affinity.update({pid: cores}))
            patch.setattr(cpu_resource_utils, "_get_cpu_list", lambda: cpus)
            patch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda *_: [0])
            parallel = SimpleNamespace(
                distributed_executor_backend=executor,
                local_world_size=1,
                data_parallel_rank_local=0,
                _api_process_count=1,
                assigned_physical_gpu_ids=None,
            )
            vars(parallel).update(ranks)
            config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
            try:
                return free_cores(config)
            finally:
                assert affinity[0] == {min(allowed)}

    return of


@pytest.mark.parametrize(
    ("bound", "allowed", "more", "expected"),
    [
        ("0", range(2), {}, [1]),
        ("auto", range(2), {}, [1]),  # vLLM does not use the last core
        ("auto", range(8), {"siblings": 2}, [7]),
        ("auto", range(2), {"siblings": 2}, [0]),
        ("2,4-5", range(2, 8), {}, [3, 6, 7]),  # in a container, or under taskset
        ("0|1", range(4), {"local_world_size": 2}, [2, 3]),
        ("0|1", range(4), {"data_parallel_rank_local": 1}, [2, 3]),
        ("nobind", range(2), {}, []),
        ("0-1", range(2), {"executor": "uni"}, []),  # vLLM binds no threads with this executor
    ],
)
def test_what_the_target_leaves(
    free: Free, bound: str, allowed: Collection[int], more: dict[str, Any], expected: list[int]
) -> None:
    assert free(bound, allowed, **more) == expected


def test_reserved_cores_are_the_drafters(free: Free, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "3")
    assert free("auto", range(8)) == [5, 6, 7]


@pytest.mark.parametrize(
    ("bound", "allowed", "more", "fix"),
    [
        ("0-1", range(2), {}, 'BIND=0 and "drafter_device": "1", or leave'),
        ("0-7", range(8), {}, 'BIND=0-6 and "drafter_device": "7", or leave'),
        ("0-2|3-7", range(8), {"local_world_size": 2}, 'BIND=0-2|3-6 and "drafter_device": "7"'),
        ("0|1", range(2), {"local_world_size": 2}, "does not use; leave"),
        ("auto", range(1), {}, "does not use; leave"),
    ],
)
def test_a_target_on_all_cores_is_refused_with_settings_to_use(
    free: Free, bound: str, allowed: Collection[int], more: dict[str, Any], fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        free(bound, allowed, **more)
    said = str(refused.value)
    assert said.startswith(f"VLLM_CPU_OMP_THREADS_BIND={bound} gives the target all CPU cores")
    assert fix in said
    assert 'leave out "draft_ahead"' in said


def test_the_targets_binding_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """libiomp reads KMP_AFFINITY before OMP_PLACES."""
    monkeypatch.setenv("KMP_AFFINITY", "granularity=fine,explicit,proclist=[0]")
    assert "KMP_AFFINITY" in _environment([])
    changed = _environment([1])
    assert "KMP_AFFINITY" not in changed
    assert changed["OMP_PLACES"] == "{1}"
