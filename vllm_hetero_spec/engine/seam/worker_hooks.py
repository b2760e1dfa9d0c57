# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's worker and model runners, installed when vLLM builds the proposer.

Model Runner V1 calls a `custom_class` proposer without request ids. The hook on
`propose_draft_token_ids` passes the scheduler's output to our proposer instead. The hook on
`take_draft_token_ids` finishes the drafts. Model Runner V2 calls its speculator (`speculator_v2`),
which the hooks load and notify of every step.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.metrics import transport
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.engine.seam.runner_v1 import RunnerV1
from vllm_hetero_spec.engine.seam.step_view import StepView
from vllm_hetero_spec.engine.seam.tree_adapter import TreeAdapter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

_Class = TypeVar("_Class")


class Proposer(transport.Reporter):
    """Interface of a proposer to the hooks."""

    warm: bool  # True from `calibrate` on

    @property
    @abstractmethod
    def seam(self) -> Runner:
        """Model runner to which the proposer is bound."""

    @abstractmethod
    def bind(self, seam: Runner) -> None:
        """Bind the proposer to a model runner. Called before `load_model`."""

    @abstractmethod
    def load_model(self, target_model: Any) -> None:
        """Load the drafter. Called after the target has been loaded."""

    @abstractmethod
    def after_step(self, view: Callable[[], StepView], num_requests: int) -> list[list[int]]:
        """Begin drafts for all requests of the batch. Return one list each, filled by `finish`."""

    @abstractmethod
    def skip_step(self, num_requests: int, without_drafts: bool | None, begun: bool) -> bool:
        """Return True to skip building a `StepView` for this step. Skipped steps are still counted.

        Args:
            num_requests: Requests in the step.
            without_drafts: With asynchronous scheduling, True if no drafts were verified in the
                step or can follow it. All ranks have the same value. None with synchronous
                scheduling.
            begun: True if requests begin in the step.
        """

    @abstractmethod
    def look_back(self, view: Callable[[], StepView], num_requests: int, *, hurried: bool) -> None:
        """Read a skipped step that has ended. No drafts follow it.

        `view` does not wait for the device. With `hurried`, the device may be idle meanwhile.
        """

    @abstractmethod
    def finish(self) -> None:
        """Finish the drafts. Called when the scheduler takes them."""

    @abstractmethod
    def record(self) -> int:
        """Capture the drafter's CUDA graphs, and return their size in bytes.

        Called on every rank after the target's graphs, and again when the engine is warm.
        """

    @abstractmethod
    def calibrate(self) -> None:
        """Time the models. Called on every rank when the engine is warm, before any request."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Prepare for sleep. Called before the worker falls asleep, when there are no requests."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every request and all KV."""

    @abstractmethod
    def wake(self) -> None:
        """Wake the drafter. Called when the worker's KV cache is allocated again."""

    @abstractmethod
    def close(self) -> None:
        """Free the drafter. Called when the worker ends, even if its process continues."""


def install_worker_hooks(*, v2: bool) -> None:
    """Hook the workers and runners of this process. Idempotent; inert for other drafters."""
    from vllm.v1.worker.worker_base import WorkerBase

    runner = _hook_v2() if v2 else _hook_v1()
    patching.wrap(runner, "capture_model", "record drafter", _capture)
    patching.wrap(runner, "shutdown", "let drafter go", _shutdown)
    for worker in _family(WorkerBase):
        if worker is not WorkerBase and "compile_or_warm_up_model" in vars(worker):
            patching.wrap(worker, "compile_or_warm_up_model", "calibrate", _warm)
        if worker is not WorkerBase and "wake_up" in vars(worker):
            patching.wrap(worker, "sleep", "sleep", _sleep)
            patching.wrap(worker, "wake_up", "wake", _wake)
    transport.require_in_worker(runner)


def _hook_v1() -> type:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_hetero_spec.engine.trees import attention_v1

    for runner in _family(GPUModelRunner):
        if "load_model" in vars(runner):
            patching.wrap(runner, "load_model", "bind drafter", _load)
    patching.wrap(GPUModelRunner, "propose_draft_token_ids", "propose", propose_hook)
    patching.wrap(GPUModelRunner, "take_draft_token_ids", "finish", _take)

    def trees_of(runner: object) -> TreeAdapter | None:
        drafter = _ours(runner)
        return None if drafter is None else drafter.seam.trees

    attention_v1.install(trees_of)
    return GPUModelRunner


def _hook_v2() -> type:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_hetero_spec.engine.trees import attention_v2

    patching.wrap(GPUModelRunner, "load_model", "load drafter", _load_v2)
    patching.wrap(GPUModelRunner, "execute_model", "step", _execute_v2)
    patching.wrap(GPUModelRunner, "gather_batch_req_state", "trees", _gather_v2)
    attention_v2.install()
    return GPUModelRunner


