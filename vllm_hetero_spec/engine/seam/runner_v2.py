# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2: what is read of it, its requests and its batch, and what of them is changed.

What a step sampled is on the device. vLLM's kernels have also written it to the requests' texts,
which lie in host memory: one small copy of counts and one wait bring all that a view needs.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from vllm_hetero_spec.engine.metrics.transport import leave_out
from vllm_hetero_spec.engine.seam.async_scheduling import AsyncStepInfo, buckets_of
from vllm_hetero_spec.engine.seam.cache_salt import salt_of
from vllm_hetero_spec.engine.seam.draft_inputs_v2 import DraftInputs
from vllm_hetero_spec.engine.seam.lora_rows_v2 import map_adapters_by_row
from vllm_hetero_spec.engine.seam.request_params import RequestParams, params_of
from vllm_hetero_spec.engine.seam.runner import DeviceClock, StepClock
from vllm_hetero_spec.engine.seam.sampled_step import ON_THEIR_WAY, SampledStep
from vllm_hetero_spec.engine.seam.step_view import BatchView, StepView
from vllm_hetero_spec.engine.trees import support
from vllm_hetero_spec.engine.trees.scratch import nodes_of
from vllm_hetero_spec.staging import Receiver
from vllm_hetero_spec.trees.layout import TreeRows

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_hetero_spec.engine.trees.attention_v2 import BranchSequencesV2

_Draw = TypeVar("_Draw", bound="Callable[..., Any]")


