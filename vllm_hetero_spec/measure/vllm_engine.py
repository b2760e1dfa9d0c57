# SPDX-License-Identifier: Apache-2.0
"""vLLM as an engine that can be measured: alone, with our plugin, or with a method of its own."""

from dataclasses import dataclass, field
from typing import Any

from vllm_hetero_spec.measure.child_process import EngineProcess
from vllm_hetero_spec.measure.load import Load, MeasurementError, Sample


@dataclass(frozen=True)
class EngineSpec:
    """What to start.

    Attributes:
        model: The target: a Hugging Face name or a folder.
        speculative_config: As in vLLM, its own methods included; None runs the target alone.
        max_batch_size: Largest `Load.batch_size`.
        engine: Further arguments of `vllm.LLM`, over the defaults of `vllm_driver`.
    """

    model: str
    speculative_config: dict[str, Any] | None = None
    max_batch_size: int = 1
    engine: dict[str, Any] = field(default_factory=dict)


class VllmEngine(EngineProcess):
    """vLLM for an `EngineSpec`, its engine core in another process below, as in production."""

    program = "vllm_hetero_spec.measure.vllm_driver"

    def __init__(self, spec: EngineSpec, **options: Any) -> None:
        """See `EngineProcess`; vLLM or the plugin may refuse the models or the configuration."""
        self._max_batch_size = spec.max_batch_size
        super().__init__(spec, **options)

    def run(self, load: Load) -> Sample:
        """Generate a load; the first of each batch size after a warm-up that is not counted.

        Every load computes its prompts anew: nothing is reused of those before.

        Raises:
            ConfigError: vLLM refused the load, as for a prompt that is too long; it stays up.
            MeasurementError: The load is wider than the engine, or the engine failed or took too
                long and is closed now.
        """
        if load.batch_size > self._max_batch_size:
            raise MeasurementError(
                f"a load of batch size {load.batch_size} on an engine started for at most "
                f"{self._max_batch_size}; raise max_batch_size"
            )
        return super().run(load)
