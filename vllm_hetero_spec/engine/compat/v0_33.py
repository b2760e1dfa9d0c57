# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33: the KV cache plan moved to its own module and takes the groups as an argument."""

from typing import Any


def plan_kv_cache(vllm_config: Any, kv_cache_spec: dict[str, Any], memory: int) -> Any:
    """See `Release.plan_kv_cache`."""
    from vllm.v1.core.kv_cache_planning import (  # type: ignore[import-not-found,unused-ignore]
        get_global_kv_cache_groups,
        get_kv_cache_configs,
    )

    groups = get_global_kv_cache_groups(vllm_config, [kv_cache_spec])
    return get_kv_cache_configs(vllm_config, [kv_cache_spec], [memory], groups)[0]
