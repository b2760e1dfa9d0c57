# SPDX-License-Identifier: Apache-2.0
"""Memory of the drafter in vLLM's sleep mode.

Level 2 discards the target's weights, and the user loads them again. Nothing would load the
drafter's weights again. They are therefore allocated with a tag that vLLM backs up to host memory
at every level. Addresses do not change, so CUDA graphs stay valid. The drafter's KV is discarded
with the target's, and requests are prefilled again.

A drafter in a process of its own is not in vLLM's memory. At level 1 it stays, idle. At level 2 its
process ends, and starts again when the worker wakes.
"""

import contextlib

from vllm.config import VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.platforms import current_platform


def kept_in_sleep(target: VllmConfig) -> contextlib.AbstractContextManager[object]:
    """Return a context in which allocated memory survives sleep of every level."""
    return _pool(target, "runtime")


def dropped_in_sleep(drafter: VllmConfig) -> contextlib.AbstractContextManager[object]:
    """Return a context in which allocated memory is discarded in sleep of every level."""
    return _pool(drafter, "kv_cache")


def _pool(config: VllmConfig, tag: str) -> contextlib.AbstractContextManager[object]:
    if not (current_platform.is_cuda_alike() and config.model_config.enable_cumem_allocator):
        return contextlib.nullcontext()
    pool: contextlib.AbstractContextManager[object] = get_mem_allocator_instance().use_memory_pool(
        tag=tag
    )
    return pool
