# SPDX-License-Identifier: Apache-2.0
"""What a request's sampling parameters say about drafts: how drawn, how long, where to stop.

A token that the target is bound to reject is not worth verifying. Cutting a draft by its length is
lossless; cutting it by what its tokens are is so for greedy drafts, of which nothing was drawn.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from vllm_hetero_spec.draft.penalties import Penalty

if TYPE_CHECKING:
    from vllm import SamplingParams

logger = logging.getLogger("vllm.hetero_spec")

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
        lookahead=_requested_lookahead(params),
    )


def _requested_lookahead(params: "SamplingParams") -> int | None:
    if not params.extra_args:
        return None
    for name in params.extra_args:
        if str(name).startswith(_OURS) and name != LOOKAHEAD_ARG:
            _complain_of(str(name)[:40])
    asked = params.extra_args.get(LOOKAHEAD_ARG)
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        _complain(repr(asked)[:40])
        return None
    return asked


@lru_cache(maxsize=8)
def _complain(found: str) -> None:
    logger.warning(
        "A request asks for %s=%s; it must be a whole number from 0 (no speculation). Such "
        "requests are drafted as if they had not asked.",
        LOOKAHEAD_ARG,
        found,
    )


@lru_cache(maxsize=8)
def _complain_of(name: str) -> None:
    logger.warning(
        "A request asks for %s, which nobody reads; %s is supported.", name, LOOKAHEAD_ARG
    )
