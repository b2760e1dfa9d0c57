# SPDX-License-Identifier: Apache-2.0
"""Decide at start-up whether the drafts of an engine may be trees."""

import logging
from collections.abc import Collection
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group

from vllm_hetero_spec.engine.seam.tree_adapter import TreeAdapter

logger = logging.getLogger("vllm.hetero_spec")

# Attention backends on which the tests of draft trees have run. CPU_ATTN: test_tree_engines.py, on
# both model runners. TRITON_ATTN: scripts/test_gpu.sh, on Model Runner V2 and an H200 (RESULTS 5).
BACKENDS = ("CPU_ATTN", "TRITON_ATTN")
# Modes of CUDA graphs that steps with trees can use, by model runner.
GRAPHS_V1 = (CUDAGraphMode.PIECEWISE,)
GRAPHS_V2 = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


def agree(runner: Any, branches: TreeAdapter, graphs: Collection[CUDAGraphMode]) -> bool:
    """Return True if drafts may be trees on all ranks; otherwise log the reason.

    Every rank of the target must call it.
    """
    reason = _why_not(runner, branches)
    if reason:
        logger.warning("Draft trees disabled: %s.", reason)
    supported, group = not reason, get_tp_group()
    if group.world_size > 1:  # to verify a tree as a chain would be wrong
        votes = torch.tensor([supported], dtype=torch.int32)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        supported = bool(votes[0])
    mode = runner.vllm_config.compilation_config.cudagraph_mode
    if supported and mode not in (None, CUDAGraphMode.NONE) and mode.mixed_mode() not in graphs:
        logger.info(
            "Steps with draft trees run without CUDA graphs, since cudagraph_mode is %s; "
            "FULL_AND_PIECEWISE has some for them.",
            mode.name,
        )
    return supported


def _why_not(runner: Any, branches: TreeAdapter) -> str:
    """Return why drafts cannot be trees on this rank; empty if they can."""
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    if untested := sorted(backends.difference(BACKENDS)):
        return (
            f"they are not tested on the attention backend {', '.join(untested)}; supported: "
            f"{', '.join(BACKENDS)}; choose one with --attention-backend"
        )
    room = branches.room(1, runner.speculative_config.num_speculative_tokens)
    if room is None:
        return (
            "the KV cache has no block to spare, or not only the KV of full and sliding-window "
            "attention; a larger one may help"
        )
    if not room.branches:
        return (
            "one request alone leaves no sequence or too few KV blocks for a side path; raise "
            "max_num_seqs, or the KV cache"
        )
    return ""
