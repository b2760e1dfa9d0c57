# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers as an engine that can be measured: alone or with an assistant.

Assisted generation takes one request at a time, so both generate the prompts one by one and are
comparable with other engines at batch size 1. Across tokenizers its method depends on the load:
universal assisted generation where it is greedy, token-level intersection where it is sampled.
"""

from dataclasses import dataclass

from vllm_hetero_spec.measure.child_process import EngineProcess
from vllm_hetero_spec.measure.load import Load, MeasurementError, Sample


@dataclass(frozen=True)
class HuggingFaceSpec:
    """What to start.

    Attributes:
        model: The target: a Hugging Face name or a folder.
        assistant: The drafter; None runs the target alone.
        num_assistant_tokens: Lookahead in tokens of the assistant, the same in every round.
        confidence_threshold: The assistant stops early below this probability; 0 never does, None
            is Hugging Face's default.
        dtype: Of both models, as vLLM names it; "auto" is float32 on CPUs, elsewhere the target's
            own, where that is float32 bfloat16 as in vLLM.
        tokenizer: The target's, where it is not the model's own.
        revision: Of the target.
        trust_remote_code: Run code of the models' repositories.
    """

    model: str
    assistant: str | None = None
    num_assistant_tokens: int = 4
    confidence_threshold: float | None = None
    dtype: str = "auto"
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


class HuggingFaceEngine(EngineProcess):
    """`generate` for a `HuggingFaceSpec`; both models in one dtype."""

    program = "vllm_hetero_spec.measure.huggingface_driver"

    def run(self, load: Load) -> Sample:
        """Generate a load of batch size 1, after a warm-up where it is the first of its kind.

        A draft is counted as vLLM counts it, in every verification of at least one token. The
        first one comes with the prompt's forward, so that `drafts` may exceed vLLM's by one for
        each prompt.

        Raises:
            MeasurementError: The load is wider, or the engine failed or took too long and is
                closed now.
        """
        if load.batch_size > 1:
            raise MeasurementError(
                f"a load of batch size {load.batch_size} on Hugging Face's generate, which is "
                "measured one request at a time; use batch size 1"
            )
        return super().run(load)
