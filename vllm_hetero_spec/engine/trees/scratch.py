# SPDX-License-Identifier: Apache-2.0
"""Resources of draft trees in an engine: support, rows of a draft, scratch KV blocks.

Branches (`trees.layout`) write to scratch blocks, which belong to no request. These are the last
blocks of the KV cache: the scheduler gets a cache without them, the workers get all blocks, and
both compute their number by the same rule. Their contents are valid for one step.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.seam.async_scheduling import narrowest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = logging.getLogger("vllm.hetero_spec")

_BRANCHES = 32  # largest number of branches in a step
_SHARE = 20  # at most one block in 20 is scratch


def install() -> None:
    """Patch the scheduler of this process. Idempotent; no effect without trees."""
    from vllm.v1.core.sched.scheduler import Scheduler

    patching.wrap(Scheduler, "__init__", "scratch blocks", _init_scheduler)


def nodes_of(config: "VllmConfig") -> int:
    """Return the largest number of tokens of a tree; 0 if drafts are chains."""
    hetero = getattr(config.speculative_config, "hetero", None)
    return 0 if hetero is None or not hetero.tree_nodes or why_not(config) else hetero.tree_nodes


def reserve_rows(config: "VllmConfig") -> None:
    """Set `num_speculative_tokens` to the rows of a draft, including recomputed rows of a tree.

    Must run before vLLM checks the configuration.
    """
    spec = config.speculative_config
    nodes = nodes_of(config)
    if spec.hetero.tree_nodes and not nodes:
        logger.warning("Draft trees disabled: %s.", why_not(config))
    spec.num_speculative_tokens = max(spec.hetero.num_speculative_tokens, 2 * nodes)


def why_not(config: "VllmConfig") -> str:
    """Return why there can be no trees; empty if the configuration allows them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    scheduler, rows = config.scheduler_config, 1 + 2 * config.speculative_config.hetero.tree_nodes
    room, key = narrowest(config)
    wanted = scheduler.max_num_seqs * rows
    reasons = {
        "the target is in pipeline stages": parallel.pipeline_parallel_size > 1,
        # Otherwise the engines are independent.
        "data parallelism with experts": parallel.data_parallel_size > 1 and model.is_moe,
        "microbatches": parallel.use_ubatching,
        "the scheduler class is not derived from vLLM's": not issubclass(
            scheduler.get_scheduler_cls(), Scheduler
        ),
        "a KV connector": config.kv_transfer_config is not None,
        "the target uses M-RoPE": model.uses_mrope,
        "the target uses bidirectional image attention": model.is_mm_prefix_lm,
        "the target's window grows with its prompt": model.rswa_window is not None,
        "the target keeps recurrent states": model.is_hybrid or model.is_attention_free,
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "custom logits processors depend on the preceding tokens": _custom_processors(config),
        f"trees of this size need {key} of at least {rows}": room < rows,
        f"with LoRA trees of this size need max_num_batched_tokens of at least {wanted}, "
        f"{rows} for each of max_num_seqs": config.lora_config is not None
        and scheduler.max_num_batched_tokens < wanted,
    }
    return next((reason for reason, found in reasons.items() if found), "")


def _custom_processors(config: "VllmConfig") -> bool:
    """Return True if custom logits processors run; V1 disables them with speculation."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    named = config.model_config.logits_processors
    return config.use_v2_model_runner and bool(named or entry_points(group=LOGITSPROCS_GROUP))


def blocks_per_branch(config: "VllmConfig", block_sizes: Sequence[int]) -> int:
    """Return the most scratch blocks that a branch needs, over all KV cache groups."""
    longest = config.speculative_config.hetero.num_speculative_tokens
    return sum(-(-longest // size) + 1 for size in block_sizes)


def scratch_of(config: "VllmConfig", cache: "KVCacheConfig") -> range:
    """Return the scratch blocks of an engine; empty if drafts are chains."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    count = 0
    kinds = {type(spec) for group in cache.kv_cache_groups for spec in _layers(group.kv_cache_spec)}
    if nodes_of(config) and kinds <= {FullAttentionSpec, SlidingWindowSpec}:
        sizes = block_sizes_of(cache)
        # vLLM reserves block 0, and one request of full length must fit.
        longest = sum(-(-config.model_config.max_model_len // size) for size in sizes)
        wish = _BRANCHES * blocks_per_branch(config, sizes)
        count = max(0, min(wish, cache.num_blocks // _SHARE, cache.num_blocks - 1 - longest))
    return range(cache.num_blocks - count, cache.num_blocks)


def _layers(spec: "KVCacheSpec") -> Iterable["KVCacheSpec"]:
    """Return the specs of a group's layers; the scheduler only gets the first of several."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def block_sizes_of(cache: "KVCacheConfig") -> list[int]:
    """Return the tokens per block of each KV cache group."""
    return [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]


def branches_per_request(
    config: "VllmConfig", block_sizes: Sequence[int], scratch: int, requests: int
) -> int:
    """Return the largest number of branches of each request in a step."""
    free = config.scheduler_config.max_num_seqs - requests
    lent = scratch // blocks_per_branch(config, block_sizes)
    return max(0, min(_BRANCHES, free, lent) // max(1, requests))


def _init_scheduler(
    original: patching.Function,
    self: Any,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    *args: Any,
    **kwargs: Any,
) -> None:
    scratch = scratch_of(vllm_config, kv_cache_config)
    if scratch:
        kv_cache_config = replace(kv_cache_config, num_blocks=scratch.start)
        logger.info("%d KV blocks are reserved for the branches of draft trees.", len(scratch))
    original(self, vllm_config, kv_cache_config, *args, **kwargs)
