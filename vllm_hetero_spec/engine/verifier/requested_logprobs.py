# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens that a request names (`logprob_token_ids`), in steps with drafts.

vLLM's verification only supports the likeliest tokens. On Model Runner V2 such a request gets no
log probabilities. On V1 it ends the engine if another request wants the likeliest tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.v1.outputs import LogprobsTensors

from vllm_hetero_spec.staging import Send


def with_asked(
    found: LogprobsTensors,
    asked: Mapping[int, Sequence[int]],
    scores: Callable[[torch.Tensor], torch.Tensor],
    num_draft_tokens: Sequence[int],
    send: Send,
) -> LogprobsTensors:
    """Replace the likeliest tokens by the named ones, for requests that name tokens.

    After each row's own token, unused columns have id 0 at -inf.

    Args:
        found: Log probabilities of the likeliest tokens; each request has equally many rows.
        asked: Token ids by the index of each request that names tokens.
        scores: Maps int64 [n] rows of the batch's logits to [n, V] scores for users.
        num_draft_tokens: Draft tokens of each request, which has one row of logits more.
        send: Copies arrays to the device.
    """
    each = len(found.logprobs) // len(num_draft_tokens)
    likeliest = found.logprobs.shape[1] - 1
    columns = max(likeliest, *map(len, asked.values()))
    requests, tokens = np.array([*asked])[:, None], np.arange(each)
    starts = np.cumsum([0, *np.add(num_draft_tokens, 1)])
    rows = np.minimum(starts[requests] + tokens, starts[-1] - 1)  # rejected tokens may have no row
    ids = np.full((len(asked), each, columns), -1)
    for lines, own in zip(ids, asked.values(), strict=True):
        lines[:, : len(own)] = own
    places = (requests * each + tokens).ravel()
    sent_places, sent_rows, sent_ids = send(places, rows.ravel(), ids.reshape(-1, columns))
    values = scores(sent_rows).gather(1, sent_ids.clamp_min(0))
    extra = columns - likeliest
    token_ids = pad(found.logprob_token_ids, (0, extra))
    logprobs = pad(found.logprobs, (0, extra), value=float("-inf"))
    token_ids[sent_places, 1:] = sent_ids.clamp_min(0).to(token_ids.dtype)
    logprobs[sent_places, 1:] = values.masked_fill(sent_ids < 0, float("-inf"))
    return found._replace(logprob_token_ids=token_ids, logprobs=logprobs)


def flat(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    local: torch.Tensor,
) -> torch.Tensor:
    """Return int [R], the token that each row of logits emitted; 0 for rows without one.

    Args:
        sampled: int [B, S+1], tokens of each request.
        num_sampled: int [B], number of valid tokens in each row of `sampled`.
        cu_num_logits: int [B+1], first row of logits of each request.
        local: int [R], index of each row in its request.
    """
    every = torch.arange(len(local), device=local.device, dtype=cu_num_logits.dtype)
    request_of = torch.searchsorted(cu_num_logits[1:], every, right=True)
    local = local.long()
    return torch.where(local < num_sampled[request_of], sampled[request_of, local], 0)