class RunnerV2:
    """vLLM's model runner of one worker, as the rest of the engine may see it.

    Args:
        runner: vLLM's, with its model loaded.

    Attributes:
        buckets: See `StepView`.
        staged: Whether other pipeline stages are told of the drafts, as soon as vLLM has them.
        ended: See `StepView`.
        inputs: Of the target, where drafts go.
    """

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._runner = runner
        self._new: dict[str, NewRequestData] = {}  # of all requests, as they came last
        self._params: dict[str, RequestParams] = {}
        self._preempted: set[str] = set()
        self._started: dict[str, str | None] = {}  # since the last view
        self._output: SchedulerOutput | None = None  # what the present step is made of
        self._drafted: dict[str, list[int]] = {}  # each request's newest draft
        self._verified: dict[str, int] = {}  # tokens of drafts that the present step verifies
        self.buckets = buckets_of(runner.vllm_config)
        self.staged = bool(runner.use_pp)
        self.ended: Collection[str] = ()
        self._longest = int(runner.speculative_config.hetero.num_speculative_tokens)
        self._branches: BranchSequencesV2 | None = None  # where drafts may be trees
        if nodes_of(runner.vllm_config):
            from vllm_hetero_spec.engine.trees import state_v2

            self._branches = state_v2.branches_of(runner)
        self._trees: Mapping[str, TreeRows] = {}  # of the drafts that will be handed out
        self._lengths: dict[str, int] = {}  # of the texts of the last view
        self._clock = StepClock()
        self._device_clock = DeviceClock(runner.device)  # with asynchronous scheduling
        size = 2 * 4 * runner.max_num_reqs
        self._counts = [Receiver(runner.device, size) for _ in range(ON_THEIR_WAY)]
        self.inputs = DraftInputs(runner)

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return torch.device(self._runner.device)

    @property
    def max_num_tokens(self) -> int:
        """Most tokens that the target computes in a step."""
        return int(self._runner.max_num_tokens)

    def begins(self, scheduler_output: "SchedulerOutput") -> bool:
        """A step begins, made of this; whether requests do with it."""
        self._output, new = scheduler_output, scheduler_output.scheduled_new_reqs
        for req_id in scheduler_output.preempted_req_ids or ():
            self._preempted.add(req_id)
            self._drafted.pop(req_id, None)
        for req_id in scheduler_output.finished_req_ids:
            for known in (self._new, self._started, self._params, self._drafted):
                known.pop(req_id, None)
            self._preempted.discard(req_id)
        for each in new:
            if each.req_id not in self._preempted:  # those come back as if they were new
                self._started[each.req_id] = salt_of(each)
            self._preempted.discard(each.req_id)
            self._new[each.req_id] = each
            for of in (self._params, self._drafted):  # it may come with places, which hold none
                of.pop(each.req_id, None)
        self._count_drafts()
        if self._branches is not None:
            self._branches.update_from(scheduler_output)
        return bool(new)

    def _count_drafts(self) -> None:
        """Of what the present step verifies: padding is none."""
        assert self._output is not None, "no step has begun"
        self._verified = {
            req_id: min(len(places), len(self._drafted.get(req_id, ())))
            for req_id, places in self._output.scheduled_spec_decode_tokens.items()
        }

    def plan_trees(self, batch: "BatchReqState") -> bool:
        """Plan what attention sees of the present step; whether that is more than its requests.

        Args:
            batch: The step's, as it is known on the host.
        """
        lengths = batch.num_draft_tokens_np
        if self._branches is None or lengths is None:
            return False
        self._branches.plan(batch.req_ids, batch.num_scheduled_tokens.tolist(), lengths.tolist())
        self._verified |= self._branches.nodes
        return self._branches.uneven

    def sampled(self, batch: "InputBatch", num_sampled: torch.Tensor) -> SampledStep:
        """Describe the step that has just been queued, and start to copy its counts.

        Args:
            batch: The step's.
            num_sampled: int32 [B] on the device, target tokens that each request sampled.
        """
        assert self._output is not None, "no step has begun"
        # Before the copy, so that the times are known when the counts have arrived.
        times = self._device_clock.ends() if self.buckets else None
        lengths = self._runner.req_states.total_len.gpu[batch.idx_mapping]
        self._counts.append(self._counts.pop(0))
        return SampledStep(
            req_ids=batch.req_ids,
            slots=batch.idx_mapping_np.copy(),
            came=[self._new.get(req_id) for req_id in batch.req_ids],
            counts=self._counts[0].fetch(torch.stack((num_sampled.int(), lengths))),
            output=self._output,
            verified=self._verified,
            times=times,
        )

    def commit_accepted_branch_kv(self, step: SampledStep) -> None:
        """Copy the KV of what a step sampled to where the requests have theirs: first of all."""
        if self._branches is None or not self._branches.uneven:
            return
        sampled, texts = self._texts(step)
        emitted = (text[len(text) - n :].tolist() for text, n in zip(texts, sampled, strict=True))
        self._branches.commit_accepted_branch_kv(dict(zip(step.req_ids, emitted, strict=True)))

    def _texts(self, step: SampledStep) -> tuple[list[int], list[np.ndarray]]:
        """How many tokens each request has sampled, and its text; waits for the device."""
        sampled, lengths = step.counts.wait().tolist()
        texts = self._runner.req_states.all_token_ids._uva_buf.np
        places = zip(step.slots.tolist(), lengths, strict=True)
        return sampled, [texts[slot, :length] for slot, length in places]

    def view(self, step: SampledStep, *, late: bool = False) -> StepView:
        """Build the view of a step. Waits until it has sampled.

        Args:
            step: The step.
            late: Later steps are queued. The view lacks requests that have ended or were preempted,
                because others may have their places, and its `started` is empty.
        """
        output = step.output
        sampled, texts = self._texts(step)
        times = self._clock.viewed(time.perf_counter()) if step.times is None else step.times()
        prompts = self._runner.req_states.prompt_len.np[step.slots].tolist()
        rows, requests = output.num_spec_tokens_to_schedule, []
        for index, (req_id, text) in enumerate(zip(step.req_ids, texts, strict=True)):
            if late and (req_id in self._preempted or not step.came_as(index, self._new)):
                continue
            new, params = self._new[req_id], self._params_of(req_id)
            requests.append(step.request(index, text, sampled[index], prompts[index], new, params))
        started: Mapping[str, str | None] = {}
        if not late:
            self._lengths = dict(zip(step.req_ids, map(len, texts), strict=True))
            started, self._started = self._started, {}
        return StepView(
            requests=requests,
            started=started,
            live=self._new.keys(),
            lookahead=min(rows, self._longest),
            max_model_len=self._runner.max_model_len,
            num_rows=output.total_num_scheduled_tokens,
            target_seconds=times.target,
            step_seconds=times.step,
            buckets=self.buckets,
            longest=self._longest if self.buckets else 0,
            trees=None if self._branches is None else self._branches.room(len(requests), rows),
            preempted=output.preempted_req_ids or (),
            ended=self.ended,
        )

    @property
    def without_drafts(self) -> bool | None:
        """Whether this step verified none and may have none made; None if not scheduled ahead."""
        assert self._output is not None, "no step has begun"
        drafts = self._verified or self._output.num_spec_tokens_to_schedule
        return not drafts if self.buckets else None

    def untimed(self) -> None:
        """What the present step takes is not known: it has no view, or comes behind a pause."""
        self._clock = StepClock()
        self._device_clock.idle()

    def expect_trees(self, trees: Mapping[str, TreeRows]) -> None:
        """See Runner."""
        chains = {req_id for req_id in trees if self._params_of(req_id).keeps_chain}
        self._trees = {req_id: trees[req_id] for req_id in trees.keys() - chains}

    def attach_to_output(self, output: object, lookahead: int) -> None:
        """See Runner."""
        if self._branches is not None:
            leave_out(output, self._branches.again)
        if not self.buckets or self._output is None:
            return
        padding = {
            req_id: count
            for req_id, places in self._output.scheduled_spec_decode_tokens.items()
            if (count := len(places) - self._verified[req_id])
        }
        AsyncStepInfo(lookahead, padding).put_on(output)

    def prepares_first(self, scheduler_output: "SchedulerOutput") -> bool:
        """Whether a step that begins can wait for its drafts until all else of it is prepared."""
        computes = scheduler_output.total_num_scheduled_tokens > 0
        alone = bool(self.buckets) and not self.staged and self._branches is None
        return computes and alone and self.inputs.may_follow

    def take_drafts(
        self, batch: "InputBatch", drafts: Sequence[list[int]], *, late: bool = False
    ) -> "DraftTokenIds":
        """Note a step's drafts; what the scheduler is to know.

        With pipeline stages that is all drafts there are: it asks when other requests have sampled.

        Args:
            batch: The step's.
            drafts: Target ids for each of its requests, at most as many as the longest draft.
            late: The next step has begun: who came or went with it has no draft.
        """
        from vllm.v1.outputs import DraftTokenIds

        others: set[str] = set()
        if late:
            assert self._output is not None, "no step has begun"
            others |= self._output.finished_req_ids | (self._output.preempted_req_ids or set())
            others |= {each.req_id for each in self._output.scheduled_new_reqs}
        pairs = zip(batch.req_ids, map(list, drafts), strict=True)
        self._drafted |= {req_id: draft for req_id, draft in pairs if req_id not in others}
        if self._branches is not None:
            handed_out = dict(zip(batch.req_ids, drafts, strict=True))
            self._branches.on_drafts_taken(handed_out, self._trees, self._lengths)
            self._trees = {}
        req_ids = list(self._drafted) if self.staged else batch.req_ids
        return DraftTokenIds(req_ids, [list(self._drafted.get(req_id, ())) for req_id in req_ids])

    def drafts_of_running_step(self) -> Mapping[str, Sequence[int]]:
        """By request, what was handed out behind the beginning of the step that verifies it."""
        self._count_drafts()
        return self._drafted

    def on_drafts_taken(self) -> None:
        """The step's drafts are out, and the target's next step begins."""
        self._clock.on_drafts_taken()
        self.forward_begins()

    def forward_begins(self) -> None:
        """All of a step is prepared: its forward is queued next."""
        self._device_clock.begins()

    def batch(self, batch: "InputBatch") -> BatchView:
        """The batch that tokens are being chosen for; its seeds and places are on the device."""
        if all(req_id in self._new for req_id in batch.req_ids):
            lengths = [self._verified.get(req_id, 0) for req_id in batch.req_ids]
            trees = None if self._branches is None else self._branches.view()
            asked = self._runner.sampler.logprob_token_ids_state
            named = asked.max_num_token_ids(batch.idx_mapping_np)
            return BatchView(batch.req_ids, lengths=lengths, trees=trees, named=named)
        rows = np.diff(batch.cu_num_logits_np) - 1  # but for the bonus token's
        return BatchView(batch.req_ids, lengths=rows.tolist())

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [n], where the token behind each position stands in its request's output.

        Args:
            slots: int64 [n], of the requests in the runner.
            positions: int64 [n], in their texts.
        """
        prompts: torch.Tensor = self._runner.req_states.prompt_len.gpu[slots]
        return positions + 1 - prompts

    def replace_rejection_sampler(
        self, make: "Callable[[Sampler, SpeculativeConfig, torch.device], RejectionSampler]"
    ) -> None:
        """Verify drafts by another sampler from now on."""
        runner = self._runner
        runner.rejection_sampler = make(runner.sampler, runner.speculative_config, runner.device)

    def replace_randomness(self, make: "Callable[[SamplingStates], _Draw]") -> _Draw:
        """Draw tokens by another function from now on, made for the parameters of all requests."""
        sampler = self._runner.sampler
        sampler._sample_random = made = make(sampler.sampling_states)
        return made

    def replace_drafts_handler(self, handler: Any) -> None:
        """Have the scheduler's questions for drafts answered by another from now on."""
        self._runner.draft_tokens_handler = handler

    def map_adapters_by_row(self) -> None:
        """Apply each request's LoRA adapter to all rows of its logits."""
        map_adapters_by_row(self._runner.lora_state, lambda: self._output)

    def check_trees(self) -> None:
        """See Runner."""
        if self._branches is not None:
            supported = support.agree(self._runner, self._branches, support.GRAPHS_V2)
            self._branches = self._branches if supported else None

    @torch.inference_mode()
    def target_forward(self, rows: int) -> None:
        """One forward of the target over made-up tokens, with the logits of all of them."""
        hidden, _ = self._runner._dummy_run(rows)
        self._runner.model.compute_logits(hidden[:rows])

    def _params_of(self, req_id: str) -> RequestParams:
        params = self._params.get(req_id)
        if params is None:
            # vLLM holds a seed for every request: its own, or one that it has made.
            runner, seeds = self._runner, self._runner.sampler.sampling_states.seeds.np
            seed = int(seeds[runner.req_states.req_id_to_index[req_id]])
            params = self._params[req_id] = params_of(self._new[req_id].sampling_params, seed)
        return params
