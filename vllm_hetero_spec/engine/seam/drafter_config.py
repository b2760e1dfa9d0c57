# SPDX-License-Identifier: Apache-2.0
"""What the drafter is built and run with, in the worker; `drafter_model` has read what it is."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
)
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import HeteroOptions

# CUDA graphs are captured for so many requests, of so many tokens each, up to so many in all: what
# attention needs beside them grows with the tokens of the largest. One token is a step of drafting,
# more are what a request has to read before it, longer texts in parts.
_GRAPH_BATCH = 256
READ_WIDTH = 32  # from which on it is for texts that the drafter has not read yet
_GRAPH_WIDTHS = (1, 4, 8, READ_WIDTH, 128)
_GRAPH_TOKENS = 512

# Load formats that ask for files of one kind, which the drafter's weights need not be in.
_FORMATS_OF_FILES = {
    *("hf", "ipc_cache", "mistral", "npcache", "pt", "runai_streamer_sharded"),
    *("safetensors", "sharded_state", "tensorizer"),
}


class DraftingMode(NamedTuple):
    """How the drafter's forwards are run.

    Attributes:
        shapes: (requests, tokens of each) that CUDA graphs are captured for, ascending; none where
            all forwards are eager.
        compiled: Whether the model is compiled, as the target is.
        why: Why it is eager; empty where there are graphs.
    """

    shapes: tuple[tuple[int, int], ...]
    compiled: bool
    why: str

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs are captured."""
        return bool(self.shapes)


def drafting_mode(options: HeteroOptions, target: VllmConfig) -> DraftingMode:
    """Graphs or eager, and why.

    Args:
        options: `enforce_eager` decides: unset is graphs of a model that is not compiled, unless
            the target is eager; false is compiled too; true is eager.
        target: The worker's own configuration.
    """
    compiled = options.enforce_eager is False
    why = ""
    if not current_platform.is_cuda():
        why = "CUDA graphs need an NVIDIA GPU"
    elif options.enforce_eager:
        why = "enforce_eager is true"
    elif target.model_config.enforce_eager and not compiled:
        why = "the target is eager"
    elif target.compilation_config.cudagraph_mode == CUDAGraphMode.NONE and not compiled:
        why = "the target runs without them"
    elif options.tensor_parallel == "sharded" and target.parallel_config.tensor_parallel_size > 1:
        why = "it is split over ranks"
    if why:
        return DraftingMode((), compiled, why)
    most = min(target.scheduler_config.max_num_seqs, _GRAPH_BATCH)
    batches = sorted({most, *(1 << n for n in range(most.bit_length()))})
    tokens = min(target.scheduler_config.max_num_batched_tokens, _GRAPH_TOKENS)
    shapes = [(b, width) for b in batches for width in _GRAPH_WIDTHS if b * width <= tokens]
    return DraftingMode(tuple(shapes), compiled, "")


