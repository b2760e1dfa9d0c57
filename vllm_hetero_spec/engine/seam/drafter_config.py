# SPDX-License-Identifier: Apache-2.0
"""The drafter's configurations: a ModelConfig in the front end, a VllmConfig in the worker."""

import contextlib
import copy
import re
from collections.abc import Callable

from vllm.config import CompilationConfig, ModelConfig, OffloadConfig, VllmConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.utils import replace

from vllm_hetero_spec.config import ConfigError, HeteroOptions
from vllm_hetero_spec.errors import one_line

# Room above the measured ratio of drafter to target tokens: texts differ, a context that does not
# fit is merely left undrafted.
_LENGTH_SLACK = 1.5


def drafter_model_config(options: HeteroOptions, target: ModelConfig) -> ModelConfig:
    """Read the drafter's configuration, so that a bad drafter fails before any weight is loaded.

    Raises:
        ConfigError: The drafter cannot be read, or does not generate text.
    """
    trust = options.trust_remote_code

    def read(runner: str) -> ModelConfig:
        return ModelConfig(
            model=options.model,
            tokenizer=options.tokenizer or options.model,
            tokenizer_mode=options.tokenizer_mode,
            runner=runner,
            trust_remote_code=target.trust_remote_code if trust is None else trust,
            dtype=options.dtype or target.dtype,
            seed=target.seed,
            revision=options.revision,
            tokenizer_revision=options.tokenizer_revision or options.revision,
            max_model_len=options.max_model_len,
            quantization=options.quantization,
            enforce_eager=options.enforce_eager,
        )

    try:
        config = read("draft")
    except (OSError, ValueError) as error:
        readable = None
        with contextlib.suppress(OSError, ValueError):
            readable = read("auto")
        if readable is not None:
            _check_generates(readable)
        raise ConfigError(
            f"the drafter {options.model!r} cannot be used: {first_sentence(error)}; give a folder "
            "or Hugging Face name of a causal language model that this vLLM supports."
        ) from error
    _check_generates(config)
    return config


def _check_generates(config: ModelConfig) -> None:
    if config.runner_type == "pooling" or config.is_encoder_decoder:
        raise ConfigError(
            f"the drafter {config.model!r} is {', '.join(config.architectures)}, which does not "
            "generate text left to right; a drafter must be a decoder-only causal language model."
        )


def first_sentence(error: Exception) -> str:
    """What an error of vLLM, pydantic or transformers says, without the frame around it."""
    text = one_line(error)
    text = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", text)
    return re.split(r"[.;] (?=[A-Z])|: \(1\)| \[type=|\.$", text, maxsplit=1)[0][:300]


def cap_length(drafter: ModelConfig, options: HeteroOptions, target_len: int, ratio: float) -> None:
    """Shorten `drafter.max_model_len` to what the target's contexts can need.

    Args:
        drafter: Changed in place.
        options: Nothing happens where the user set `max_model_len`.
        target_len: The target's longest context in its own tokens.
        ratio: Drafter tokens per target token on ordinary text.
    """
    if options.max_model_len is None:
        need = int(target_len * ratio * _LENGTH_SLACK) + 4 * options.num_speculative_tokens
        drafter.max_model_len = min(drafter.max_model_len, need)


def drafter_vllm_config(target: VllmConfig, drafter: ModelConfig, *, solo: bool) -> VllmConfig:
    """The configuration that the drafter is built and run with.

    Args:
        target: The worker's own configuration.
        drafter: From `drafter_model_config`.
        solo: Run the drafter whole on this rank, whatever the target's tensor parallelism.

    The compilation config is fresh: layers register in its static_forward_context, and the
    target's KV cache manager must not see the drafter's.
    """
    cache = copy.copy(target.cache_config)
    cache.num_gpu_blocks = None
    cache.num_gpu_blocks_override = None
    cache.kv_cache_memory_bytes = None
    scheduler = copy.copy(target.scheduler_config)
    scheduler.async_scheduling = False
    parallel = target.parallel_config
    if solo:
        parallel = copy.copy(parallel)
        parallel.tensor_parallel_size = 1
        parallel.world_size = 1
        parallel.rank = 0
    observability = copy.copy(target.observability_config)
    observability.per_request_spec_decode_metrics = "none"  # refused without speculation
    mode = CompilationMode.NONE if drafter.enforce_eager else target.compilation_config.mode
    return replace(
        target,
        model_config=drafter,
        cache_config=cache,
        scheduler_config=scheduler,
        parallel_config=parallel,
        observability_config=observability,
        compilation_config=CompilationConfig(mode=mode, cudagraph_mode=CUDAGraphMode.NONE),
        offload_config=OffloadConfig(),
        speculative_config=None,
        quant_config=None,
        lora_config=None,
        kv_transfer_config=None,
        kv_events_config=None,
    )


def kv_budget(options: HeteroOptions, target: VllmConfig, bytes_for: Callable[[int], int]) -> int:
    """Bytes for the drafter's KV pool.

    Args:
        options: `kv_cache_memory_bytes` wins where set.
        target: The worker's own configuration.
        bytes_for: Bytes of drafter KV for a number of tokens.

    By default the pool holds every sequence at full length, but takes no more than a quarter of an
    explicit target budget, or 4 GiB, unless that is less than a pool needs to work at all.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    scheduler = target.scheduler_config
    need = bytes_for(scheduler.max_num_seqs * target.model_config.max_model_len)
    explicit = target.cache_config.kv_cache_memory_bytes
    return max(min(need, explicit // 4 if explicit else 4 << 30), bytes_for(1))
