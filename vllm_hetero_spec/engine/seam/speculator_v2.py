# SPDX-License-Identifier: Apache-2.0
"""What Model Runner V2 holds as its speculator, and asks for drafts.

vLLM wants a tensor of drafts as soon as it has sampled, and lists when it schedules. Ours are begun
at the first question and finished at the second, of their true lengths. Where steps are scheduled
ahead there is no second question: they are begun where the next step begins, as a look at what was
sampled waits for it, and an engine core that waits does not hand out the tokens before; and they
are finished when all else of that step is prepared.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_hetero_spec.engine.seam.runner_v2 import RunnerV2
from vllm_hetero_spec.engine.seam.sampled_step import MOST_UNREAD, SampledStep

if TYPE_CHECKING:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_hetero_spec.engine.seam.worker_hooks import Proposer


class HeteroSpeculator(BaseSpeculator):
    """Hands V2's questions on to a proposer.

    Args:
        proposer: Who drafts.
    """

    supports_mm_inputs = False
    draft_logits = None  # what drafts were drawn from waits for the verifier, by request

    def __init__(self, proposer: "Proposer") -> None:
        self.proposer = proposer
        self._seam: RunnerV2 | None = None  # from `load` on
        # The last step and its batch, until it is looked at.
        self._sampled: tuple[InputBatch, SampledStep] | None = None
        self._unread: list[SampledStep] = []  # steps without drafts, in order
        self._batch: InputBatch | None = None  # whose drafts have not been asked for yet
        self._drafts: list[list[int]] = []
        self._handed: list[list[int]] = []  # the same on every rank
        self._drafts_taken: DraftTokenIds | None = None
        self._begun = False  # whether requests have, in the present step

    def load(self, runner: "GPUModelRunner") -> None:
        """Load the drafter beside a runner's model, and take our places in the runner."""
        self._seam = RunnerV2(runner)
        self.proposer.bind(self._seam)
        self._seam.replace_drafts_handler(self)
        self._seam.map_adapters_by_row()
        self._seam.inputs.before_forwards(self.fill)
        with DeviceMemoryProfiler() as taken:
            self.proposer.load_model(runner.get_model())
        runner.model_memory_usage += taken.consumed_memory  # which vLLM leaves room for

    @property
    def seam(self) -> RunnerV2:
        """The runner that drafts are made for."""
        assert self._seam is not None, "not loaded yet"
        return self._seam

    def init_cudagraph_manager(self, cudagraph_mode: "CUDAGraphMode") -> None:
        """See BaseSpeculator; the drafter's graphs are its own."""

    def capture(self) -> None:
        """See BaseSpeculator; the drafter's are recorded behind all of the target's."""

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
        """See BaseSpeculator: gives no drafts yet.

        Where vLLM sends them on to other pipeline stages, it is given all of them.

        Returns:
            int64 [B, K], of which else nothing is scheduled.
        """
        self._sampled = self._batch = None
        if dummy_run or not self.proposer.warm:
            return self.seam.inputs.nothing(input_batch)
        self._sampled = input_batch, self.seam.sampled(input_batch, num_sampled)
        if self.seam.staged or not self.seam.buckets:
            self._begin()
        self._look_back()
        if self.seam.staged and self._batch is not None:
            self.finish()
            return self.seam.inputs.of(input_batch)
        return self.seam.inputs.nothing(input_batch)

    def _begin(self) -> None:
        """Look at the last step, once it has sampled, and begin its drafts."""
        if self._sampled is None:
            return
        (batch, step), self._sampled = self._sampled, None
        self.seam.commit_accepted_branch_kv(step)
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
        """See DraftTokensHandler; there are none yet."""

    def begins(self, scheduler_output: "SchedulerOutput") -> None:
        """A step begins, of which the last step's drafts are a part."""
        if self._sampled is not None:
            goes_on = scheduler_output.num_scheduled_tokens.keys() & self._sampled[1].req_ids
            if not goes_on:  # and the engine may have had nothing to do for long
                self.seam.untimed()
        self.seam.ended = scheduler_output.finished_req_ids
        self._begin()
        if not self.seam.prepares_first(scheduler_output):
            self.finish()
        self._begun = self.seam.begins(scheduler_output)

    def fill(self, batch: "InputBatch") -> None:
        """All of a step is prepared but for its drafts, if they are still being made."""
        if self._batch is not None:
            fill = self.seam.inputs.filling(batch)
            self._take_drafts(late=True)
            fill(self.seam.drafts_of_running_step())
        self.seam.forward_begins()

    def finish(self) -> None:
        """Finish the drafts of the last step, if nobody has: the next one begins, or wants them."""
        self._begin()
        batch = self._take_drafts()
        # Padding is computed, and has to be tokens that exist.
        if batch is not None and (any(self._handed) or self.seam.buckets):
            self.seam.inputs.put(batch, self._handed)

    def _take_drafts(self, *, late: bool = False) -> "InputBatch | None":
        """Finish the drafts that were begun, if any; of which batch they are."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.proposer.finish()
            self._handed = self._agreed()
            self._drafts_taken = self.seam.take_drafts(batch, self._handed, late=late)
        return batch

    def _agreed(self) -> list[list[int]]:
        """The drafts of the first rank, on all ranks: each puts them into its own runner."""
        group = get_tp_group()
        if group.world_size == 1:
            return self._drafts
        agreed: list[list[int]] = group.broadcast_object(self._drafts, src=0)
        return agreed

    def get_draft_tokens(self) -> "DraftTokenIds | None":
        """See DraftTokensHandler."""
        self.finish()
        handed_out = self._drafts_taken
        if not self.seam.staged:
            self._drafts_taken = None
        return handed_out
