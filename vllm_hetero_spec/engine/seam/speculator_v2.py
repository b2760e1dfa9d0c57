# SPDX-License-Identifier: Apache-2.0
"""Speculator of Model Runner V2, which calls the proposer.

Calls of a step, in their order:

| called | synchronous scheduling | asynchronous scheduling |
|---|---|---|
| `on_step_start`, before vLLM prepares inputs | | begins the last step's drafts |
| `fill`, after vLLM has prepared inputs | | finishes them, and puts them into the inputs |
| `propose`, after sampling | begins the step's drafts | notes the step |
| `get_draft_tokens`, when vLLM schedules | finishes them | (not called) |

With asynchronous scheduling, drafts begin late because reading the sampled tokens waits for the
device, and would delay their output. If vLLM cannot prepare the other inputs first
(`RunnerV2.prepares_first`), as with draft trees, `on_step_start` also finishes the drafts.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_hetero_spec.engine.seam.runner_v2 import RunnerV2
from vllm_hetero_spec.engine.seam.sampled_step import MOST_UNREAD, SampledStep
from vllm_hetero_spec.engine.seam.tree_adapter import TreeAdapter

if TYPE_CHECKING:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_hetero_spec.engine.seam.worker_hooks import Proposer


class HeteroSpeculator(BaseSpeculator):
    """Implements vLLM's speculator and draft tokens handler with a proposer."""

    supports_mm_inputs = False
    draft_logits = None  # `PendingDraftProbs` holds our draft_probs

    def __init__(self, proposer: "Proposer") -> None:
        self.proposer = proposer
        self._seam: RunnerV2 | None = None  # set by `load`
        # The last step and its batch, until `_begin` reads or skips it.
        self._sampled: tuple[InputBatch, SampledStep] | None = None
        self._unread: list[SampledStep] = []  # skipped steps without drafts, in order
        self._batch: InputBatch | None = None  # batch of the drafts in progress
        self._drafts: list[list[int]] = []
        self._handed: list[list[int]] = []  # the same on every rank
        self._drafts_taken: DraftTokenIds | None = None
        self._begun = False  # True if new requests began in the present step

    def load(self, runner: "GPUModelRunner", trees: TreeAdapter | None = None) -> None:
        """Load the drafter next to the runner's model, and install our parts in the runner."""
        self._seam = RunnerV2(runner, trees)
        self.proposer.bind(self._seam)
        self._seam.replace_drafts_handler(self)
        self._seam.map_adapters_by_row()
        self._seam.inputs.before_forwards(self.fill)
        with DeviceMemoryProfiler() as taken:
            self.proposer.load_model(runner.get_model())
        runner.model_memory_usage += taken.consumed_memory  # vLLM reserves it

    @property
    def seam(self) -> RunnerV2:
        """Model runner for which drafts are made."""
        assert self._seam is not None, "not loaded yet"
        return self._seam

    def init_cudagraph_manager(self, cudagraph_mode: "CUDAGraphMode") -> None:
        """Do nothing, because the drafter manages its own graphs."""

    def capture(self) -> None:
        """Do nothing, because the drafter's graphs are captured after all of the target's."""

    def propose(
        self,
        input_batch: "InputBatch",
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Begin the drafts, or note the step with asynchronous scheduling. Return zeros [B, K].

        The result is int64. With pipeline stages it contains the finished drafts, which vLLM sends
        to the other stages.
        """
        self._sampled = self._batch = None
        scheduled: int | None = kwargs.get("num_speculative_tokens")
        if dummy_run or not self.proposer.warm:
            return self.seam.inputs.nothing(input_batch, scheduled)
        self._sampled = input_batch, self.seam.sampled(input_batch, num_sampled)
        if self.seam.staged or not self.seam.buckets:
            self._begin()
        self._look_back()
        if self.seam.staged and self._batch is not None:
            self.finish()
            return self.seam.inputs.of(input_batch)
        return self.seam.inputs.nothing(input_batch, scheduled)

    def _begin(self) -> None:
        """Read or skip the last step. Reading waits for the device, and begins the drafts."""
        if self._sampled is None:
            return
        (batch, step), self._sampled = self._sampled, None
        self.seam.after_sampling(step)
        if self.proposer.skip_step(batch.num_reqs, self.seam.without_drafts, self._begun):
            if self.seam.buckets:
                self._unread = [*self._unread, step][-MOST_UNREAD:]
            else:
                self.seam.untimed()
        else:
            self._unread = []
            self._drafts = self.proposer.after_step(partial(self.seam.view, step), batch.num_reqs)
            self._batch = batch

    def _look_back(self) -> None:
        """Read the newest skipped step that has ended. Older ones are never read."""
        ended = [step for step in self._unread if step.counts.there]
        if ended:
            step = ended[-1]
            self._unread = self._unread[self._unread.index(step) + 1 :]
            # If the newest step is over, the device may be waiting for the host.
            view = partial(self.seam.view, step, late=True)
            self.proposer.look_back(view, len(step.req_ids), hurried=not self._unread)

    def set_draft_tokens(self, input_batch: "InputBatch", draft_tokens: torch.Tensor) -> None:
        """Do nothing, because there are no drafts yet."""

    def on_step_start(self, scheduler_output: "SchedulerOutput") -> None:
        """Begin a step. Finish the last step's drafts, unless `fill` can do so later."""
        if self._sampled is not None:
            goes_on = scheduler_output.num_scheduled_tokens.keys() & self._sampled[1].req_ids
            if not goes_on:  # the engine may have been idle
                self.seam.untimed()
        preempted = scheduler_output.preempted_req_ids or set()
        self.seam.ended = scheduler_output.finished_req_ids | preempted
        self._begin()
        if not self.seam.prepares_first(scheduler_output):
            self.finish()
        self._begun = self.seam.on_step_start(scheduler_output)

    def fill(self, batch: "InputBatch") -> None:
        """Fill in a step's drafts. vLLM has prepared the step's other inputs.

        They are in progress, or were finished in an earlier step without their request.
        """
        if self._batch is not None or self.seam.fills:
            fill = self.seam.inputs.filling(batch)
            self._take_drafts(late=True)
            fill(self.seam.drafts_of_running_step())
        self.seam.forward_begins()

    def finish(self) -> None:
        """Finish the last step's drafts and write them to the request states. Idempotent."""
        self._begin()
        batch = self._take_drafts()
        # The target computes padding, too, so padding must be valid token ids.
        if batch is not None and (any(self._handed) or self.seam.buckets):
            self.seam.inputs.put(batch, self._handed)

    def _take_drafts(self, *, late: bool = False) -> "InputBatch | None":
        """Finish drafts in progress, and return their batch; None without any."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.proposer.finish()
            self._handed = self._agreed()
            self._drafts_taken = self.seam.take_drafts(batch, self._handed, late=late)
        return batch

    def _agreed(self) -> list[list[int]]:
        """Return the first rank's drafts on all ranks, because each rank writes them itself."""
        group = get_tp_group()
        if group.world_size == 1:
            return self._drafts
        agreed: list[list[int]] = group.broadcast_object(self._drafts, src=0)
        return agreed

    def get_draft_tokens(self) -> "DraftTokenIds | None":
        self.finish()
        handed_out = self._drafts_taken
        if not self.seam.staged:
            self._drafts_taken = None
        return handed_out
