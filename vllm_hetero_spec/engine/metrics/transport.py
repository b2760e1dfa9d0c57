# SPDX-License-Identifier: Apache-2.0
"""Transport of the drafter's counters to vLLM's metrics: /metrics, `LLM.get_metrics()`, the log.

A worker counts, and a front end two or three processes away exports. So the changes of each step
travel with vLLM's own statistics: in the step's ModelRunnerOutput to the scheduler, and from there
in SchedulerStats to one front end, which adds them up. An exception here ends these metrics, never
a request.
"""

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from vllm_hetero_spec.engine.compat import patching, releases
from vllm_hetero_spec.engine.metrics.counters import RPC, Counted, DraftStats
from vllm_hetero_spec.engine.metrics.sinks import PREFIX, Exporter, Log

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger, StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

logger = logging.getLogger("vllm.hetero_spec")
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass
class _Carried:
    """Field that SchedulerStats gets: the changes of a step, None in most processes."""

    hetero_spec: Counted | None = None


_FIELD = "hetero_spec"
_FED_AGAIN = "hetero_spec_fed_again"


class Reporter(ABC):
    """Interface of a drafter for this module."""

    @abstractmethod
    def report(self) -> Counted:
        """Return the changes since the last report."""

    @abstractmethod
    def attach_to_output(self, output: object) -> None:
        """Attach further data for the scheduler to a step's output."""


def leave_out(output: object, fed_again: Mapping[str, int]) -> None:
    """Exclude tree rows that are fed again from vLLM's counts of draft tokens, by request."""
    setattr(output, _FED_AGAIN, fed_again)


