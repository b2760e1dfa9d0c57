# SPDX-License-Identifier: Apache-2.0
"""Checks of request parameters in the front end. A refused request gets HTTP 400.

* The names and values of our own parameters (`request_params`) are checked.
* vLLM refuses `min_p` and `logit_bias` with every speculation. They are allowed on Model Runner V2,
  because its sampler applies them to draft rows and our verification uses the result. Model Runner
  V1 ignores them for draft rows, so the refusal stays.
* `thinking_token_budget` is allowed on V2 and refused on V1. In steps without drafts, V1 would
  apply it to the first request of the batch, which may be another one.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BeforeValidator
from vllm.exceptions import VLLMValidationError

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG, requested_lookahead

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig
    from vllm.v1.engine.input_processor import InputProcessor


def install() -> None:
    """Install the check in this process. Idempotent; inert for other drafters."""
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    patching.wrap(InputProcessor, "__init__", "parameters", _note_runner)
    patching.wrap(SamplingParams, "_validate_spec_decode", "parameters", _validate)


@cache
def install_http() -> None:
    """Check `vllm_xargs` of HTTP requests when they are parsed. Idempotent; only for our drafters.

    A check in `SamplingParams` is too late, because a stream already has its HTTP status. vLLM has
    then also converted `true` to 1.
    """
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    for model in (
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        AnthropicMessagesRequest,
    ):
        model.model_fields["vllm_xargs"].metadata.append(BeforeValidator(_checked))
        model.model_rebuild(force=True)


def _checked(xargs: Any) -> Any:
    if isinstance(xargs, dict) and requested_lookahead(xargs) is None:
        return {name: value for name, value in xargs.items() if name != LOOKAHEAD_ARG}
    return xargs


def _note_runner(
    original: patching.Function, self: "InputProcessor", *args: object, **kwargs: object
) -> None:
    original(self, *args, **kwargs)
    config = self.vllm_config.speculative_config
    if hasattr(config, "hetero"):
        config.takes_all_params = self.vllm_config.use_v2_model_runner


def _validate(
    original: patching.Function,
    self: "SamplingParams",
    speculative_config: "SpeculativeConfig | None",
) -> None:
    ours = hasattr(speculative_config, "hetero")
    if ours:
        requested_lookahead(self.extra_args)
    if getattr(speculative_config, "takes_all_params", False):
        return
    original(self, speculative_config)
    if ours and self.thinking_token_budget is not None:
        raise VLLMValidationError(
            "The thinking_token_budget sampling parameter is not supported with speculative "
            "decoding on Model Runner V1; leave it out, or serve without --speculative-config, "
            "or on Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)."
        )