def drafter_vllm_config(
    target: VllmConfig, drafter: ModelConfig, options: HeteroOptions, *, solo: bool
) -> VllmConfig:
    """The configuration that the drafter is built and run with.

    Args:
        target: The worker's own configuration.
        drafter: From `drafter_model.drafter_model_config`.
        options: The user's.
        solo: Run the drafter whole on this rank, whatever the target's tensor parallelism.

    Raises:
        ConfigError: The drafter's experts would be spread over the engines of the target.

    Copied from the target is what says where models run. What the user, or vLLM, has said of the
    target's weights, their kernels, KV cache and attention is not said of the drafter's. No part is
    the target's own: vLLM settles what a configuration leaves open by writing to it, and layers
    register in the compilation config, where its KV cache manager must not see the drafter's.
    """
    engines = target.parallel_config.data_parallel_size
    if engines > 1 and drafter.is_moe:
        raise ConfigError(
            f"the drafter {options.model!r} is a mixture of experts, as the target is, which vLLM "
            f"spreads over all {engines} engines of data parallelism; give a drafter without "
            "experts, or a data parallel size of 1."
        )
    model, mode = copy.copy(drafter), drafting_mode(options, target)
    model.enforce_eager = not (mode.graphs or mode.compiled)
    compilation = CompilationConfig(
        mode=target.compilation_config.mode if mode.compiled else CompilationMode.NONE,
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY if mode.graphs else CUDAGraphMode.NONE,
    )
    if mode.graphs:
        sizes = {requests * tokens for requests, tokens in mode.shapes}
        compilation.cudagraph_capture_sizes = sorted(sizes)
    kernels, scheduler, parallel = copy.deepcopy(
        (target.kernel_config, target.scheduler_config, target.parallel_config)
    )
    _let_platform_choose(kernels.ir_op_priority, target)
    kernels.moe_backend = kernels.linear_backend = "auto"  # of the target's weights
    kernels.linear_backend_per_quant = None
    scheduler.async_scheduling = False
    # Attention has room for the lines of side branches as well.
    lines = scheduler.max_num_seqs * max(1, options.merge_candidates)
    most = max(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    scheduler.max_num_seqs = min(lines, most)
    parallel.data_parallel_size = 1  # else each of the drafter's forwards waits for other engines
    parallel.enable_expert_parallel = False
    parallel.enable_eplb = False
    parallel.world_size //= parallel.pipeline_parallel_size
    parallel.pipeline_parallel_size = 1
    if solo:
        parallel.tensor_parallel_size = 1
        parallel.world_size = 1
    parallel.rank %= parallel.world_size
    dtype = resolve_kv_cache_dtype_string(options.kv_cache_dtype or "auto", model)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(cache_dtype=dtype, sliding_window=_window(model)),
        attention_config=AttentionConfig(backend=options.attention_backend),
        load_config=_load_config(target.load_config),
        compilation_config=compilation,
        kernel_config=kernels,
        scheduler_config=scheduler,
        parallel_config=parallel,
        device_config=copy.deepcopy(target.device_config),
        additional_config=copy.deepcopy(target.additional_config),
        optimization_level=target.optimization_level,
    )


def _window(model: ModelConfig) -> int | None:
    """Tokens that all layers look back, where a model has one window for all; as vLLM has it."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or ["sliding_attention"]
    alike = all(kind == "sliding_attention" for kind in kinds)
    window: int | None = model.get_sliding_window() if alike else None
    return window


def _load_config(target: LoadConfig) -> LoadConfig:
    """How the drafter's weights are read: as the target's, where that does not hang on its files.

    Args:
        target: Of the target.
    """
    found = copy.deepcopy(target)
    if found.load_format in _FORMATS_OF_FILES:
        found.load_format = "auto"
        found.model_loader_extra_config = {}
    return found


def stand_alone(parallel: ParallelConfig) -> None:
    """Forget where the target's ranks are: the only rank of a process counts devices from there.

    Args:
        parallel: Of the drafter in a process of its own; changed in place.
    """
    parallel.data_parallel_index = parallel.data_parallel_rank_local = parallel.node_rank = 0
    parallel.nnodes = 1
    parallel.assigned_physical_gpu_ids = None


def _let_platform_choose(priorities: Any, target: VllmConfig) -> None:
    """Take back which kernels run what the target compiles, but for what the user has named.

    A compiled model has norms fused where they are written in single operations, which one that is
    not compiled would run one by one.

    Args:
        priorities: A copy of the target's IrOpPriorityConfig, in which vLLM has put its own choice
            behind the user's; changed in place.
        target: Whose it is a copy of.
    """
    for name, chosen in vars(current_platform.get_default_ir_op_priority(target)).items():
        mine = [kernel for kernel in getattr(priorities, name) if kernel not in chosen]
        setattr(priorities, name, mine)


def kv_budget(
    options: HeteroOptions, target: VllmConfig, context: int, bytes_for: Callable[[int], int]
) -> int:
    """Bytes for the drafter's KV pool.

    Args:
        options: `kv_cache_memory_bytes` wins where set.
        target: The worker's own configuration.
        context: Drafter tokens of a sequence at most.
        bytes_for: Bytes of drafter KV for a number of tokens.

    By default the pool holds every sequence at full length, but takes no more than a quarter of an
    explicit target budget, or else a sixteenth of the device's memory or 4 GiB, unless that is less
    than a pool needs to work at all.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    scheduler = target.scheduler_config
    need = bytes_for(scheduler.max_num_seqs * context)
    explicit = target.cache_config.kv_cache_memory_bytes
    if explicit:
        most = explicit // 4
    else:
        most = min(4 << 30, current_platform.get_device_total_memory() // 16)
    return max(min(need, most), bytes_for(1))
