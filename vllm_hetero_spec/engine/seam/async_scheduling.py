# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on Model Runner V2: draft lengths are chosen before the drafts exist.

The scheduler sets the draft length of a step before the drafts are made, the same for every
request. It chooses one of a few lengths (`buckets`), for which vLLM captures full CUDA graphs. A
shorter draft is padded. Padding is neither verified nor counted. The controller sends the next
draft length with a step's output; it takes effect one or two steps later.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.spec_decode.metrics import SpecDecodingStats
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
    from vllm.v1.worker.worker_base import WorkerWrapperBase

logger = logging.getLogger("vllm.hetero_spec")

# Keys that limit the tokens of one request in a step; 0 or None is no limit.
_ROOMS = "max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"

_FIELD = "hetero_spec_ahead"
_PADDING = "hetero_spec_padding"
_MANY = 1 << 30  # requests; more than any engine has


@dataclass(frozen=True)
class AsyncStepInfo:
    """Data that a step's output carries to the scheduler.

    Attributes:
        lookahead: Draft tokens per request in the next scheduled steps.
        padding: Number of scheduled tokens beyond the draft, by request of this step.
    """

    lookahead: int
    padding: dict[str, int]

    def put_on(self, output: object) -> None:
        """Attach this to a step's ModelRunnerOutput."""
        setattr(output, _FIELD, self)


