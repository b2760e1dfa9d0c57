# SPDX-License-Identifier: Apache-2.0
"""What a request's sampling parameters say about drafts: how long, how penalised, where to stop.

A token that the target is bound to reject is not worth verifying. Leaving it out is lossless,
because drafts are one-hot rows: any edit that does not look at the verification's randomness is.
"""

import logging
from functools import lru_cache
from typing import Any

from vllm_hetero_spec.draft.penalties import Penalty

logger = logging.getLogger("vllm.hetero_spec")

# A request's own lookahead in SamplingParams.extra_args (`vllm_xargs` over HTTP); 0 is off.
LOOKAHEAD_ARG = "hetero_spec_lookahead"


def wished_lookahead(request: Any) -> int | None:
    """The lookahead that a request asks for, None where it leaves it to the engine."""
    params = request.sampling_params
    wish = (params.extra_args or {}).get(LOOKAHEAD_ARG) if params is not None else None
    if wish is None:
        return None
    if isinstance(wish, bool) or not isinstance(wish, int) or wish < 0:
        _complain(repr(wish)[:40])
        return None
    return wish


@lru_cache(maxsize=8)
def _complain(found: str) -> None:
    logger.warning(
        "A request asks for %s=%s; it must be a whole number from 0 (no speculation). Such "
        "requests are drafted as if they had not asked.",
        LOOKAHEAD_ARG,
        found,
    )


def useful_lookahead(request: Any, length: int, max_model_len: int, lookahead: int) -> int:
    """Target tokens worth proposing: none beyond the model's length or the request's own end.

    Args:
        request: The model runner's state of the request.
        length: Its tokens so far.
        max_model_len: The target's.
        lookahead: What the scheduler asks for.
    """
    room = max_model_len - length - 1
    params = request.sampling_params
    if params is not None and params.max_tokens is not None:
        room = min(room, params.max_tokens - len(request.output_token_ids) - 1)
    return max(0, min(lookahead, room))


def penalty_of(request: Any) -> Penalty | None:
    """The request's penalties, None where there are none."""
    params = request.sampling_params
    if params is None:
        return None
    penalty = Penalty(params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return None if penalty == Penalty() else penalty


def acceptable(proposal: list[int], request: Any) -> list[int]:
    """The proposal up to the first token that the request's parameters forbid.

    Bad words, stop tokens before `min_tokens`, and tokens outside `allowed_token_ids`.
    """
    params = request.sampling_params
    if params is None:
        return proposal
    bad_words = params.bad_words_token_ids or ()
    allowed = params.allowed_token_ids
    early = params.min_tokens - len(request.output_token_ids)
    if not bad_words and allowed is None and early <= 0:
        return proposal
    past = list(request.output_token_ids[-max(map(len, bad_words), default=1) :])
    for position, token in enumerate(proposal):
        past.append(token)
        if (
            (allowed is not None and token not in allowed)
            or (position < early and token in params.all_stop_token_ids)
            or any(past[-len(word) :] == word for word in bad_words)
        ):
            return proposal[:position]
    return proposal
