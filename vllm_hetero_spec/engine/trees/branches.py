# SPDX-License-Identifier: Apache-2.0
"""Draft trees of one worker: plan each step's branches, and copy accepted KV afterwards.

For vLLM a tree is a draft like others: vLLM schedules its rows and samples from them. Only the
attention metadata has additional sequences (`trees.layout`), which `attention_v1` or `attention_v2`
adds. Once the step's tokens are known, the KV of accepted branch tokens is copied into the
request's own blocks.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.seam.tree_adapter import TreeRoom
from vllm_hetero_spec.engine.trees.scratch import (
    block_sizes_of,
    branches_per_request,
    nodes_of,
    scratch_of,
)
from vllm_hetero_spec.staging import Send, Sender
from vllm_hetero_spec.trees.layout import BranchPlan, TreeRows, plan_branches, scratch_blocks
from vllm_hetero_spec.trees.walk import NO_NODE, TreeBatch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger("vllm.hetero_spec")

# Attention backends on which the tests of draft trees have run. CPU_ATTN: test_tree_engines.py, on
# both model runners. TRITON_ATTN: scripts/test_gpu.sh, on Model Runner V2 and an H200 (RESULTS 5).
BACKENDS = ("CPU_ATTN", "TRITON_ATTN")


class BatchTrees(NamedTuple):
    """`TreesView` of a batch.

    `parents` has the parent of each row after the root's of each request, as in `TreeBatch.of`;
    NO_NODE for the rows of a chain.
    """

    parents: Sequence[Sequence[int]]
    planned: Sequence[bool]
    is_tree: torch.Tensor

    def num_rows(self, part: slice) -> int:
        parents = self.parents[part]
        return len(parents) + sum(map(len, parents))

    def rows(self, fed: torch.Tensor, part: slice, send: Send) -> TreeBatch:
        return TreeBatch.of(fed, self.parents[part], send)


class _PendingTree(NamedTuple):
    """A tree to verify; its request will have `start` tokens with KV then."""

    rows: TreeRows
    start: int


@dataclass(frozen=True)
class _Step:
    """A step with branches, with a plan per KV cache group; chains have None in `trees`."""

    req_ids: Sequence[str]
    lengths: Sequence[int]
    trees: Sequence[_PendingTree | None]
    plans: Sequence[BranchPlan]


class BranchSequences:
    """`TreeAdapter` of one worker, for the worker's lifetime.

    Attributes:
        graphs: Modes of CUDA graphs that steps with trees can use.
        taken: Number of walks that ended on a branch so far.
    """

    graphs: Collection[CUDAGraphMode] = ()

    def __init__(self, runner: Any) -> None:
        self.nodes: dict[str, int] = {}
        self.again: dict[str, int] = {}
        self.taken = 0
        self._runner = runner
        self._send = Sender(runner.device).send
        self._expected: dict[str, TreeRows] = {}  # of the drafts that vLLM gets next
        self._drafted: dict[str, _PendingTree] = {}  # until they are verified
        self._step: _Step | None = None
        self._is_tree: torch.Tensor | None = None  # `TreesView.is_tree`

    def agree(self) -> bool:
        reason = self._why_not()
        if reason:
            logger.warning("Draft trees disabled: %s.", reason)
        supported, group = not reason, get_tp_group()
        if group.world_size > 1:  # to verify a tree as a chain would be wrong
            votes = torch.tensor([supported], dtype=torch.int32)
            minimum = torch.distributed.ReduceOp.MIN
            torch.distributed.all_reduce(votes, minimum, group=group.cpu_group)
            supported = bool(votes[0])
        mode, none = self._runner.vllm_config.compilation_config.cudagraph_mode, CUDAGraphMode.NONE
        if supported and mode not in (None, none) and mode.mixed_mode() not in self.graphs:
            logger.info(
                "Steps with draft trees run without CUDA graphs, since cudagraph_mode is %s; "
                "FULL_AND_PIECEWISE has some for them.",
                mode.name,
            )
        return supported

    def _why_not(self) -> str:
        """Return why drafts cannot be trees on this rank; empty if they can."""
        runner = self._runner
        backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
        if untested := sorted(backends.difference(BACKENDS)):
            return (
                f"they are not tested on the attention backend {', '.join(untested)}; supported: "
                f"{', '.join(BACKENDS)}; choose one with --attention-backend"
            )
        room = self.room(1, runner.speculative_config.num_speculative_tokens)
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

    @property
    def uneven(self) -> bool:
        return self._step is not None

    def room(self, requests: int, rows: int) -> TreeRoom | None:
        config, nodes, scratch, sizes = self._bounds
        if not scratch:
            return None
        return TreeRoom(nodes, rows, branches_per_request(config, sizes, len(scratch), requests))

    @cached_property
    def _bounds(self) -> tuple[Any, int, range, list[int]]:
        """Configuration, tokens per tree, scratch blocks, and block size of each KV cache group."""
        config, cache = self._runner.vllm_config, self._runner.kv_cache_config
        return config, nodes_of(config), scratch_of(config, cache), block_sizes_of(cache)

    def own_block(self, request: int, group: int, column: int) -> int:
        """Return a block id of a request, by its index in the batch."""
        raise NotImplementedError

    def on_step_start(self, output: "SchedulerOutput") -> None:
        self._step, self._is_tree, self.nodes, self.again = None, None, {}, {}

    def expect(self, drafts: Sequence[Draft], keeps_chain: Callable[[str], bool]) -> None:
        trees = {draft.req_id: draft.rows for draft in drafts if draft.rows is not None}
        group = get_tp_group()
        if group.world_size > 1:  # all ranks have to verify the same trees
            trees = group.broadcast_object(trees, src=0)
        self._expected = {
            req_id: rows
            for req_id, rows in trees.items()
            if isinstance(rows, TreeRows) and not keeps_chain(req_id)
        }

    def on_drafts_taken(
        self, drafts: Mapping[str, Sequence[int]] | None, lengths: Mapping[str, int]
    ) -> None:
        expected, self._expected = self._expected, {}
        for req_id in lengths if drafts is None else drafts:
            self._drafted.pop(req_id, None)
            rows = expected.get(req_id)
            if rows is not None and (drafts is None or rows.tokens == drafts[req_id]):
                self._drafted[req_id] = _PendingTree(rows, lengths[req_id] - 1)

    def before_forward(
        self, req_ids: Sequence[str], scheduled: Sequence[int], lengths: Sequence[int]
    ) -> None:
        if not self._drafted:
            return
        _, _, scratch, sizes = self._bounds
        free, lent = self._runner.max_num_reqs - len(req_ids), len(scratch)
        trees: list[_PendingTree | None] = []
        for req_id, length, rows in zip(req_ids, lengths, scheduled, strict=True):
            tree, needed = self._drafted.pop(req_id, None), 0
            if tree is not None and length and rows == 1 + length:
                tree, needed = _fitted(tree, length, free, lent, sizes)
                branches = len(tree.rows.counts) - 1
                free, lent = free - branches, lent - needed
                again = tree.rows.parents.count(NO_NODE)
                self.nodes[req_id] = len(tree.rows.parents) - again
                self.again |= {req_id: again} if again else {}
            trees.append(tree if tree is not None and needed else None)
        if not any(trees):
            return
        starts = [0 if tree is None else tree.start for tree in trees]
        counts = [
            [rows] if tree is None else tree.rows.counts
            for rows, tree in zip(scheduled, trees, strict=True)
        ]
        plans: list[BranchPlan] = []
        for size in sizes:
            plans.append(plan_branches(starts, counts, size, scratch))
            scratch = scratch[len(plans[-1].lines) :]
        self._step = _Step(req_ids, lengths, trees, plans)

    def laid_out(self, is_tree: torch.Tensor) -> None:
        """Copy the requests' last partial blocks to the first scratch block of each branch.

        `is_tree` is `TreesView.is_tree`.
        """
        assert self._step is not None, "no branch was planned"
        self._is_tree = is_tree
        self._copy(
            (self.own_block(request, group, column), block)
            for group, plan in enumerate(self._step.plans)
            for request, column, block in plan.tails
        )

    def view(self) -> "BatchTrees | None":
        if self._step is None:
            return None
        assert self._is_tree is not None
        parents = [
            [NO_NODE] * length if tree is None else tree.rows.parents
            for tree, length in zip(self._step.trees, self._step.lengths, strict=True)
        ]
        return BatchTrees(parents, [tree is not None for tree in self._step.trees], self._is_tree)

    def after_sampling(self, emitted: Mapping[str, Sequence[int]]) -> None:
        step = self._step
        assert step is not None, "no branch was planned"
        _, _, _, sizes = self._bounds
        pairs: list[tuple[int, int]] = []
        for request, (req_id, tree) in enumerate(zip(step.req_ids, step.trees, strict=True)):
            if tree is None or not emitted[req_id]:
                continue
            sequence, depth = tree.rows.end(emitted[req_id])
            if not sequence:
                continue
            self.taken += 1
            for group, (plan, size) in enumerate(zip(step.plans, sizes, strict=True)):
                for column, block in plan.blocks_to_copy(
                    request, sequence, tree.start, depth, size
                ):
                    pairs.append((block, self.own_block(request, group, column)))
        self._copy(pairs)
        self._step = None

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the KV cache, each (from, to)."""
        runner = self._runner
        blocks = [(int(source), int(target)) for source, target in pairs]
        copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, blocks)


def _fitted(
    tree: _PendingTree, length: int, free: int, lent: int, sizes: Sequence[int]
) -> tuple[_PendingTree, int]:
    """Return the part of a tree that can be verified, and the scratch blocks that it needs.

    There are `free` sequences and `lent` scratch blocks left.
    """
    branches = min(free, len(tree.rows.counts) - 1)
    while True:
        rows = tree.rows.fitted(length, branches)
        needed = sum(scratch_blocks(tree.start, rows.counts, size) for size in sizes)
        if needed <= lent:
            return _PendingTree(rows, tree.start), needed
        branches -= 1
