# SPDX-License-Identifier: Apache-2.0
"""Limits of the draft of each request in a step.

First tokens have priority. While a request waits for its first token, a request that has just
sampled its own is not drafted for. Until a step later, the drafter does not prefill long contexts
of new requests.
"""

from collections.abc import Sequence

from vllm_hetero_spec.engine.drafter.requests import NEVER
from vllm_hetero_spec.engine.seam.step_view import StepView

LONG_PREFILL = 128  # tokens; a shorter drafter prefill costs about one target step
# Output tokens; until then, a request with a long unread context waits while others wait for their
# first tokens. Without a limit, a stream of prompts would make it wait forever.
_PATIENCE = 4


def request_limits(step: StepView, unread: Sequence[int]) -> tuple[list[int], dict[str, int], int]:
    """Return the limit of each request's draft; first tokens of other requests have priority.

    Returns:
        The controller's limits; the lookaheads that requests set, whose limits are 0; and the
        number of waiting requests.
    """
    begins = [request.begins for request in step.requests]
    first_tokens = any(begins)
    on_their_way = first_tokens and any(
        begun and not request.new_tokens
        for request, begun in zip(step.requests, begins, strict=True)
    )
    longest = max(step.buckets, default=step.lookahead)
    own, limits, num_waiting = {}, [], 0
    every = zip(step.requests, step.going_on, begins, unread, strict=True)
    for request, goes_on, begun, left in every:
        limit = longest if goes_on and left < NEVER else 0
        asked = request.params.lookahead
        waits = first_tokens and request.num_output_tokens <= _PATIENCE and left > LONG_PREFILL
        if limit and (waits or (begun and on_their_way)):
            limit, num_waiting = 0, num_waiting + 1
        if asked is not None:
            own[request.req_id] = min(asked, limit, step.longest or limit)
            limit = 0
        limits.append(limit)
    return limits, own, num_waiting
