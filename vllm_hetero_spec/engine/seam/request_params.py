# SPDX-License-Identifier: Apache-2.0
"""What a request's sampling parameters say about drafts: how drawn, how long, where to stop.

A token that the target is bound to reject is not worth verifying. Cutting a draft by its length is
lossless; cutting it by what its tokens are is so for greedy drafts, of which nothing was drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.exceptions import VLLMValidationError

from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.errors import nearest, number

if TYPE_CHECKING:
    from vllm import SamplingParams

# A request's own lookahead in SamplingParams.extra_args (`vllm_xargs` over HTTP); 0 is off.
LOOKAHEAD_ARG = "hetero_spec_lookahead"
_OURS = "hetero_spec_"
# vLLM takes lower temperatures for 0.
_COLDEST = 1e-5
_MANY = 1 << 30  # tokens: more than any draft has


@dataclass(frozen=True)
class RequestParams:
    """One request's parameters, read once when it is first seen.

    Attributes:
        noise_seed: From which its random choices follow; its own seed if it has one.
        temperature, top_k, top_p: As in vLLM; top_k is 0 for all.
        penalty: Its penalties; None where there are none.
        structured: A grammar constrains it.
        max_tokens: Its longest output in target tokens; None for no limit.
        min_tokens: Target tokens before which no stop token may come.
        stop_ids: Those stop tokens.
        end_ids: Target ids that end it.
        allowed_ids: The only target ids it may generate; None for all.
        bad_words: Target ids that must not stand in a row.
        thinks_within: It has a budget of tokens for thinking.
        lookahead: Target tokens that it asks to be drafted; None leaves it to the controller.
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
        """Whether it forbids any target token at any place."""
        return bool(self.bad_words) or self.allowed_ids is not None or self.min_tokens > 0

    @cached_property
    def keeps_chain(self) -> str:
        """Why its drafts are chains, one of the metrics' CHAINS; empty where they may be trees.

        What was generated before a row is then read from the rows in front, as of a chain: on a
        side path of a tree the target's row would not be its own.
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
        """Whether the target draws its tokens instead of taking the likeliest."""
        return self.temperature >= _COLDEST

    def before_stops(self, count: int) -> int:
        """Draft tokens behind which another token is still in front of `min_tokens`.

        Args:
            count: Tokens generated so far; from `min_tokens` on there is no limit.
        """
        early = self.min_tokens - count
        return early - 1 if early > 0 else _MANY

    def acceptable(self, proposal: Sequence[int], output: Sequence[int] | np.ndarray) -> int:
        """Leading tokens of a proposal that the request does not forbid.

        Bad words, stop tokens before `min_tokens`, and tokens outside `allowed_ids` are forbidden.

        Args:
            proposal: Target ids.
            output: Target ids generated so far; only the end is read.
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
    """Read vLLM's parameters of a request; None (a pooling request) has the defaults.

    Args:
        params: vLLM's.
        noise_seed: See `RequestParams`; the same on all ranks that verify together.
    """
    if params is None:
        return RequestParams(noise_seed)
    try:
        lookahead = requested_lookahead(params.extra_args)
    except VLLMValidationError:  # from a front end without `params_check`, such as vLLM's in Rust
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
    """The draft length in target tokens that a request sets; None leaves it to the controller.

    Args:
        extra_args: Of SamplingParams.

    Raises:
        VLLMValidationError: A name or value of ours is not supported.
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
