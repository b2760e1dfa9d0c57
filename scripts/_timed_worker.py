# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with models that take as long as larger ones on a device of their own.

A forward that ends too early sleeps for the rest of its time, so that it holds no core. vLLM builds
the worker by its name (`worker_cls`), in the engine and in the drafter's process, and both read
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
    """Arguments of `vllm.LLM`: seconds that a forward of either model takes at least."""
    return {
        "worker_cls": f"{__name__}.{TimedWorker.__name__}",
        "additional_config": {"target_seconds": target, "drafter_seconds": drafter},
    }


def at_least(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes at least so long."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = call(*args, **kwargs)
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return result

    return called


class TimedWorker(CPUWorker):
    """See above. Also counts the target's steps."""

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
        """Steps since the last call.

        Of each the verified draft tokens, and, when it began, the look-ups of precomputed drafts so
        far: those that found one, were waited for, or did neither.
        """
        taken, self._steps = self._steps, []
        return taken
