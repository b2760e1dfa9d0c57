# SPDX-License-Identifier: Apache-2.0
"""`min_p` and `logit_bias` while speculating: refused on Model Runner V1, served on V2.

vLLM refuses them with every speculation. Its V2 sampler applies them to the rows of drafts too, and
our verification takes what it makes; on V1 they would be left out, and vLLM's refusal stands.
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
    def _validate_spec_decode(
        self: "SamplingParams", speculative_config: "SpeculativeConfig | None"
    ) -> None:
        if not getattr(speculative_config, "takes_all_params", False):
            original(self, speculative_config)

    return _validate_spec_decode
