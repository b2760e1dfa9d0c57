# SPDX-License-Identifier: Apache-2.0
"""Models that take as long as larger ones would, on a device of their own: vLLM's worker on a CPU.

What a forward lacks to its time is slept, so that it holds no core. vLLM builds the worker by its
name (`worker_cls`), in the engine as in the drafter's process, and both read `additional_config`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from _parallel_model import Step
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hetero_spec.engine.drafter.model import DrafterModel

_TARGET, _DRAFTER = "timed_target_seconds", "timed_drafter_seconds"
_MISSES = "not_guessed", "not_ready"


def timed(target: float, drafter: float) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: seconds that a forward of either model takes at least."""
    return {
        "worker_cls": f"{__name__}.{TimedWorker.__name__}",
        "additional_config": {_TARGET: target, _DRAFTER: drafter},
    }


def at_least(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes so long, asleep once it is done."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = call(*args, **kwargs)
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return result

    return called


class TimedWorker(CPUWorker):
    """See above; also counts the target's steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = self.vllm_config.additional_config
        self._steps: list[Step] = []
        DrafterModel.logits = at_least(self._given[_DRAFTER], DrafterModel.logits)  # type: ignore[method-assign]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target."""
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        model.forward = at_least(self._given[_TARGET], model.forward)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """A step of the target."""
        drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        step = Step(drafted)
        if stats := getattr(getattr(self.model_runner, "drafter", None), "stats", None):
            missed = sum(stats.skipped[reason] for reason in _MISSES)
            step = Step(drafted, stats.drafts_ahead, stats.drafts_waited, missed)
        if scheduler_output.total_num_scheduled_tokens:
            self._steps.append(step)
        return super().execute_model(scheduler_output)

    def steps_taken(self) -> list[Step]:
        """Those since the last call."""
        taken, self._steps = self._steps, []
        return taken
