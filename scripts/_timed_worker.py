# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker whose models take as long as larger models on separate devices.

A forward that ends early sleeps for the rest of its time, so that it occupies no core. vLLM builds
the worker by name (`worker_cls`) in the engine and in the drafter's process; both read
`additional_config`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hetero_spec.engine.drafter.model import DrafterModel


def timed(target: float, drafter: float) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for minimum seconds per forward of each model."""
    return {
        "worker_cls": f"{__name__}.{TimedWorker.__name__}",
        "additional_config": {"target_seconds": target, "drafter_seconds": drafter},
    }


def at_least(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it takes at least a number of seconds."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = call(*args, **kwargs)
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return result

    return called


class TimedWorker(CPUWorker):
    """Worker with timed models; also records the target's steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = self.vllm_config.additional_config
        self._steps: list[tuple[int, ...]] = []
        DrafterModel.logits = at_least(self._given["drafter_seconds"], DrafterModel.logits)  # type: ignore[method-assign]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        model.forward = at_least(self._given["target_seconds"], model.forward)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
            stats = getattr(getattr(self.model_runner, "drafter", None), "stats", None)
            found = (stats.drafts_ahead, stats.drafts_waited) if stats else (0, 0)
            missed = sum(stats.skipped[why] for why in ("not_guessed", "not_ready")) if stats else 0
            self._steps.append((drafted, *found, missed))
        return super().execute_model(scheduler_output)

    def steps_taken(self) -> list[tuple[int, ...]]:
        """Return and clear the recorded steps.

        A step has the number of verified draft tokens, and cumulative counts of look-ups of
        precomputed drafts at its start: found, waited for, missed.
        """
        taken, self._steps = self._steps, []
        return taken
