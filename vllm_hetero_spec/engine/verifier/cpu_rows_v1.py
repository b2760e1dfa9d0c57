# SPDX-License-Identifier: Apache-2.0
"""Top-k, top-p and penalties of draft rows on a CPU, without work over the vocabulary.

vLLM's CPU build sorts every row that has a top-p (14 ms for a row of 151,936 tokens), and counts
the tokens of every row with penalties in a table as wide as the vocabulary (3 ms). A step without
drafts has one row per request. Verification has one more for each draft token, and would take
longer than the target's forward.

The cost of penalties here depends on the request's length. Operations and their order are vLLM's,
so the logits are bit-identical.
"""

from collections.abc import Sequence

import torch
from vllm.v1.sample.ops import topk_topp_sampler as vllm

_ORDERED = 1024  # sorted tokens of a row; vLLM sorts the rows that keep more tokens


def apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Apply vLLM's function of this name, without a full sort on a CPU if few tokens are kept.

    Args:
        logits: float32 [n, V], changed in place.
        k: int [n], V for no top-k; None if no row has one.
        p: float [n], 1 for no top-p; None if no row has one.

    Returns:
        float32 [n, V], -inf for the tokens that vLLM removes. A token at the edge of top-p may
        differ, because sums are rounded in float64.
    """
    width = logits.shape[1]
    if p is None or logits.device.type != "cpu" or width <= _ORDERED:
        return vllm.apply_top_k_top_p(logits, k, p)
    best = logits.topk(_ORDERED)
    values, total = best.values, logits.logsumexp(-1, keepdim=True)
    few, limited = values[:, -1] == float("-inf"), torch.zeros_like(p, dtype=torch.bool)
    if k is not None:
        last = values.gather(1, (k.long() - 1).clamp_max(_ORDERED - 1)[:, None])
        # True if all tokens that tie with the k-th are among the sorted ones.
        few |= (k <= _ORDERED) & (values[:, -1] < last[:, 0])
        values = values.masked_fill(few[:, None] & (values < last), float("-inf"))
        total = torch.where(few[:, None], values.logsumexp(-1, keepdim=True), total)
        limited = k < width
    whole = ~limited & (p >= 1)
    shares = (values - total).exp().double()
    before = shares.cumsum(-1) - shares
    # Top-p is a share of what top-k leaves, which is known if that is among the sorted tokens.
    cut = ~whole & (few | (~limited & (before[:, -1] >= p)))
    values = values.masked_fill((before >= p[:, None]) & (p < 1)[:, None], float("-inf"))
    logits.masked_fill_(cut[:, None], float("-inf"))
    logits.scatter_(1, best.indices, torch.where(cut[:, None], values, best.values))
    rest = (~cut & ~whole).nonzero()[:, 0]
    if len(rest):
        of_rest = None if k is None else k[rest]
        logits[rest] = vllm.apply_top_k_top_p(logits[rest], of_rest, p[rest])
    return logits


def apply_row_penalties(
    logits: torch.Tensor,
    prompts: torch.Tensor,
    request_of: torch.Tensor,
    penalties: torch.Tensor,
    outputs: Sequence[Sequence[int]],
) -> None:
    """Penalize logits float32 [N, V] in place.

    Args:
        logits: On the CPU.
        prompts: int64 [B, P], padded with V.
        request_of: int64 [N], request of each row.
        penalties: float32 [B, 3], presence, frequency and repetition of each request.
        outputs: [N], output tokens before each row; -1 for no token.
    """
    width, every = logits.shape[1], penalties.tolist()
    for row, request, output in zip(logits, request_of.tolist(), outputs, strict=True):
        presence, frequency, repetition = every[request]
        written = torch.tensor([token for token in output if token >= 0], dtype=torch.int64)
        if repetition != 1:
            prompt = prompts[request]
            seen = torch.cat([prompt[prompt < width], written])
            values, factor = row[seen], penalties[request, 2]
            row[seen] = values * torch.where(values > 0, 1.0 / factor, factor)
        if presence or frequency:
            tokens, counts = written.unique(return_counts=True)
            row[tokens] -= frequency * counts
            row[tokens] -= presence