def _family(base: type[_Class]) -> Iterator[type[_Class]]:
    yield base
    for derived in base.__subclasses__():
        yield from _family(derived)


def _ours(runner: object, name: str = "drafter") -> Proposer | None:
    drafter = getattr(runner, name, None)
    return drafter if isinstance(drafter, Proposer) else None


def _load(
    original: patching.Function, runner: "GPUModelRunner", *args: object, **kwargs: object
) -> object:
    if drafter := _ours(runner):
        from vllm_hetero_spec.engine.trees import attention_v1

        drafter.bind(RunnerV1(runner, attention_v1.trees_of(runner)))
    return original(runner, *args, **kwargs)


def _warm(
    original: patching.Function, worker: "WorkerBase", *args: object, **kwargs: object
) -> object:
    answer = original(worker, *args, **kwargs)
    if drafter := _ours(worker.model_runner):
        drafter.record()  # if the target has no graphs
        drafter.calibrate()
    return answer


def _sleep(original: patching.Function, worker: "WorkerBase", level: int = 1) -> object:
    if drafter := _ours(worker.model_runner):
        drafter.sleep(level)
    return original(worker, level)


def _wake(
    original: patching.Function, worker: "WorkerBase", tags: list[str] | None = None
) -> object:
    answer = original(worker, tags)
    drafter = _ours(worker.model_runner)
    if drafter and (tags is None or "kv_cache" in tags):
        drafter.reset()  # KV may have been discarded without `sleep`
        drafter.wake()
    return answer


def propose_hook(
    original: patching.Function,
    runner: "GPUModelRunner",
    scheduler_output: "SchedulerOutput",
    sampled_token_ids: list[list[int]],
    *args: object,
    **kwargs: object,
) -> object:
    """Call our drafter instead of `propose_draft_token_ids` of Model Runner V1."""
    drafter = _ours(runner)
    if drafter is None:
        return original(runner, scheduler_output, sampled_token_ids, *args, **kwargs)
    assert isinstance(drafter.seam, RunnerV1)
    drafter.seam.after_sampling(sampled_token_ids)
    batch = len(sampled_token_ids)
    if drafter.skip_step(batch, None, drafter.seam.on_step_start(scheduler_output)):
        drafter.seam.untimed()
        return [[] for _ in sampled_token_ids]
    view = partial(drafter.seam.view, scheduler_output, sampled_token_ids)
    return drafter.after_step(view, batch)


def _capture(
    original: patching.Function, runner: "GPUModelRunner", *args: object, **kwargs: object
) -> object:
    taken, drafter = original(runner, *args, **kwargs), _ours(runner)
    rehearsal = kwargs.get("profile_only", False)  # V2 only measures the memory of graphs
    if drafter and isinstance(taken, int) and not rehearsal:
        taken += drafter.record()
    return taken


def _shutdown(original: patching.Function, runner: "GPUModelRunner") -> object:
    if drafter := _ours(runner):
        drafter.close()
    return original(runner)


def _take(
    original: patching.Function, runner: "GPUModelRunner", *args: object, **kwargs: object
) -> object:
    if drafter := _ours(runner):
        drafter.finish()
    return original(runner, *args, **kwargs)


def _load_v2(
    original: patching.Function, runner: "GPUModelRunnerV2", *args: object, **kwargs: object
) -> object:
    answer = original(runner, *args, **kwargs)
    if drafter := _ours(runner.speculator, "proposer"):
        runner.drafter = drafter  # the same attribute as on V1
        from vllm_hetero_spec.engine.trees import attention_v2

        runner.speculator.load(runner, attention_v2.trees_of(runner))
    return answer


def _execute_v2(
    original: patching.Function,
    runner: "GPUModelRunnerV2",
    scheduler_output: "SchedulerOutput",
    *args: object,
    **kwargs: object,
) -> object:
    if _ours(runner) and not kwargs.get("dummy_run", False):
        runner.speculator.on_step_start(scheduler_output)
    return original(runner, scheduler_output, *args, **kwargs)


def _gather_v2(
    original: patching.Function,
    runner: "GPUModelRunnerV2",
    scheduler_output: "SchedulerOutput",
    dummy_run: bool,
) -> object:
    """Plan trees in `gather_batch_req_state` of V2; a batch with branches is not uniform."""
    state, uniform = original(runner, scheduler_output, dummy_run)
    if _ours(runner) and not dummy_run:
        assert state is not None
        uniform = None if runner.speculator.seam.plan_trees(state) else uniform
    return state, uniform
