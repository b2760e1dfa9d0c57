# SPDX-License-Identifier: Apache-2.0
"""Refusal of a pipeline parallel target that this package cannot serve.

Model Runner V1 schedules drafts before it has sampled the token in front of them, so its output
would be wrong. Model Runner V2 sends sampled tokens and drafts between stages, but only with
asynchronous scheduling. The drafter runs on the last stage.
"""

from typing import TYPE_CHECKING

from vllm_hetero_spec.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(config: "VllmConfig") -> None:
    """Raise ConfigError for pipeline stages that are not supported."""
    stages = config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return
    if not config.use_v2_model_runner:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is not supported on Model Runner V1; use tensor "
            "parallelism, or Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1) with asynchronous "
            "scheduling."
        )
    if not config.scheduler_config.async_scheduling:
        raise ConfigError(
            f"pipeline_parallel_size={stages} on Model Runner V2 needs asynchronous "
            "scheduling, and steps are scheduled one after the other, for which the log gives "
            "the reason; remove that, or use tensor parallelism."
        )