def buckets(longest: int, chain: int) -> list[int]:
    """Return the scheduled draft lengths, ascending: 0, and about half and all of each argument.

    With draft trees, `chain` (tokens of the longest chain) is less than `longest` (rows of the
    longest draft), so that chains are not padded to the rows of a tree.
    """
    return sorted({0, *(n for of in (chain, longest) for n in ((of + 1) // 2, of))})


def buckets_of(config: "VllmConfig") -> list[int]:
    """Return the buckets of an engine of ours; empty without asynchronous scheduling."""
    spec = config.speculative_config
    if not config.scheduler_config.async_scheduling:
        return []
    return buckets(spec.num_speculative_tokens, spec.hetero.num_speculative_tokens)


def install(reserve_rows: Callable[["VllmConfig"], None]) -> None:
    """Install the hooks in a process of an engine. Idempotent; inert for other drafters.

    All pipeline stages have to choose the same CUDA graphs, also those that do not draft.

    `reserve_rows` sets the `num_speculative_tokens` of a configuration of ours to the rows of its
    longest draft.
    """
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    patching.wrap(WorkerWrapperBase, "init_device", "graphs", _init_device)
    patching.wrap(VllmConfig, "__post_init__", "asynchronous", partial(_post_init, reserve_rows))
    patching.add(AsyncScheduler, "update_from_output", update_from_output)
    patching.add(AsyncScheduler, "make_spec_decoding_stats", make_spec_decoding_stats)
    patching.wrap(RequestSpecDecodeMetrics, "observe", "asynchronous", _observe)


def update_from_output(
    self: Any, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
) -> Any:
    """Method added to `AsyncScheduler`: apply `AsyncStepInfo`, then call the original method."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    ahead: AsyncStepInfo | None = getattr(model_runner_output, _FIELD, None)
    if ahead is not None:
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        # A grammar may cut a draft, too. vLLM then counts the cut tokens and the padding.
        padding = {key: max(count, invalid.get(key, 0)) for key, count in ahead.padding.items()}
        scheduler_output.num_invalid_spec_tokens = invalid | padding
        if self.dynamic_sd_lookup is not None:
            self.dynamic_sd_lookup[:] = [ahead.lookahead] * len(self.dynamic_sd_lookup)
    return super(AsyncScheduler, self).update_from_output(scheduler_output, model_runner_output)


def make_spec_decoding_stats(
    self: Any,
    spec_decoding_stats: "SpecDecodingStats | None",
    num_draft_tokens: int,
    num_accepted_tokens: int,
    num_invalid_spec_tokens: dict[str, int] | None,
    request_id: str,
) -> "SpecDecodingStats | None":
    """Method added to `AsyncScheduler`: do not count a draft that is only padding."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    if num_draft_tokens and (num_invalid_spec_tokens or {}).get(request_id) == num_draft_tokens:
        if (own := self.requests[request_id].spec_decode_metrics) is not None:
            setattr(own, _PADDING, True)  # vLLM calls own.observe() next
        return spec_decoding_stats
    stats: SpecDecodingStats | None = super(AsyncScheduler, self).make_spec_decoding_stats(
        spec_decoding_stats,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        num_invalid_spec_tokens=num_invalid_spec_tokens,
        request_id=request_id,
    )
    return stats


def _observe(
    original: patching.Function, self: "RequestSpecDecodeMetrics", *args: Any, **kwargs: Any
) -> None:
    """Skip a draft that is only padding in the statistics of a request."""
    if not self.__dict__.pop(_PADDING, False):
        original(self, *args, **kwargs)


def _init_device(original: patching.Function, self: "WorkerWrapperBase") -> None:
    """Hook the choice of graphs of Model Runner V2 before the runner of any stage is built."""
    if self.vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu import cudagraph_utils

        capture_all_tiers(cudagraph_utils)
    original(self)


def capture_all_tiers(cudagraph_utils: ModuleType) -> None:
    """Make a worker capture full CUDA graphs of all buckets for every batch size."""
    patching.wrap(cudagraph_utils, "build_dynamic_sd_schedule_lookup", "all tiers", _lookup)
    manager = cudagraph_utils.CudaGraphManager
    patching.wrap(manager, "_init_candidates", "nearest graphs", _init_candidates)


def _schedule(named: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the buckets in vLLM's format, each with a range of batch sizes.

    The controller chooses the bucket, so a range only sets the batch sizes for which vLLM plans
    graphs. The longest drafts have the large batches, because they need most tokens.
    """
    *some, longest = named
    last = len(some) + 1, _MANY, longest
    return [*((size, size, bucket) for size, bucket in enumerate(some, 1)), last]


def _lookup(original: patching.Function, schedule: Any, *args: Any, **kwargs: Any) -> Any:
    if schedule and schedule[-1][1] == _MANY:
        return [0, *(bucket for _, _, bucket in schedule)]
    return original(schedule, *args, **kwargs)


def _init_candidates(original: patching.Function, self: "CudaGraphManager") -> None:
    """Offer every batch the smallest sufficient graph of each bucket.

    vLLM only offers graphs of the next captured size, which may all belong to another bucket. With
    synchronous scheduling it captures full graphs for whole drafts alone, so steps without drafts
    would be slower than without speculation. The buckets are then 0 and the longest draft. Some
    layers can only be captured with whole drafts.
    """
    spec = self.vllm_config.speculative_config
    if not hasattr(spec, "hetero"):
        original(self)
        return
    schedule = spec.num_speculative_tokens_per_batch_size
    tiers = schedule or _schedule([0, spec.num_speculative_tokens])
    if _needs_whole_drafts(self.vllm_config):
        tiers = None
    try:
        spec.num_speculative_tokens_per_batch_size = tiers
        original(self)
    finally:
        spec.num_speculative_tokens_per_batch_size = schedule
    full = [graph for graphs in self._capture_descs.values() for graph in graphs]
    full = sorted((g for g in full if g.uniform_token_count), key=lambda g: g.num_tokens)
    for (tokens, adapters), offered in self._candidates.items():
        nearest: dict[tuple[int, int], BatchExecutionDescriptor] = {}
        for graph in full:
            if graph.num_tokens >= tokens and graph.num_active_loras == adapters:
                nearest.setdefault((graph.uniform_token_count, graph.num_ubatches), graph)
        offered[:0] = [graph for graph in nearest.values() if graph not in offered]


def _needs_whole_drafts(config: "VllmConfig") -> bool:
    """Return True if a layer can only be captured with whole drafts, as those of Mamba 1 and 2."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    builders = {layer.get_attn_backend().get_builder_cls() for layer in layers}
    captures = [builder.build_for_cudagraph_capture.__qualname__ for builder in builders]
    return any(name.startswith("BaseMamba") for name in captures)


def narrowest(config: "VllmConfig") -> tuple[int, str]:
    """Return the largest number of a request's tokens in a step, and the key that limits it."""
    given = ((getattr(config.scheduler_config, key), key) for key in _ROOMS)
    return min((room, key) for room, key in given if room)


def _check_room(config: "VllmConfig") -> None:
    """Raise ConfigError if drafts are longer than a step, with synchronous scheduling.

    vLLM pads a waiting request with one token to compute, for example after a cached prefix, to all
    rows of a draft. If these do not fit, it never schedules the request, or the engine ends.
    """
    spec = config.speculative_config
    rows = 1 + spec.num_speculative_tokens
    own = spec.hetero.num_speculative_tokens
    given = "num_speculative_tokens" if rows == 1 + own else "tree_nodes"  # a tree has more rows
    room, key = narrowest(config)
    if room < rows:
        raise ConfigError(
            f"{key} is {room}, too few for drafts of {rows - 1} tokens; it must be at least "
            f"{rows}, or {given} lower."
        )


def _post_init(
    reserve_rows: Callable[["VllmConfig"], None],
    original: patching.Function,
    self: "VllmConfig",
    *args: Any,
    **kwargs: Any,
) -> None:
    spec, scheduler = self.speculative_config, self.scheduler_config
    if not hasattr(spec, "hetero"):
        original(self, *args, **kwargs)
        return
    reserve_rows(self)
    asked, scheduler.async_scheduling = scheduler.async_scheduling, False  # vLLM refuses it
    # An engine core runs this again on its configuration and finds the earlier decision.
    reason = _why_not(self) or ("async_scheduling=False" if asked is False else "")
    if not reason:  # vLLM plans graphs below, and needs the buckets
        named = buckets(spec.num_speculative_tokens, spec.hetero.num_speculative_tokens)
        spec.num_speculative_tokens_per_batch_size = _schedule(named)
    else:
        _check_room(self)
    original(self, *args, **kwargs)
    if not reason:
        scheduler.async_scheduling = True
    elif asked:
        raise ConfigError(
            f"async_scheduling=True is not possible with this drafter: {reason}. Leave "
            "async_scheduling out, and steps are scheduled one after the other."
        )
    else:
        logger.info("Asynchronous scheduling disabled: %s.", reason)


def _why_not(config: "VllmConfig") -> str:
    """Return why asynchronous scheduling is not possible; empty if it is."""
    from vllm.v1.executor.abstract import Executor

    if not config.use_v2_model_runner:
        return "Model Runner V1 needs the drafts before it schedules"
    if config.parallel_config.data_parallel_size > 1:
        return "vLLM supports only one draft length with data parallelism"
    if not Executor.get_class(config).supports_async_scheduling():
        return (
            f"{config.parallel_config.distributed_executor_backend!r} executors do not support it"
        )
    if not platform_can():
        return "the target runs on the CPU"
    return ""


def platform_can() -> bool:
    """Return True if the target runs on a device other than the CPU."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()