def harmless(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Wrap a function so that its first exception is logged once and disables it."""
    failed = False

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        nonlocal failed
        if failed:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failed = True
            logger.warning(
                "The metrics %s* stop updating (%s: %s); requests are not affected.",
                PREFIX,
                type(error).__name__,
                error,
            )
            return None

    return guarded


def install() -> None:
    """Install the hooks of this module in this process. Idempotent; no effect on other drafters.

    Has to run in each process before its first engine, because serializers read the fields of a
    class only once.

    Raises:
        Exception: vLLM's version is not supported, or a hooked name is missing; see `require`.
    """
    releases.installed()
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.worker.worker_base import WorkerBase

    patching.add(WorkerBase, RPC, _worker_stats)  # also on ranks that do not draft
    patching.add_fields(SchedulerStats, _Carried)
    patching.wrap(Scheduler, "update_from_output", "metrics", update_from_output)
    for owner, build in ((PrometheusStatLogger, _exporter), (LoggingStatLogger, _log)):
        patching.wrap(owner, "__init__", "metrics", functools.partial(_init_logger, build))
        patching.wrap(owner, "record", "metrics", _record)
    patching.wrap(LoggingStatLogger, "log", "metrics", _write_log)


require = harmless(install)
"""`install` for our drafters. If a hooked name is missing, only the metrics are lost."""


def _worker_stats(worker: "WorkerBase") -> Counted:
    """Answer `collective_rpc(RPC)`; zeros if the worker has no drafter of ours."""
    snapshot = getattr(getattr(worker.model_runner, "drafter", None), "snapshot", DraftStats)
    return snapshot().as_dict()


@harmless
def require_in_worker(runner: type) -> None:
    """Hook the model runner class of this worker, so that its outputs carry the counters."""
    patching.wrap(runner, "sample_tokens", "metrics", sample_tokens)


def sample_tokens(
    original: patching.Function, self: "GPUModelRunner", *args: object, **kwargs: object
) -> "ModelRunnerOutput":
    """Let the output of `sample_tokens` carry the changes since the last one."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT as EMPTY

    output = original(self, *args, **kwargs)
    drafter = getattr(self, "drafter", None)
    # V2 wraps it while the step's tokens are copied to the host.
    carrier = getattr(output, "model_runner_output", output)
    # All steps share the empty output, so their changes go with a later one.
    if isinstance(drafter, Reporter) and carrier is not None and carrier is not EMPTY:
        _carry(carrier, drafter)
        drafter.attach_to_output(carrier)
    return output


@harmless
def _carry(output: "ModelRunnerOutput", drafter: Reporter) -> None:
    setattr(output, _FIELD, drafter.report())


def update_from_output(
    original: patching.Function,
    self: "Scheduler",
    scheduler_output: "SchedulerOutput",
    model_runner_output: "ModelRunnerOutput",
) -> "dict[int, EngineCoreOutputs]":
    """In the scheduler: add a step's changes to its statistics, and correct vLLM's counts."""
    if fed_again := getattr(model_runner_output, _FED_AGAIN, None):
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        # With asynchronous scheduling, `invalid` includes these rows.
        scheduler_output.num_invalid_spec_tokens = {**fed_again, **invalid}
    outputs = original(self, scheduler_output, model_runner_output)
    growth = getattr(model_runner_output, _FIELD, None)
    if growth is not None:
        _hand_on(outputs, growth)
        _add_figures(self, outputs)
    return outputs


@harmless
def _hand_on(outputs: "dict[int, EngineCoreOutputs]", growth: Counted) -> None:
    """In the engine core: pass the changes to the front end that gets the step's statistics."""
    for output in outputs.values():
        if output.scheduler_stats is not None:
            setattr(output.scheduler_stats, _FIELD, growth)
            return


@harmless
def _add_figures(scheduler: "Scheduler", outputs: "dict[int, EngineCoreOutputs]") -> None:
    """Send the figures of requests with stop strings in each step, if they are enabled.

    vLLM sends them when the scheduler ends a request, but the front end ends it at a stop string.
    """
    if scheduler.spec_decode_metrics_level == "none":
        return
    for output in (output for of in outputs.values() for output in of.outputs):
        request = scheduler.requests.get(output.request_id)
        params = request and request.sampling_params
        if params and params.stop:
            output.spec_decode_metrics = request.spec_decode_metrics


def _init_logger(
    build: "Callable[[StatLoggerBase], Exporter | Log | None]",
    original: patching.Function,
    self: "StatLoggerBase",
    *args: object,
    **kwargs: object,
) -> None:
    original(self, *args, **kwargs)
    setattr(self, _FIELD, build(self))


def _record(
    original: patching.Function,
    self: "StatLoggerBase",
    scheduler_stats: "SchedulerStats | None",
    iteration_stats: "IterationStats | None",
    mm_cache_stats: "MultiModalCacheStats | None" = None,
    engine_idx: int = 0,
) -> None:
    original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
    growth = getattr(scheduler_stats, _FIELD, None)
    if growth is not None:
        _observe(getattr(self, _FIELD, None), growth, engine_idx)


def _write_log(original: patching.Function, self: "LoggingStatLogger") -> None:
    original(self)
    sink = getattr(self, _FIELD, None)
    if sink is not None:
        _say(sink, logging.DEBUG if self.engine_is_idle else logging.INFO)


@harmless
def _observe(sink: Exporter | Log | None, growth: Counted, engine: int) -> None:
    if sink is not None:
        sink.observe(growth, engine)


_say = harmless(Log.say)


def _lookahead(stat_logger: "PrometheusStatLogger | LoggingStatLogger") -> int | None:
    """The configured lookahead; None if the drafter is not ours."""
    spec = stat_logger.vllm_config.speculative_config
    return spec.num_speculative_tokens if hasattr(spec, "hetero") else None


@harmless
def _exporter(stat_logger: "PrometheusStatLogger") -> Exporter | None:
    lookahead = _lookahead(stat_logger)
    return None if lookahead is None else Exporter(stat_logger, lookahead)


@harmless
def _log(stat_logger: "LoggingStatLogger") -> Log | None:
    return None if _lookahead(stat_logger) is None else Log()
