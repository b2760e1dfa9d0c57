# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a request that matter to drafts, and their checks in the front end.

A draft token that the target must reject is not worth verification. It is lossless to cut a draft
because of its length. It is lossless to cut it because of its tokens only if it is greedy, because
no token of it is sampled.

The front end refuses a request with HTTP 400:

* The names and values of our own parameters are checked.
* vLLM refuses `min_p` and `logit_bias` with every speculation. They are allowed on Model Runner V2,
  because its sampler applies them to draft rows and our verification uses the result. Model Runner
  V1 ignores them for draft rows, so the refusal stays.
* `thinking_token_budget` is allowed on V2 and refused on V1. In steps without drafts, V1 would
  apply it to the first request of the batch, which may be another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BeforeValidator
from vllm.exceptions import VLLMValidationError

from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.errors import nearest, number

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig
    from vllm.v1.engine.input_processor import InputProcessor

# Draft length of a request in SamplingParams.extra_args (`vllm_xargs` over HTTP); 0: no drafts.
LOOKAHEAD_ARG = "hetero_spec_lookahead"
_OURS = "hetero_spec_"
_COLDEST = 1e-5  # vLLM treats lower temperatures as 0
_MANY = 1 << 30  # tokens; more than any draft has


@dataclass(frozen=True)
class RequestParams:
    """Parameters of one request, read when it is first seen.

    Attributes:
        noise_seed: Seed of its random choices; the request's own seed if it has one.
        temperature, top_k, top_p: As in vLLM; top_k is 0 for all tokens.
        penalty: Penalties; None without any.
        structured: True if a grammar constrains the output.
        max_tokens: Maximum output length in target tokens; None for no limit.
        min_tokens: Number of target tokens before the first allowed one of `stop_ids`.
        end_ids: Target ids that end the request.
        allowed_ids: The only allowed target ids; None for all.
        bad_words: Forbidden sequences of target ids.
        thinks_within: True if the request has a budget of thinking tokens.
        lookahead: Requested draft length in target tokens; None leaves it to the controller.
    """

    noise_seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: Penalty | None = None
    structured: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    allowed_ids: frozenset[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    thinks_within: bool = False
    lookahead: int | None = None

    @cached_property
    def restricted(self) -> bool:
        """True if some target token is forbidden at some position."""
        return bool(self.bad_words) or self.allowed_ids is not None or self.min_tokens > 0

    @cached_property
    def keeps_chain(self) -> str:
        """Reason why drafts must be chains, one of the metrics' CHAINS; empty if trees are allowed.

        For these parameters, the tokens before a row are taken from the preceding rows. On a branch
        of a tree these are other tokens, so the target's distribution would be wrong.
        """
        causes = {
            "penalties": self.penalty is not None,
            "grammar": self.structured,
            "restricted": self.restricted,
            "thinking": self.thinks_within,
        }
        return next((cause for cause, found in causes.items() if found), "")

    @cached_property
    def random(self) -> bool:
        """True if the target samples tokens; False if it is greedy."""
        return self.temperature >= _COLDEST

    def before_stops(self, count: int) -> int:
        """Return the maximum draft length whose bonus token is still within `min_tokens`.

        `count` is the number of generated tokens. There is no limit from `min_tokens` on.
        """
        early = self.min_tokens - count
        return early - 1 if early > 0 else _MANY

    def acceptable(self, proposal: Sequence[int], output: Sequence[int] | np.ndarray) -> int:
        """Return the number of leading tokens of a proposal that the request does not forbid.

        Bad words, stop tokens before `min_tokens`, and tokens outside `allowed_ids` are forbidden.
        Only the last tokens of `output` are read.
        """
        early = self.min_tokens - len(output)
        if not self.bad_words and self.allowed_ids is None and early <= 0:
            return len(proposal)
        longest = max(map(len, self.bad_words), default=0)
        past = [int(token) for token in output[max(0, len(output) - longest) :]]
        for position, token in enumerate(proposal):
            past.append(token)
            if (
                (self.allowed_ids is not None and token not in self.allowed_ids)
                or (position < early and token in self.stop_ids)
                or any(past[-len(word) :] == list(word) for word in self.bad_words)
            ):
                return position
        return len(proposal)


def params_of(params: "SamplingParams | None", noise_seed: int) -> RequestParams:
    """Convert vLLM's sampling parameters; a pooling request (None) has the defaults.

    `noise_seed` must be the same on all ranks that verify together.
    """
    if params is None:
        return RequestParams(noise_seed)
    try:
        lookahead = requested_lookahead(params.extra_args)
    except VLLMValidationError:  # a front end without our checks, such as vLLM's in Rust
        lookahead = None
    penalty = Penalty(params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    allowed = params.allowed_token_ids
    return RequestParams(
        noise_seed=noise_seed,
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        penalty=None if penalty == Penalty() else penalty,
        structured=params.structured_outputs is not None,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_ids=frozenset(params.all_stop_token_ids),
        end_ids=frozenset({params.eos_token_id, *(params.stop_token_ids or ())} - {None}),
        allowed_ids=None if allowed is None else frozenset(allowed),
        bad_words=params.bad_words_token_ids or (),
        thinks_within=params.thinking_token_budget is not None,
        lookahead=lookahead,
    )


def requested_lookahead(extra_args: Mapping[str, Any] | None) -> int | None:
    """Return the draft length in target tokens that a request sets; None for the controller's.

    Raises:
        VLLMValidationError: The name or value of one of our parameters is not supported.
    """
    for name in extra_args or ():
        if str(name).startswith(_OURS) and name != LOOKAHEAD_ARG:
            raise VLLMValidationError(
                f"{str(name)[:40]} does not exist{nearest(name, [LOOKAHEAD_ARG])}; a request can "
                f"set {LOOKAHEAD_ARG}."
            )
    given = (extra_args or {}).get(LOOKAHEAD_ARG)
    if given is None or given is True:
        return None
    asked = number(given)
    if not isinstance(asked, int) or asked < 0:
        raise VLLMValidationError(
            f"{LOOKAHEAD_ARG} is {repr(given)[:40]}; it must be a whole number of at least 0 "
            "(0 or false: no drafts; true: as without it)."
        )
    return int(asked)


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
