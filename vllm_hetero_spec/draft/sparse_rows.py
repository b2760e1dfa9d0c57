# SPDX-License-Identifier: Apache-2.0
"""Rows of few tokens as they travel: draft_probs of drafts that were drawn from the likeliest.

A row over the target's vocabulary is megabytes for each request and step. So where it has to go
far, what is drawn from is cut down to the likeliest tokens first, and these are all of the row.
"""

import torch

# Tokens that are drawn from there.
SPARSE_TOP_K = 64


def pack(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Rows with at most so many tokens, as they travel.

    Args:
        rows: float32 [R, V_T].
        count: C.

    Returns:
        int32 [R, 2, C]: target ids, and the bits of their float32 probabilities; 0 where there are
        fewer.
    """
    kept = rows.topk(min(count, rows.shape[1]))
    packed = torch.zeros((len(rows), 2, count), dtype=torch.int32, device=rows.device)
    packed[:, 0, : kept.indices.shape[1]] = kept.indices
    packed[:, 1, : kept.values.shape[1]] = kept.values.view(torch.int32)
    return packed


def unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Whole rows again, float32 [R, V_T], of what `pack` gave, and V_T."""
    values = packed[:, 1].contiguous().view(torch.float32)
    rows = values.new_zeros((len(packed), width))
    return rows.scatter_add_(1, packed[:, 0].long(), values)
