# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of the target: which of them may be served, and what Model Runner V1 lacks.

The drafter is on the last stage. V1 keeps a batch in flight for each stage, asks for drafts of the
one that it has just sent off, and schedules them without the token before them: the text goes
wrong. With one batch in flight it is right, once two more things are: every stage has an attribute
that vLLM reads, and the first stages, which are told one token a step, are given all tokens of a
request that was away. V2 sends sampled tokens and drafts between stages by itself, where steps are
scheduled ahead.
"""

import logging
from typing import TYPE_CHECKING

from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.seam import runner_v1

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerWrapperBase

logger = logging.getLogger("vllm.hetero_spec")


class NoDrafter:
    """What a stage has as its drafter that has none."""

    def load_model(self, target_model: object) -> None:
        """See `Proposer`; there is nothing to load."""


_NO_DRAFTER = NoDrafter()


def install() -> None:
    """Install this in a process that makes configurations, schedules or works. Idempotent."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    patching.replace(VllmConfig, "max_concurrent_batches", "pipeline", _wrap_batches)
    patching.replace(WorkerWrapperBase, "init_device", "pipeline", _wrap_init_device)


def check(config: "VllmConfig") -> None:
    """Refuse a pipeline that cannot be served, and say what one costs that can.

    Args:
        config: Of an engine of ours.

    Raises:
        ConfigError: Stages on Model Runner V1 that were not asked for, or steps on V2 that are not
            scheduled ahead.
    """
    stages = config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return
    if config.use_v2_model_runner:
        if not config.scheduler_config.async_scheduling:
            raise ConfigError(
                f"pipeline_parallel_size={stages} on Model Runner V2 needs asynchronous "
                "scheduling, and steps are scheduled one after the other, for which the log gives "
                "the reason; remove that, or use tensor parallelism."
            )
    elif config.speculative_config.hetero.pipeline != "one_batch":
        raise ConfigError(
            f"pipeline_parallel_size={stages} on Model Runner V1 would have one batch in all "
            "stages together; use tensor parallelism or Model Runner V2, or accept that with "
            '"pipeline": "one_batch" in the speculative configuration.'
        )
    else:
        logger.warning(
            "One batch is in flight, not %d: each of the %d pipeline stages is idle while another "
            "works, which costs a loaded engine up to %d times its throughput, and a single "
            "request nothing.",
            stages,
            stages,
            stages,
        )


def one_batch(config: "VllmConfig") -> bool:
    """Whether an engine of ours has stages on Model Runner V1."""
    ours = hasattr(config.speculative_config, "hetero")
    staged = config.parallel_config.pipeline_parallel_size > 1
    return ours and staged and not config.use_v2_model_runner


def _wrap_batches(original: patching.Function) -> patching.Function:
    def max_concurrent_batches(self: "VllmConfig") -> int:
        batches: int = 1 if one_batch(self) else original(self)
        return batches

    return max_concurrent_batches


def _wrap_init_device(original: patching.Function) -> patching.Function:
    def init_device(self: "WorkerWrapperBase") -> None:
        if one_batch(self.vllm_config):
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner

            patching.add(GPUModelRunner, "drafter", _NO_DRAFTER)
            patching.replace(GPUModelRunner, "_update_states", "pipeline", _wrap_update_states)
        original(self)

    return init_device


def _wrap_update_states(original: patching.Function) -> patching.Function:
    def _update_states(self: "GPUModelRunner", scheduler_output: "SchedulerOutput") -> object:
        if isinstance(self.drafter, NoDrafter):
            runner_v1.recall(self, scheduler_output)
        return original(self, scheduler_output)

    return _update_states
