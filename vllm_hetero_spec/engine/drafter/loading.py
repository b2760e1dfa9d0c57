# SPDX-License-Identifier: Apache-2.0
"""Load the drafter with KV tensors and attention groups of its own, without a model runner.

vLLM's scheduler owns the target's KV blocks. The drafter owns its KV tensors, and `KVPool` their
block numbers. Both models register their layers in separate `static_forward_context`s, so neither
finds the other's layers.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import (
    ModelConfig,
    VllmConfig,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.offloader import create_offloader, get_offloader, set_offloader
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu.attn_utils import (
    get_kv_cache_spec,
    get_shared_kv_cache_layers,
    init_attn_backend,
    init_kv_cache,
)

from vllm_hetero_spec.engine.compat.releases import kv_cache_planning
from vllm_hetero_spec.engine.drafter.filled_weights import load_filled
from vllm_hetero_spec.engine.seam.drafter_model import first_sentence
from vllm_hetero_spec.engine.seam.sleep_mode import dropped_in_sleep
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.weights import missing_weights

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.utils import AttentionGroup

# Argument: a function from a number of tokens to KV bytes. Result: the KV budget in bytes.
KVBudget = Callable[[Callable[[int], int]], int]


class LoadedDrafter(NamedTuple):
    """The drafter's weights and attention state. All `groups` of layers share one block table."""

    model: torch.nn.Module
    groups: "list[AttentionGroup]"
    layers: list[str]
    num_blocks: int
    block_size: int
    kv_caches: dict[str, torch.Tensor]


@contextmanager
def faults_named(drafter: ModelConfig) -> Iterator[None]:
    """Context that adds the drafter and a reason to errors of vLLM and its kernels.

    Raises:
        ConfigError: The drafter's folder lacks weights, or its quantization fails on this platform.
    """
    name = drafter.model
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):  # vLLM's message has the remedy
        raise
    except Exception as error:
        reason = missing_weights(name) if os.path.isdir(name) else ""
        if reason:
            raise ConfigError(f"the drafter {name!r} cannot be loaded: {reason}.") from error
        if drafter.quantization is None:
            raise
        raise ConfigError(
            f"the drafter {name!r} cannot be loaded with quantization {drafter.quantization!r} on "
            f"this {current_platform.device_type} ({type(error).__name__}: "
            f"{first_sentence(error)}); use another quantization, or none."
        ) from error


def load_drafter(config: VllmConfig, device: torch.device, kv_budget: KVBudget) -> LoadedDrafter:
    """Load the drafter for the target's platform. Sets the block size and KV layout of `config`.

    Raises:
        ConfigError: The weights are incomplete, the layers cannot share KV blocks, or the budget is
            smaller than two blocks.
    """
    with set_current_vllm_config(config):
        with _offloader_of(config), _own_rotary_embeddings(), set_model_tag("draft_model"):
            model = load_filled(config)
        # The drafter's attention backends determine its block size. vLLM sets the target's later,
        # after the target's layers exist.
        current_platform.update_block_size_for_backend(config)
        plan = _planned_kv(config, kv_budget)
        (group,) = plan.kv_cache_groups
        specs = group.kv_cache_spec.kv_cache_specs
        for name, lender in get_shared_kv_cache_layers(config).items():
            specs[name] = specs[lender]
        groups, _, kernel_block_sizes = init_attn_backend(plan, config, device)
        layers = config.compilation_config.static_forward_context
        kv_caches = init_kv_cache(
            layers,
            plan,
            device,
            kernel_block_sizes,
            config,
            kv_cache_allocation_context=dropped_in_sleep(config),
            attn_groups=groups[0],
        )
    size, names = group.kv_cache_spec.block_size, list(group.layer_names)
    return LoadedDrafter(model, groups[0], names, plan.num_blocks, size, kv_caches)


@contextmanager
def _offloader_of(config: VllmConfig) -> Iterator[None]:
    """Use the drafter's own offloader while loading. vLLM has one per process, the target's."""
    held = get_offloader()
    set_offloader(create_offloader(config.offload_config))
    try:
        yield
    finally:
        set_offloader(held)


@contextmanager
def _own_rotary_embeddings() -> Iterator[None]:
    """Create rotary embeddings for the drafter instead of sharing the target's.

    vLLM caches equal modules. The target's is built for compilation, and without it would run as
    single operations.
    """
    held, rotary_embedding._ROPE_DICT = rotary_embedding._ROPE_DICT, {}
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT = held


def _planned_kv(config: VllmConfig, kv_budget: KVBudget) -> "KVCacheConfig":
    """Plan the drafter's KV tensors. A block number covers the same tokens in every layer."""
    cache, planning = config.cache_config, kv_cache_planning()
    if cache.kv_cache_layout is None:
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        layouts = get_supported_kv_cache_layouts(
            {layer.get_attn_backend() for layer in layers.values()}
        )
        cache.kv_cache_layout = layouts[0].name
    group = _one_group(config)

    def planned(num_blocks: int) -> "KVCacheConfig":
        cache.num_gpu_blocks_override = num_blocks
        return planning.get_kv_cache_config_from_groups(config, [group], 0)

    size = group.kv_cache_spec.block_size
    block_bytes = planned(1).kv_cache_tensors[0].size
    budget = kv_budget(lambda tokens: block_bytes * (-(-tokens // size) + 1))
    # One block for padding and at least one for tokens.
    num_blocks = budget // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget} is less than two KV blocks of the drafter "
            f"({block_bytes} bytes each); give it at least {2 * block_bytes}."
        )
    return planned(num_blocks)


def _one_group(config: VllmConfig) -> KVCacheGroupSpec:
    """Put all attention layers into one group, sliding-window layers included.

    The KV of sliding-window layers is kept at full length. Attention still reads the window only.
    """
    specs: dict[str, KVCacheSpec] = get_kv_cache_spec(config)
    kinds = ", ".join(sorted({type(spec).__name__ for spec in specs.values()}))
    uniform = None
    if specs and all(isinstance(spec, AttentionSpec) for spec in specs.values()):
        try:
            kv_cache_planning().unify_hybrid_kv_cache_specs(specs)
            uniform = UniformTypeKVCacheSpecs.from_specs(specs)
        except ValueError:
            pass  # different kinds that vLLM cannot unify
    if uniform is None:
        raise ConfigError(
            f"the drafter's layers keep {kinds or 'no KV cache'}, which cannot share KV blocks; "
            "supported: attention in all layers, full, or some of them with a sliding window."
        )
    return KVCacheGroupSpec(list(specs), uniform)
