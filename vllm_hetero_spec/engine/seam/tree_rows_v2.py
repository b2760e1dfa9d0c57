# SPDX-License-Identifier: Apache-2.0
"""Draft trees on Model Runner V2: a step's batch as attention sees it, with side sequences.

To V2 a tree is a request's draft like others: it counts its rows, and samples from them. Only
attention is shown other sequences than there are requests (`verify.tree_rows`): V2 asks the model's
state for its metadata, and `TreeModelState` lays the batch out anew before it answers. What a walk
along a side has computed is copied home once the step's tokens are known.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_hetero_spec.engine.seam.step_view import TreeRoom, TreesView
from vllm_hetero_spec.engine.seam.tree_scratch import (
    block_sizes_of,
    nodes_of,
    scratch_of,
    sides_of_request,
)
from vllm_hetero_spec.staging import Sender
from vllm_hetero_spec.verify.tree_rows import SidePlan, TreeRows, plan_sides, scratch_blocks
from vllm_hetero_spec.verify.trees import NO_NODE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = logging.getLogger("vllm.hetero_spec")


class _Drafted(NamedTuple):
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
    trees: Sequence[_Drafted | None]
    plans: Sequence[SidePlan]


class SideSequences:
    """The draft trees of one worker.

    Args:
        runner: vLLM's, with its model loaded.

    Attributes:
        nodes: Of the present step, tokens of each tree that are verified, by request.
        taken: Walks that have ended on a side so far.
    """

    def __init__(self, runner: "GPUModelRunner") -> None:
        self.nodes: dict[str, int] = {}
        self.taken = 0
        self._runner = runner
        self._send = Sender(runner.device).send
        self._blocks: dict[str, list[list[int]]] = {}  # of each request, group by group
        self._drafted: dict[str, _Drafted] = {}  # until they are verified
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
        config, cache = self._runner.vllm_config, self._runner.kv_cache_config
        scratch = len(scratch_of(config, cache))
        if not scratch:
            return None
        sides = sides_of_request(config, block_sizes_of(cache), scratch, requests)
        return TreeRoom(nodes_of(config), rows, sides)

    def begins(self, output: "SchedulerOutput") -> None:
        """A step begins: requests come and go, and are given blocks."""
        self._step, self._is_tree, self.nodes = None, None, {}
        for req_id in output.finished_req_ids:
            self._blocks.pop(req_id, None)
            self._drafted.pop(req_id, None)
        for new in output.scheduled_new_reqs:  # those that were preempted, too
            self._blocks[new.req_id] = [list(blocks) for blocks in new.block_ids]
            self._drafted.pop(new.req_id, None)
        cached = output.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for own, more in zip(self._blocks[req_id], blocks or (), strict=False):
                own.extend(more)

    def handed_out(
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
                self._drafted[req_id] = _Drafted(rows, lengths[req_id] - 1)

    def plan(self, req_ids: Sequence[str], output: "SchedulerOutput") -> None:
        """Plan the step.

        Args:
            req_ids: Of its batch, in order.
            output: What it is made of.
        """
        runner = self._runner
        scheduled = [output.num_scheduled_tokens[req_id] for req_id in req_ids]
        sizes = block_sizes_of(runner.kv_cache_config)
        scratch = scratch_of(runner.vllm_config, runner.kv_cache_config)
        free, lent = runner.max_num_reqs - len(req_ids), len(scratch)
        trees: list[_Drafted | None] = []
        lengths = [len(output.scheduled_spec_decode_tokens.get(req_id, ())) for req_id in req_ids]
        for req_id, length, rows in zip(req_ids, lengths, scheduled, strict=True):
            tree = self._drafted.pop(req_id, None)
            if tree is not None and length and rows == 1 + length:
                tree, needed = _fitted(tree, length, free, lent, sizes)
                sides = len(tree.rows.counts) - 1
                free, lent = free - sides, lent - needed
                self.nodes[req_id] = len(tree.rows.parents) - tree.rows.parents.count(NO_NODE)
            trees.append(tree if tree is not None and needed else None)
        if not any(trees):
            return
        starts = [0 if tree is None else tree.start for tree in trees]
        counts = [
            [rows] if tree is None else tree.rows.counts
            for rows, tree in zip(scheduled, trees, strict=True)
        ]
        plans: list[SidePlan] = []
        for size in sizes:
            plans.append(plan_sides(starts, scheduled, counts, size, scratch))
            scratch = scratch[len(plans[-1].lines) :]
        self._step = _Step(req_ids, lengths, trees, plans)

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

    def expand(
        self, batch: "InputBatch", tables: Sequence[torch.Tensor], slots: torch.Tensor
    ) -> tuple["InputBatch", Sequence[torch.Tensor]]:
        """The batch and its block tables as attention is to see them, in the runner's buffers.

        Args:
            batch: Of a step; it keeps its own lengths, which sampling reads.
            tables: Of each group of the KV cache, lines of the requests.
            slots: int64 [groups, n], where each token's KV is written; those of sides are changed.
        """
        step, runner = self._step, self._runner
        if step is None or batch.req_ids != step.req_ids:
            return batch, tables
        plan, buffers = step.plans[0], runner.input_buffers
        size = len(plan.counts)
        padded = max(size, batch.num_reqs_after_padding)
        query_starts = np.full(padded + 1, batch.num_tokens, np.int32)
        query_starts[: size + 1] = plan.query_starts
        sent = self._send(
            query_starts,
            np.array([-1 if tree is None else tree.start for tree in step.trees]),
            plan.request_of,
            plan.counts,
            plan.rows,
            plan.request_of[np.searchsorted(plan.query_starts, plan.rows, "right") - 1],
            plan.depths,
            *(array for group in step.plans for array in (group.slots, group.lines)),
        )
        query_starts_there, planned, request_of, counts, rows, of_row, depths, *of_groups = sent
        batch.query_start_loc = batch.query_start_loc.clone()
        batch.seq_lens = batch.seq_lens.clone()
        starts = runner.req_states.num_computed_tokens.gpu[batch.idx_mapping]
        self._is_tree = starts == planned
        buffers.query_start_loc[: padded + 1] = query_starts_there
        buffers.seq_lens[:size] = starts[request_of] + counts
        buffers.seq_lens[size:] = 0
        buffers.positions[rows] = starts[of_row] + depths
        lines = runner.block_tables.input_block_tables
        for group, table in enumerate(lines):
            own_slots, changed = of_groups[2 * group : 2 * group + 2]
            sequence, column, block = changed.unbind(1)
            table[:size] = table[request_of]
            table[sequence, column] = block.to(table.dtype)
            slots[group, rows] = own_slots
        if hasattr(runner.block_tables, "_num_dirty_rows"):  # from 0.33 on
            runner.block_tables._num_dirty_rows = size
        self._copy(
            (self._blocks[step.req_ids[request]][group][column], block)
            for group, of_group in enumerate(step.plans)
            for request, column, block in of_group.tails
        )
        return self._shown(batch, plan, query_starts), [table[:padded] for table in lines]

    def _shown(self, batch: "InputBatch", plan: SidePlan, query_starts: np.ndarray) -> "InputBatch":
        """What the builders of attention metadata read of a batch, for all its sequences."""
        of, buffers, padded = plan.request_of, self._runner.input_buffers, len(query_starts) - 1
        longest = np.zeros(padded, np.int32)
        longest[: len(of)] = batch.num_computed_tokens_np[of] + plan.counts
        return replace(
            batch,
            num_reqs=len(of),
            num_reqs_after_padding=padded,
            query_start_loc=buffers.query_start_loc[: padded + 1],
            query_start_loc_np=query_starts,
            seq_lens=buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(longest),
            num_scheduled_tokens=plan.counts.astype(np.int32),
            is_prefilling_np=batch.is_prefilling_np[of],
            idx_mapping_np=batch.idx_mapping_np[of],
        )

    def bring_home(self, emitted: Mapping[str, Sequence[int]]) -> None:
        """Copy what walks along sides have computed over the requests' own blocks.

        Args:
            emitted: Target ids that each request of the step sampled.
        """
        step, self._step = self._step, None
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
            for plan, size, own in zip(step.plans, sizes, self._blocks[req_id], strict=True):
                found = plan.home(request, sequence, tree.start, depth, size)
                pairs.extend((block, own[column]) for column, block in found)
        self._copy(pairs)

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the KV cache, each (from, to)."""
        runner = self._runner
        blocks = [(int(source), int(target)) for source, target in pairs]
        copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, blocks)


def _fitted(
    tree: _Drafted, length: int, free: int, lent: int, sizes: Sequence[int]
) -> tuple[_Drafted, int]:
    """What of a tree can be verified, and the scratch blocks that it takes.

    Args:
        tree: As it was handed out.
        length: Rows that are scheduled for it.
        free: Sequences that are left.
        lent: Scratch blocks that are left.
        sizes: Of the blocks of each group.
    """
    sides = min(free, len(tree.rows.counts) - 1)
    while True:
        rows = tree.rows.fitted(length, sides)
        needed = sum(scratch_blocks(tree.start, rows.counts, size) for size in sizes)
        if needed <= lent:
            return _Drafted(rows, tree.start), needed
        sides -= 1
