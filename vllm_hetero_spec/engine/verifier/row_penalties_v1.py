# SPDX-License-Identifier: Apache-2.0
"""Penalties of draft rows on a CPU, applied only to the tokens that occur.

vLLM counts the tokens of every row in a table as wide as the vocabulary: 3 ms for a row of 151,936
tokens. Here the cost of a row depends on the request's length. Operations and their order are
vLLM's, so the logits are bit-identical.
"""

from collections.abc import Sequence

import torch


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
