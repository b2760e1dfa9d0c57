# SPDX-License-Identifier: Apache-2.0
"""Draft trees on Model Runner V1: add branches to the attention metadata.

V1 builds attention metadata from its own buffers. During this, they are replaced by buffers that
also contain the branches.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.trees.branches import BranchSequences
from vllm_hetero_spec.engine.trees.scratch import nodes_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class BranchSequencesV1(BranchSequences):
    """Branch sequences of one worker of Model Runner V1."""

    graphs = (CUDAGraphMode.PIECEWISE,)

    def __init__(self, runner: "GPUModelRunner") -> None:
        super().__init__(runner)
        # What replaces an attribute of an object: (object, attribute, buffer).
        self._shown: list[tuple[Any, str, Any]] = []
        self._sizes: dict[str, int] = {}

    def own_block(self, request: int, group: int, column: int) -> int:
        table = self._runner.input_batch.block_table[group].block_table.np
        return int(table[request, column])

    def plan_step(self, output: "SchedulerOutput", scheduled: np.ndarray) -> None:
        """Plan the trees of a step, before the runner prepares its inputs."""
        assert not self.uneven, "accepted branch KV of the previous step was not committed"
        self.on_step_start(output)
        batch, drafted = self._runner.input_batch, output.scheduled_spec_decode_tokens
        for req_id in self._drafted.keys() - self._runner.requests.keys():
            del self._drafted[req_id]
        drafts = [drafted.get(req_id, []) for req_id in batch.req_ids]
        for req_id, draft, start in zip(
            batch.req_ids, drafts, batch.num_computed_tokens_cpu, strict=False
        ):
            tree = self._drafted.get(req_id)
            if tree is not None and (
                tree.start != start or tree.rows.tokens[: len(draft)] != draft
            ):
                del self._drafted[req_id]  # not the draft to verify, or not the tokens with KV
        self.before_forward(
            list(batch.req_ids), scheduled.tolist(), [len(draft) for draft in drafts]
        )

    def lay_out(self) -> None:
        """Add the branches to the step's inputs, after the runner has prepared them."""
        step, runner = self._step, self._runner
        if step is None:
            return
        plan, count = step.plans[0], len(step.plans)
        tables = [runner.input_batch.block_table[group] for group in range(count)]
        starts = runner.input_batch.num_computed_tokens_cpu[: len(step.req_ids)].astype(np.int64)
        of_row = plan.request_of[np.searchsorted(plan.query_starts, plan.rows, "right") - 1]
        query_starts = plan.query_starts.astype(np.int32)
        lengths = (starts[plan.request_of] + plan.counts).astype(np.int32)
        lines = [table.block_table.np[plan.request_of] for table in tables]
        for line, of_group in zip(lines, step.plans, strict=True):
            line[of_group.lines[:, 0], of_group.lines[:, 1]] = of_group.lines[:, 2]
        is_tree, starts_there, lengths_there, rows, positions, *of_groups = self._send(
            np.array([tree is not None for tree in step.trees]),
            query_starts,
            lengths,
            plan.rows,
            starts[of_row] + plan.depths,
            *(of_group.slots for of_group in step.plans),
            *lines,
        )
        runner.positions[rows] = positions
        starts_of_all = SimpleNamespace(cpu=torch.from_numpy(query_starts), gpu=starts_there)
        self._shown = [
            (runner, "query_start_loc", starts_of_all),
            (runner, "seq_lens", lengths_there),
            (runner, "optimistic_seq_lens_cpu", torch.from_numpy(lengths)),
        ]
        for table, slots, line in zip(tables, of_groups[:count], of_groups[count:], strict=True):
            table.slot_mapping.gpu[rows] = slots
            self._shown.append((table, "block_table", SimpleNamespace(gpu=line)))
        self._sizes = {"num_reqs": len(lengths), "max_query_len": int(plan.counts.max())}
        self.laid_out(is_tree)

    @contextlib.contextmanager
    def shown(self) -> Iterator[dict[str, int]]:
        """Replace the runner's buffers while it builds attention metadata.

        Yields:
            Changed keyword arguments of `_build_attention_metadata`.
        """
        assert self._shown, "no branch was laid out"
        with contextlib.ExitStack() as own:
            for owner, name, buffer in self._shown:
                own.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, buffer)
            yield self._sizes


def trees_of(runner: "GPUModelRunner") -> BranchSequencesV1 | None:
    """Create a runner's draft trees; return None if its drafts are chains."""
    if not nodes_of(runner.vllm_config):
        return None
    # vLLM captures full CUDA graphs for the rows of chains, not for the rows of trees.
    longest = int(runner.speculative_config.hetero.num_speculative_tokens)
    for planner in (runner, runner.cudagraph_dispatcher):
        planner.uniform_decode_query_len = 1 + longest
    return BranchSequencesV1(runner)


def install(bound_to: Any) -> None:
    """Patch the model runners of this process. Idempotent; no effect without trees."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def inputs(
        original: patching.Function,
        self: Any,
        scheduler_output: "SchedulerOutput",
        num_scheduled_tokens: np.ndarray,
    ) -> Any:
        branches: BranchSequencesV1 | None = bound_to(self)
        if branches is None:
            return original(self, scheduler_output, num_scheduled_tokens)
        branches.plan_step(scheduler_output, num_scheduled_tokens)
        made = original(self, scheduler_output, num_scheduled_tokens)
        branches.lay_out()
        return made

    def graph(original: patching.Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        branches: BranchSequencesV1 | None = bound_to(self)
        if branches is None or not branches.uneven:
            return original(self, *args, **kwargs)
        found = original(self, *args, **(kwargs | {"force_uniform_decode": False}))
        if found[0] == CUDAGraphMode.FULL:  # captured for one sequence per request
            found = original(self, *args, **(kwargs | {"force_eager": True}))
        return found

    def metadata(original: patching.Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        branches: BranchSequencesV1 | None = bound_to(self)
        if branches is None or not branches.uneven:
            return original(self, *args, **kwargs)
        with branches.shown() as others:
            return original(self, *args, **(kwargs | others))

    patching.wrap(GPUModelRunner, "_prepare_inputs", "trees", inputs)
    patching.wrap(GPUModelRunner, "_determine_batch_execution_and_padding", "trees", graph)
    patching.wrap(GPUModelRunner, "_build_attention_metadata", "trees", metadata)
