# SPDX-License-Identifier: Apache-2.0
"""Repairs vLLM's per-request to per-token expansion on CPU.

vLLM 0.32 and 0.33 without Triton replace a kernel by a C++ one that takes int64 tensors; float
temperatures, top-p and top-k are written to a converted copy and lost, so the sampling parameters
of draft rows are uninitialised memory. Every speculative run on CPU with temperature > 0 is wrong.
"""

import logging
from typing import Any

import torch

from vllm_hetero_spec.engine.compat import patching

logger = logging.getLogger("vllm.hetero_spec")


def repair() -> None:
    """Replace the expansion where the platform is CPU and the stock one fails a small test."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu() or expands(rejection_sampler.expand_batch_to_tokens):
        return
    if patching.replace(
        rejection_sampler, "expand_batch_to_tokens", "cpu expand", lambda _: expand
    ):
        logger.info("Repaired vLLM's CPU expansion of sampling parameters to draft rows.")


def expands(function: Any) -> bool:
    """Whether `function` expands float parameters as documented."""
    per_request = torch.tensor([0.5, 0.0, 2.0])
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    found = function(per_request, ends, 3, 0, 1)
    return torch.equal(found, torch.tensor([0.5, 0.5, 2.0]))


def expand(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """[B] values to [num_tokens] rows, `cu_num_tokens[b]` being the end of request b's rows."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    rows = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
    if replace_from != replace_to:
        rows = torch.where(rows == replace_from, torch.full_like(rows, replace_to), rows)
    return rows
