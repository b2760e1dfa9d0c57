# SPDX-License-Identifier: Apache-2.0
"""Draft trees on Model Runner V2: add branches to the batch from which attention metadata is built.

V2 passes its batch to the model state, which builds the metadata.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.trees.branches import BranchSequences
from vllm_hetero_spec.engine.trees.scratch import nodes_of
from vllm_hetero_spec.trees.layout import BranchPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = logging.getLogger("vllm.hetero_spec")


class BranchSequencesV2(BranchSequences):
    """Branch sequences of one worker of Model Runner V2."""

    graphs = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)

    def __init__(self, runner: "GPUModelRunner") -> None:
        super().__init__(runner)
        # Block ids of each request by KV cache group; V2 has block tables on the device only.
        self._blocks: dict[str, list[list[int]]] = {}

    def own_block(self, request: int, group: int, column: int) -> int:
        assert self._step is not None
        return self._blocks[self._step.req_ids[request]][group][column]

    def on_step_start(self, output: "SchedulerOutput") -> None:
        super().on_step_start(output)
        for req_id in output.finished_req_ids:
            self._blocks.pop(req_id, None)
            self._drafted.pop(req_id, None)
        for new in output.scheduled_new_reqs:  # including resumed ones
            self._blocks[new.req_id] = [list(blocks) for blocks in new.block_ids]
            self._drafted.pop(new.req_id, None)
        cached = output.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for own, more in zip(self._blocks[req_id], blocks or (), strict=False):
                own.extend(more)

    def expand(
        self, batch: "InputBatch", tables: Sequence[torch.Tensor], slots: torch.Tensor
    ) -> tuple["InputBatch", Sequence[torch.Tensor]]:
        """Return the batch and its block tables with branches, in the runner's buffers.

        Args:
            batch: The step's batch; it gets copies of its own lengths, which sampling reads.
            tables: Block table of each KV cache group, one row per request.
            slots: int64 [groups, n], slot mapping; the slots of branch rows are changed.
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
        if hasattr(runner.block_tables, "_num_dirty_rows"):  # vLLM 0.33 or newer
            runner.block_tables._num_dirty_rows = size
        self.laid_out(starts == planned)
        return self._shown(batch, plan, query_starts), [table[:padded] for table in lines]

    def _shown(
        self, batch: "InputBatch", plan: BranchPlan, query_starts: np.ndarray
    ) -> "InputBatch":
        """Return a batch with all sequences, in the fields that metadata builders read."""
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


class TreeModelState(DefaultModelState):
    """State of a target whose drafts may be trees."""

    branches: BranchSequencesV2 | None = None  # set by `trees_of`

    def prepare_attn(
        self,
        input_batch: "InputBatch",
        cudagraph_mode: CUDAGraphMode,
        block_tables: Sequence[torch.Tensor],
        slot_mappings: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if self.branches is not None:
            input_batch, block_tables = self.branches.expand(
                input_batch, block_tables, slot_mappings
            )
        metadata: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, *args, **kwargs
        )
        return metadata


def trees_of(runner: "GPUModelRunner") -> BranchSequencesV2 | None:
    """Create a runner's draft trees; return None, and log why if its target supports none."""
    if not nodes_of(runner.vllm_config):
        return None
    state = runner.model_state
    if not isinstance(state, TreeModelState):
        logger.warning("Draft trees disabled: %s prepares attention.", type(state).__name__)
        return None
    state.branches = BranchSequencesV2(runner)
    return state.branches


def install() -> None:
    """Patch the model states of this process. Idempotent; no effect without trees."""
    import vllm.v1.worker.gpu.model_states as states

    patching.wrap(states, "resolve_model_state_cls", "trees", _resolve)


def _resolve(original: patching.Function, config: "VllmConfig", model: torch.nn.Module) -> type:
    found: type = original(config, model)
    return TreeModelState if found is DefaultModelState and nodes_of(config) else found
