# SPDX-License-Identifier: Apache-2.0
"""Compact format for draft_probs that are sent between processes or nodes.

A dense row has one float32 per token of the target's vocabulary. To send less, drafts are drawn
only from the `SPARSE_TOP_K` most likely tokens, so that a row has no other entries.
"""

import torch

SPARSE_TOP_K = 64  # drafter tokens to draw from


def pack(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Pack rows, float32 [R, V_T], with at most `count` (C) nonzero entries.

    Returns:
        int32 [R, 2, C]: target ids, and the bits of their float32 probabilities, padded with 0.
    """
    kept = rows.topk(min(count, rows.shape[1]))
    packed = torch.zeros((len(rows), 2, count), dtype=torch.int32, device=rows.device)
    packed[:, 0, : kept.indices.shape[1]] = kept.indices
    packed[:, 1, : kept.values.shape[1]] = kept.values.view(torch.int32)
    return packed


def unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return dense rows, float32 [R, width], from the result of `pack`."""
    values = packed[:, 1].contiguous().view(torch.float32)
    rows = values.new_zeros((len(packed), width))
    return rows.scatter_add_(1, packed[:, 0].long(), values)
