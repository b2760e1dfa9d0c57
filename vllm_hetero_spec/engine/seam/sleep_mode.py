# SPDX-License-Identifier: Apache-2.0
"""vLLM's sleep mode: the drafter comes back from it as it was.

Level 2 discards the target's weights, which the user then loads anew. Nobody would load the
drafter's, nor the tables and buffers beside them, so they lie where vLLM keeps what outlives every
level: in host memory while it sleeps. Addresses stay, so CUDA graphs do too. The drafter's KV is
discarded with the target's at every level, and texts are read afresh.

A drafter in a process of its own is none of vLLM's memory. At level 1 it stays as it is, and has
nothing to do; at level 2 its process ends, and is started again when the worker wakes.
"""

import contextlib

from vllm.config import VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.platforms import current_platform


def kept_in_sleep(target: VllmConfig) -> contextlib.AbstractContextManager[object]:
    """Where to allocate what is to outlive the sleep of a worker.

    Args:
        target: The worker's own configuration.
    """
    return _pool(target, "runtime")


def dropped_in_sleep(drafter: VllmConfig) -> contextlib.AbstractContextManager[object]:
    """Where to allocate what is of no use after the sleep of a worker.

    Args:
        drafter: Its configuration, which says whether it lies in memory that sleeps.
    """
    return _pool(drafter, "kv_cache")


def _pool(config: VllmConfig, tag: str) -> contextlib.AbstractContextManager[object]:
    if not (current_platform.is_cuda_alike() and config.model_config.enable_cumem_allocator):
        return contextlib.nullcontext()
    pool: contextlib.AbstractContextManager[object] = get_mem_allocator_instance().use_memory_pool(
        tag=tag
    )
    return pool
