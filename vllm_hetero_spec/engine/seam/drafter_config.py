# SPDX-License-Identifier: Apache-2.0
"""Configuration with which a worker builds and runs the drafter."""

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

# Bounds of the captured CUDA graphs. Attention's buffers grow with the tokens of the largest graph.
_GRAPH_BATCH = 256  # requests
READ_WIDTH = 32  # tokens per request; graphs of this width or more are for prefill
# Tokens per request. 1 is a decode step; the others are for catch-up, which is split if longer.
_GRAPH_WIDTHS = (1, 4, 8, READ_WIDTH, 128)
_GRAPH_TOKENS = 512  # tokens of all requests together
# Tokens of a forward for which a compiled drafter has code of its own, beside the general one. With
# so few rows the compiler replaces library calls by fused kernels. Each size takes start-up time.
_COMPILED_TOKENS = (1, 2, 4, 8)

# Load formats that require one kind of files. The drafter's files may be of another kind.
_FORMATS_OF_FILES = {
    *("hf", "ipc_cache", "mistral", "npcache", "pt", "runai_streamer_sharded"),
    *("safetensors", "sharded_state", "tensorizer"),
}
# Load formats in which all ranks read together. Often one rank alone has the drafter.
_FORMATS_OF_ALL_RANKS = {"fastsafetensors", "instanttensor"}


class DraftingMode(NamedTuple):
    """Execution mode of the drafter's forwards.

    Attributes:
        shapes: Shapes of the captured CUDA graphs, (requests, tokens per request), in ascending
            order; empty if all forwards are eager.
        compiled: True if the model is compiled.
        why: Reason for eager execution; empty with graphs.
    """

    shapes: tuple[tuple[int, int], ...]
    compiled: bool
    why: str

    @property
    def graphs(self) -> bool:
        return bool(self.shapes)


def drafting_mode(options: HeteroOptions, target: VllmConfig) -> DraftingMode:
    """Choose between CUDA graphs and eager execution.

    `enforce_eager` decides. Unset: graphs of an uncompiled model, unless the target is eager.
    False: graphs of a compiled model. True: eager.
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
        why = "the drafter is sharded over ranks"
    if why:
        return DraftingMode((), compiled, why)
    most = min(target.scheduler_config.max_num_seqs, _GRAPH_BATCH)
    batches = sorted({most, *(1 << n for n in range(most.bit_length()))})
    tokens = min(target.scheduler_config.max_num_batched_tokens, _GRAPH_TOKENS)
    shapes = [(b, width) for b in batches for width in _GRAPH_WIDTHS if b * width <= tokens]
    return DraftingMode(tuple(shapes), compiled, "")


def drafter_vllm_config(
    target: VllmConfig,
    drafter: ModelConfig,
    options: HeteroOptions,
    *,
    solo: bool,
    added: int = 1,
) -> VllmConfig:
    """Return the configuration with which the drafter is built and run.

    Settings of the machine and of parallelism are copied from the target. Settings of the target's
    weights, kernels, KV cache and attention are not copied. No part is shared with the target,
    because vLLM writes defaults into a configuration. Layers also register in the compilation
    config, and vLLM's KV cache manager must not see the drafter's layers there.

    With `solo`, this rank runs the whole drafter, even if the target is tensor parallel. A round
    feeds up to `added` tokens per request beside the context tokens of its budget.

    Raises:
        ConfigError: vLLM would spread the drafter's experts over several engines.
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
        if mode.compiled:
            compilation.compile_sizes = [size for size in _COMPILED_TOKENS if size in sizes]
    kernels, scheduler, parallel = copy.deepcopy(
        (target.kernel_config, target.scheduler_config, target.parallel_config)
    )
    _let_platform_choose(kernels.ir_op_priority, target)
    kernels.moe_backend = kernels.linear_backend = "auto"  # the target's suit only its own weights
    kernels.linear_backend_per_quant = None
    scheduler.async_scheduling = False
    # A request has up to `merge_candidates` sequences in the drafter's attention.
    lines = scheduler.max_num_seqs * max(1, options.merge_candidates)
    most = max(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    scheduler.max_num_seqs = min(lines, most)
    if mode.compiled:  # there is no code for more tokens
        scheduler.max_num_batched_tokens += added * scheduler.max_num_seqs
    parallel.data_parallel_size = 1  # else each drafter forward waits for other engines
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
    """Return the sliding window in tokens if all layers have the same one, as vLLM does."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or ["sliding_attention"]
    alike = all(kind == "sliding_attention" for kind in kinds)
    window: int | None = model.get_sliding_window() if alike else None
    return window


def _load_config(target: LoadConfig) -> LoadConfig:
    """Copy the target's load configuration, without settings that depend on its files."""
    found = copy.deepcopy(target)
    if found.load_format in _FORMATS_OF_FILES | _FORMATS_OF_ALL_RANKS:
        found.load_format = "auto"
        found.model_loader_extra_config = {}
    # "distributed" is an option of runai_streamer, which also reads from object stores.
    extra = found.model_loader_extra_config
    if isinstance(extra, dict):
        found.model_loader_extra_config = {k: v for k, v in extra.items() if k != "distributed"}
    return found


def stand_alone(parallel: ParallelConfig) -> None:
    """Change a parallel configuration, in place, to that of a process with one rank.

    vLLM computes the device index from the ranks in the configuration.
    """
    parallel.data_parallel_index = parallel.data_parallel_rank_local = parallel.node_rank = 0
    parallel.nnodes = 1
    parallel.assigned_physical_gpu_ids = None


def _let_platform_choose(priorities: Any, target: VllmConfig) -> None:
    """Remove vLLM's kernel choice for the target from a copy of its IrOpPriorityConfig, in place.

    vLLM has appended its choice to the user's, which is kept. In a compiled model, norms are single
    operations that the compiler fuses; without compilation they would run one by one.
    """
    for name, chosen in vars(current_platform.get_default_ir_op_priority(target)).items():
        mine = [kernel for kernel in getattr(priorities, name) if kernel not in chosen]
        setattr(priorities, name, mine)


def kv_budget(
    options: HeteroOptions, target: VllmConfig, context: int, bytes_for: Callable[[int], int]
) -> int:
    """Return the bytes of the drafter's KV pool; `kv_cache_memory_bytes` has priority.

    By default the pool holds every request at full length, `context` drafter tokens. It is limited
    to a quarter of an explicit target budget, or else to 1/16 of the device's memory and 4 GiB. It
    always has the minimum size with which it works.
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
