# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of the tokens that a request names (`logprob_token_ids`), beside its draft.

vLLM's own verification knows of the likeliest tokens alone: on Model Runner V2 such a request gets
none, and on V1 one beside another that asks for the likeliest ends the engine.
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
    """The log probabilities of a batch, those that are asked for in the place of the likeliest.

    Args:
        found: Of the likeliest tokens, as many rows for each request: its tokens in turn.
        asked: Index of each request that names tokens -> their ids.
        scores: int64 [n], rows of the batch's logits -> [n, V], what is told of them.
        num_draft_tokens: Of each request, whose rows are one more, in turn.
        send: Brings arrays to the device.

    Returns:
        The same rows; behind each one's token, ids that are not asked for are 0, at -inf.
    """
    each = len(found.logprobs) // len(num_draft_tokens)
    likeliest = found.logprobs.shape[1] - 1
    columns = max(likeliest, *map(len, asked.values()))
    requests, tokens = np.array([*asked])[:, None], np.arange(each)
    starts = np.cumsum([0, *np.add(num_draft_tokens, 1)])
    rows = np.minimum(starts[requests] + tokens, starts[-1] - 1)  # rejected tokens may have none
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
    """int [R], the token that each row of logits has given; 0 where none.

    Args:
        sampled: int [B, S+1], what each request emits.
        num_sampled: int [B], how many tokens of it count.
        cu_num_logits: int [B+1], where each request's rows begin.
        local: int [R], which of its request's rows each is.
    """
    every = torch.arange(len(local), device=local.device, dtype=cu_num_logits.dtype)
    request_of = torch.searchsorted(cu_num_logits[1:], every, right=True)
    local = local.long()
    return torch.where(local < num_sampled[request_of], sampled[request_of, local], 0)
