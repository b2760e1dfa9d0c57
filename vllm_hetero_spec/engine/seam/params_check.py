# SPDX-License-Identifier: Apache-2.0
"""Parameters that Model Runner V1 has no right answer to while it speculates: refused there.

vLLM refuses `min_p` and `logit_bias` with every speculation. Its V2 sampler applies them to rows of
drafts too, and our verification takes what it makes; on V1 they would be left out, and vLLM's
refusal stands. A `thinking_token_budget` is served on V2; on V1 vLLM takes it, and in steps without
drafts ends the thinking of whichever request is the first of the batch.
"""

from typing import TYPE_CHECKING

from vllm_hetero_spec.engine.compat import patching

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig
    from vllm.v1.engine.input_processor import InputProcessor


def install() -> None:
    """Install the check in this process. Idempotent; inert for other drafters."""
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    patching.replace(InputProcessor, "__init__", "parameters", _wrap_init)
    patching.replace(SamplingParams, "_validate_spec_decode", "parameters", _wrap_check)


def _wrap_init(original: patching.Function) -> patching.Function:
    def __init__(self: "InputProcessor", *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        config = self.vllm_config.speculative_config
        if hasattr(config, "hetero"):
            config.takes_all_params = self.vllm_config.use_v2_model_runner

    return __init__


def _wrap_check(original: patching.Function) -> patching.Function:
    from vllm.exceptions import VLLMValidationError

    def _validate_spec_decode(
        self: "SamplingParams", speculative_config: "SpeculativeConfig | None"
    ) -> None:
        if getattr(speculative_config, "takes_all_params", False):
            return
        original(self, speculative_config)
        if hasattr(speculative_config, "hetero") and self.thinking_token_budget is not None:
            raise VLLMValidationError(
                "The thinking_token_budget sampling parameter is not supported with speculative "
                "decoding on Model Runner V1; leave it out, or serve without --speculative-config, "
                "or on Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)."
            )

    return _validate_spec_decode
