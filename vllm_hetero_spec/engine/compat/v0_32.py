# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32: the KV cache plan of a single worker."""

from typing import Any


def plan_kv_cache(vllm_config: Any, kv_cache_spec: dict[str, Any], memory: int) -> Any:
    """See `Release.plan_kv_cache`."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    return get_kv_cache_configs(vllm_config, [kv_cache_spec], [memory])[0]
