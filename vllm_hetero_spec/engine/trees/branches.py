# SPDX-License-Identifier: Apache-2.0
"""The draft trees of one worker, step by step: planned, verified, brought home.

To vLLM a tree is a request's draft like others: it counts its rows, and samples from them. Only
attention is shown other sequences than there are requests (`trees.layout`): how, is between a
model runner and its own file. What a walk along a side has computed is copied home once the step's
tokens are known.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_hetero_spec.engine.seam.step_view import TreeRoom, TreesView
from vllm_hetero_spec.engine.trees.scratch import (
    block_sizes_of,
    branches_per_request,
    nodes_of,
    scratch_of,
)
from vllm_hetero_spec.staging import Sender
from vllm_hetero_spec.trees.layout import BranchPlan, TreeRows, plan_branches, scratch_blocks
from vllm_hetero_spec.trees.walk import NO_NODE

if TYPE_CHECKING:
    pass


class _PendingTree(NamedTuple):
    """A tree, and how many tokens of its request have KV when it is verified."""

    rows: TreeRows
    start: int


@dataclass(frozen=True)
class _Step:
    """A step in which some trees have sides.

    Attributes:
        req_ids: Of the batch, in its order.
        lengths: Rows behind each request's root.
        trees: Of each request, cut to what is verified; None for a chain.
        plans: Of each group of the KV cache.
    """

    req_ids: Sequence[str]
    lengths: Sequence[int]
    trees: Sequence[_PendingTree | None]
    plans: Sequence[BranchPlan]


class BranchSequences:
    """The draft trees of one worker.

    Args:
        runner: vLLM's, with its model loaded.

    Attributes:
        nodes: Of the present step, tokens of each tree that are verified, by request.
        again: Of the present step, rows of each tree that are no nodes, where there are any.
        taken: Walks that have ended on a side so far.
    """

    def __init__(self, runner: Any) -> None:
        self.nodes: dict[str, int] = {}
        self.again: dict[str, int] = {}
        self.taken = 0
        self._runner = runner
        self._send = Sender(runner.device).send
        self._drafted: dict[str, _PendingTree] = {}  # until they are verified
        self._step: _Step | None = None
        self._is_tree: torch.Tensor | None = None  # see TreesView

    @property
    def uneven(self) -> bool:
        """Whether attention sees other sequences in the present step than there are requests."""
        return self._step is not None

    def room(self, requests: int, rows: int) -> TreeRoom | None:
        """What the next drafts of so many requests may be; None without scratch blocks.

        Args:
            requests: That may be drafted for.
            rows: Of a draft at most.
        """
        config, nodes, scratch, sizes = self._bounds
        if not scratch:
            return None
        return TreeRoom(nodes, rows, branches_per_request(config, sizes, len(scratch), requests))

    @cached_property
    def _bounds(self) -> tuple[Any, int, range, list[int]]:
        """The configuration; tokens of a tree, scratch blocks, tokens of each group's blocks."""
        config, cache = self._runner.vllm_config, self._runner.kv_cache_config
        return config, nodes_of(config), scratch_of(config, cache), block_sizes_of(cache)

    def own_block(self, request: int, group: int, column: int) -> int:
        """A block of a request of the step, by its place in the batch."""
        raise NotImplementedError

    def begins(self) -> None:
        """A step begins."""
        self._step, self._is_tree, self.nodes, self.again = None, None, {}, {}

    def forget(self, req_id: str) -> None:
        """A request has gone, or begins again: its draft is none of what comes."""
        self._drafted.pop(req_id, None)

    def on_drafts_taken(
        self,
        drafts: Mapping[str, Sequence[int]],
        trees: Mapping[str, TreeRows],
        lengths: Mapping[str, int],
    ) -> None:
        """A step's drafts leave.

        Args:
            drafts: Of each request, what its target is fed.
            trees: Those among them that are trees; of another step they do not count.
            lengths: Of the requests' texts.
        """
        for req_id, tokens in drafts.items():
            self._drafted.pop(req_id, None)
            rows = trees.get(req_id)
            if rows is not None and rows.tokens == tokens:
                self._drafted[req_id] = _PendingTree(rows, lengths[req_id] - 1)

    def keep(self, live: Container[str]) -> None:
        """Forget the drafts of requests that are gone."""
        for req_id in [req_id for req_id in self._drafted if req_id not in live]:
            self.forget(req_id)

    def check(self, req_id: str, draft: Sequence[int], start: int) -> None:
        """A draft is about to be verified: where its request's tree is another, that is void.

        Args:
            req_id: The request.
            draft: Target ids.
            start: Tokens of the request that have KV.
        """
        tree = self._drafted.get(req_id)
        if tree is not None and (tree.start != start or tree.rows.tokens[: len(draft)] != draft):
            self.forget(req_id)

    def plan(
        self, req_ids: Sequence[str], scheduled: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Plan the step.

        Args:
            req_ids: Of its batch, in order.
            scheduled: Tokens of each request.
            lengths: How many of them are its draft.
        """
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
            plans.append(plan_branches(starts, scheduled, counts, size, scratch))
            scratch = scratch[len(plans[-1].lines) :]
        self._step = _Step(req_ids, lengths, trees, plans)

    def laid_out(self, is_tree: torch.Tensor) -> None:
        """The step is as it will be computed, but for its tails.

        Args:
            is_tree: See `TreesView`.
        """
        self._is_tree = is_tree
        self.copy_tails()

    def view(self) -> TreesView | None:
        """The trees of the step that are to be verified."""
        if self._step is None:
            return None
        assert self._is_tree is not None
        parents = [
            [NO_NODE] * length if tree is None else tree.rows.parents
            for tree, length in zip(self._step.trees, self._step.lengths, strict=True)
        ]
        return TreesView(parents, [tree is not None for tree in self._step.trees], self._is_tree)

    def commit_accepted_branch_kv(self, emitted: Mapping[str, Sequence[int]]) -> None:
        """Copy what walks along sides have computed over the requests' own blocks.

        Args:
            emitted: Target ids that each request of the step sampled.
        """
        step = self._step
        assert step is not None, "no side was planned"
        sizes = block_sizes_of(self._runner.kv_cache_config)
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

    def copy_tails(self) -> None:
        """Copy what the requests' last blocks hold to the first scratch block of each side."""
        assert self._step is not None, "no side was planned"
        self._copy(
            (self.own_block(request, group, column), block)
            for group, plan in enumerate(self._step.plans)
            for request, column, block in plan.tails
        )

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the KV cache, each (from, to)."""
        runner = self._runner
        blocks = [(int(source), int(target)) for source, target in pairs]
        copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, blocks)


def _fitted(
    tree: _PendingTree, length: int, free: int, lent: int, sizes: Sequence[int]
) -> tuple[_PendingTree, int]:
    """What of a tree can be verified, and the scratch blocks that it takes.

    Args:
        tree: As it was handed out.
        length: Rows that are scheduled for it.
        free: Sequences that are left.
        lent: Scratch blocks that are left.
        sizes: Of the blocks of each group.
    """
    branches = min(free, len(tree.rows.counts) - 1)
    while True:
        rows = tree.rows.fitted(length, branches)
        needed = sum(scratch_blocks(tree.start, rows.counts, size) for size in sizes)
        if needed <= lent:
            return _PendingTree(rows, tree.start), needed
        branches -= 1
