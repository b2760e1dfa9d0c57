# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on Model Runner V2: a step is scheduled before the one before has ended.

The scheduler then says how many draft tokens a step verifies before they are drafted, the same
number for every request. It chooses among a few (`buckets`), for which vLLM captures full CUDA
graphs; what a draft falls short of is padding, which is neither verified nor counted. How far the
controller wants to draft travels on a step's output, and holds for a step or two later.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.trees import scratch
from vllm_hetero_spec.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.spec_decode.metrics import SpecDecodingStats
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

logger = logging.getLogger("vllm.hetero_spec")

_FIELD = "hetero_spec_ahead"
_PADDING = "hetero_spec_padding"
_MANY = 1 << 30  # requests: more than any engine has


@dataclass(frozen=True)
class AsyncStepInfo:
    """What a step's output tells the scheduler.

    Attributes:
        lookahead: Draft tokens that coming steps are to verify for each request.
        padding: Of this step, tokens that were scheduled for a request beyond its draft.
    """

    lookahead: int
    padding: dict[str, int]

    def put_on(self, output: object) -> None:
        """Send it along with a step's ModelRunnerOutput."""
        setattr(output, _FIELD, self)


def buckets(longest: int, chain: int) -> list[int]:
    """The lookaheads that steps are scheduled with: none, about half, all. Rising.

    Args:
        longest: The longest draft, in rows.
        chain: The longest chain, where drafts may be trees: those that are not are not padded to
            the rows of trees.
    """
    return sorted({0, *(n for of in (chain, longest) for n in ((of + 1) // 2, of))})


def buckets_of(config: "VllmConfig") -> list[int]:
    """The tiers of an engine; empty where its steps are scheduled one after the other."""
    spec = config.speculative_config
    if not config.scheduler_config.async_scheduling or not hasattr(spec, "hetero"):
        return []
    return buckets(spec.num_speculative_tokens, spec.hetero.num_speculative_tokens)


def install() -> None:
    """Install this in a process that makes configurations, or schedules. Idempotent."""
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    patching.replace(VllmConfig, "__post_init__", "asynchronous", _wrap_post_init)
    patching.add(AsyncScheduler, "update_from_output", update_from_output)
    patching.add(AsyncScheduler, "make_spec_decoding_stats", make_spec_decoding_stats)
    patching.replace(RequestSpecDecodeMetrics, "observe", "asynchronous", _wrap_observe)


def update_from_output(
    self: Any, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
) -> Any:
    """`update_from_output` of the asynchronous scheduler, which first hears what a step tells."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    ahead: AsyncStepInfo | None = getattr(model_runner_output, _FIELD, None)
    if ahead is not None:
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        # A grammar cuts drafts as well, and counts what is cut with the padding behind it.
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
    """`make_spec_decoding_stats` of the asynchronous scheduler: all padding is no draft."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    if num_draft_tokens and (num_invalid_spec_tokens or {}).get(request_id) == num_draft_tokens:
        if (own := self.requests[request_id].spec_decode_metrics) is not None:
            setattr(own, _PADDING, True)  # vLLM tells it next
        return spec_decoding_stats
    stats: SpecDecodingStats | None = super(AsyncScheduler, self).make_spec_decoding_stats(
        spec_decoding_stats,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        num_invalid_spec_tokens=num_invalid_spec_tokens,
        request_id=request_id,
    )
    return stats


def _wrap_observe(original: patching.Function) -> patching.Function:
    def observe(self: "RequestSpecDecodeMetrics", *args: Any, **kwargs: Any) -> None:
        """`observe` of a request's own figures, in which padding is no draft either."""
        if not self.__dict__.pop(_PADDING, False):
            original(self, *args, **kwargs)

    return observe


def capture_all_tiers(cudagraph_utils: ModuleType) -> None:
    """Have a worker capture full graphs of all tiers, in whatever batch a tier stands.

    Args:
        cudagraph_utils: vLLM's module of Model Runner V2.
    """
    name = "build_dynamic_sd_schedule_lookup"
    patching.replace(cudagraph_utils, name, "all tiers", _wrap_lookup)
    manager = cudagraph_utils.CudaGraphManager
    patching.replace(manager, "_init_candidates", "nearest graphs", _wrap_candidates)


def _schedule(named: Sequence[int]) -> list[tuple[int, int, int]]:
    """Tiers as vLLM wants them, each for a range of batches.

    The scheduler is told which one holds, so that the ranges decide one thing alone: how large are
    the batches whose graphs vLLM plans for. The longest drafts make the most tokens of a batch.
    """
    *some, longest = named
    last = len(some) + 1, _MANY, longest
    return [*((size, size, bucket) for size, bucket in enumerate(some, 1)), last]


def _wrap_lookup(original: patching.Function) -> patching.Function:
    def build_dynamic_sd_schedule_lookup(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if schedule and schedule[-1][1] == _MANY:
            return [0, *(bucket for _, _, bucket in schedule)]
        return original(schedule, *args, **kwargs)

    return build_dynamic_sd_schedule_lookup


def _wrap_candidates(original: patching.Function) -> patching.Function:
    def _init_candidates(self: "CudaGraphManager") -> None:
        """`_init_candidates`, and every tier has the smallest of its own graphs that is enough.

        vLLM offers a batch the graphs of the next number of tokens that there are any of, which
        may all be another tier's.
        """
        original(self)
        if not hasattr(self.vllm_config.speculative_config, "hetero"):
            return
        full = [graph for graphs in self._capture_descs.values() for graph in graphs]
        full = sorted((g for g in full if g.uniform_token_count), key=lambda g: g.num_tokens)
        for (tokens, adapters), offered in self._candidates.items():
            nearest: dict[tuple[int, int], BatchExecutionDescriptor] = {}
            for graph in full:
                if graph.num_tokens >= tokens and graph.num_active_loras == adapters:
                    nearest.setdefault((graph.uniform_token_count, graph.num_ubatches), graph)
            offered[:0] = [graph for graph in nearest.values() if graph not in offered]

    return _init_candidates


def _check_room(config: "VllmConfig") -> None:
    """Refuse drafts that are longer than a step takes, where steps follow one another.

    vLLM pads a waiting request with one token to compute, as behind a cached prefix, to all rows of
    a draft. Where these do not fit, it never schedules the request, or its engine ends.

    Args:
        config: Of an engine of ours, settled.

    Raises:
        ConfigError: They do not fit.
    """
    spec = config.speculative_config
    rows = 1 + spec.num_speculative_tokens
    own = spec.hetero.num_speculative_tokens
    given = "num_speculative_tokens" if rows == 1 + own else "tree_nodes"  # a tree has more rows
    room, key = scratch.narrowest(config)
    if room < rows:
        raise ConfigError(
            f"{key} is {room}, too few for drafts of {rows - 1} tokens; it must be at least "
            f"{rows}, or {given} lower."
        )


def _wrap_post_init(original: patching.Function) -> patching.Function:
    def __post_init__(self: "VllmConfig", *args: Any, **kwargs: Any) -> None:
        spec, scheduler = self.speculative_config, self.scheduler_config
        if not hasattr(spec, "hetero"):
            return original(self, *args, **kwargs)
        scratch.reserve_rows(self)
        asked, scheduler.async_scheduling = scheduler.async_scheduling, False  # vLLM says no to us
        # An engine core settles its configuration anew, and finds there what was settled before.
        reason = _why_not(self) or ("async_scheduling=False" if asked is False else "")
        if not reason:  # named before graphs are planned
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
        return None

    return __post_init__


def _why_not(config: "VllmConfig") -> str:
    """Why steps cannot be scheduled ahead; empty where they can."""
    from vllm.v1.executor.abstract import Executor

    if not config.use_v2_model_runner:
        return "Model Runner V1 wants drafts before it schedules"
    if config.parallel_config.data_parallel_size > 1:
        return "under data parallelism vLLM has one lookahead for all steps"
    if not Executor.get_class(config).supports_async_scheduling():
        return (
            f"{config.parallel_config.distributed_executor_backend!r} executors do not support it"
        )
    if not platform_can():
        return "there is no device to schedule ahead of"
    return ""


def platform_can() -> bool:
    """Whether the target runs on a device of its own."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()
