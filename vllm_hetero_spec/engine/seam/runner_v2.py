# SPDX-License-Identifier: Apache-2.0
"""Access to Model Runner V2: views of its requests and batch, and changes to them.

Sampled tokens are on the device. vLLM's kernels also write them to the requests' token ids in host
memory. One small copy of counts and one wait are therefore enough for a view.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from vllm_hetero_spec.engine.seam.async_scheduling import AsyncStepInfo, buckets_of
from vllm_hetero_spec.engine.seam.cache_salt import salt_of
from vllm_hetero_spec.engine.seam.draft_inputs_v2 import DraftInputs
from vllm_hetero_spec.engine.seam.request_params import RequestParams, params_of
from vllm_hetero_spec.engine.seam.runner import DeviceClock, Runner
from vllm_hetero_spec.engine.seam.sampled_step import ON_THEIR_WAY, SampledStep
from vllm_hetero_spec.engine.seam.step_view import BatchView, RequestView, StepView, media_of
from vllm_hetero_spec.engine.seam.tree_adapter import TreeAdapter
from vllm_hetero_spec.staging import Receiver

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
    from vllm.v1.worker.gpu.sample.states import SamplingStates

_Draw = TypeVar("_Draw", bound="Callable[..., Any]")


class RunnerV2(Runner):
    """`Runner` with Model Runner V2.

    Attributes:
        buckets: `StepView.buckets`.
        staged: True if vLLM sends the drafts to other pipeline stages right after `propose`.
        ended: `StepView.ended`.
        inputs: The target's inputs, to which drafts are written.
    """

    def __init__(self, runner: "GPUModelRunner", trees: TreeAdapter | None = None) -> None:
        super().__init__(runner, trees)
        self._new: dict[str, NewRequestData] = {}  # newest data of all live requests
        self._params: dict[str, RequestParams] = {}
        self._preempted: set[str] = set()
        self._started: dict[str, str | None] = {}  # cache salts of requests since the last view
        self._output: SchedulerOutput | None = None  # of the present step
        self._drafted: dict[str, list[int]] = {}  # newest draft of each request
        self._verified: dict[str, int] = {}  # draft tokens verified in the present step
        self.buckets = buckets_of(runner.vllm_config)
        self.staged = bool(runner.use_pp)
        self.ended: Collection[str] = ()
        self._lengths: dict[str, int] = {}  # tokens by request, in the last view
        self._written: dict[str, int] = {}  # output tokens by request, in the last view
        self._places: dict[str, int] = {}  # output tokens before each request's newest draft
        self._device_clock = DeviceClock(runner.device)  # with asynchronous scheduling
        size = 2 * 4 * runner.max_num_reqs
        self._counts = [Receiver(runner.device, size) for _ in range(ON_THEIR_WAY)]
        self.inputs = DraftInputs(runner)

    def on_step_start(self, scheduler_output: "SchedulerOutput") -> bool:
        """Begin a step. Return True if new requests begin in it."""
        self._output, new = scheduler_output, scheduler_output.scheduled_new_reqs
        for req_id in scheduler_output.preempted_req_ids or ():
            self._preempted.add(req_id)
            for of_draft in (self._drafted, self._places):
                of_draft.pop(req_id, None)
        for req_id in scheduler_output.finished_req_ids:
            for known in (self._new, self._started, self._params, self._drafted, self._places):
                known.pop(req_id, None)
            self._preempted.discard(req_id)
        for each in new:
            if each.req_id not in self._preempted:  # a preempted request comes back as a new one
                self._started[each.req_id] = salt_of(each)
            self._preempted.discard(each.req_id)
            self._new[each.req_id] = each
            # vLLM may schedule draft positions for a new request, which are padding.
            for of in (self._params, self._drafted, self._places):
                of.pop(each.req_id, None)
        self._count_drafts()
        if self.trees is not None:
            self.trees.on_step_start(scheduler_output)
        return bool(new)

    def _count_drafts(self) -> None:
        """Count the draft tokens that the present step verifies, without padding."""
        assert self._output is not None, "no step has begun"
        self._verified = {
            req_id: min(len(places), len(self._drafted.get(req_id, ())))
            for req_id, places in self._output.scheduled_spec_decode_tokens.items()
        }

    def plan_trees(self, batch: "BatchReqState") -> bool:
        """Plan the step's trees. Return True if attention gets more sequences than requests."""
        lengths = batch.num_draft_tokens_np
        if self.trees is None or lengths is None:
            return False
        self.trees.before_forward(
            batch.req_ids, batch.num_scheduled_tokens.tolist(), lengths.tolist()
        )
        self._verified |= self.trees.nodes
        return self.trees.uneven

    def sampled(self, batch: "InputBatch", num_sampled: torch.Tensor) -> SampledStep:
        """Describe the step that has just been queued, and start to copy its counts to the host.

        `num_sampled` int32 [B] on the device is the number of tokens that each request sampled.
        """
        assert self._output is not None, "no step has begun"
        # Mark the time before the copy, so that it is known when the counts have arrived.
        times = self._device_clock.ends() if self.buckets else None
        lengths = self._runner.req_states.total_len.gpu
        self._counts.append(self._counts.pop(0))
        return SampledStep(
            req_ids=batch.req_ids,
            slots=batch.idx_mapping_np.copy(),
            came=[self._new.get(req_id) for req_id in batch.req_ids],
            counts=self._counts[0].fetch(torch.cat((num_sampled.int(), lengths))),
            output=self._output,
            verified=self._verified,
            times=times,
        )

    def after_sampling(self, step: SampledStep) -> None:
        """Let draft trees commit their KV, before the next forward. Waits for the device."""
        if self.trees is None or not self.trees.uneven:
            return
        sampled, texts = self._texts(step)
        emitted = (text[len(text) - n :].tolist() for text, n in zip(texts, sampled, strict=True))
        self.trees.after_sampling(dict(zip(step.req_ids, emitted, strict=True)))

    def _texts(self, step: SampledStep) -> tuple[list[int], list[np.ndarray]]:
        """Return each request's number of sampled tokens and token ids. Waits for the device."""
        sampled, lengths = np.split(step.counts.wait(), [len(step.slots)])
        texts = self._runner.req_states.all_token_ids._uva_buf.np
        places = zip(step.slots.tolist(), lengths[step.slots].tolist(), strict=True)
        return sampled.tolist(), [texts[slot, :length] for slot, length in places]

    def view(self, step: SampledStep, *, late: bool = False) -> StepView:
        """Build the view of a step. Waits until it has sampled.

        With `late`, later steps are queued. The view then lacks requests that have ended or were
        preempted, because other requests may have their slots. `started` is empty.
        """
        output = step.output
        sampled, texts = self._texts(step)
        prompts = self._runner.req_states.prompt_len.np[step.slots].tolist()
        if not late:
            self._lengths = dict(zip(step.req_ids, map(len, texts), strict=True))
            written = (len(text) - prompt for text, prompt in zip(texts, prompts, strict=True))
            self._written = dict(zip(step.req_ids, written, strict=True))
        times = self._clock.viewed() if step.times is None else step.times()
        rows, requests = output.num_spec_tokens_to_schedule, []
        for index, (req_id, text) in enumerate(zip(step.req_ids, texts, strict=True)):
            if late and (req_id in self._preempted or not step.came_as(index, self._new)):
                continue
            new, verified = self._new[req_id], step.verified.get(req_id, 0)
            places = output.scheduled_spec_decode_tokens.get(req_id, ())
            requests.append(
                RequestView(
                    req_id,
                    self._params_of(req_id),
                    text,
                    prompts[index],
                    text[len(text) - sampled[index] :].tolist(),
                    num_drafted=verified,
                    num_padding=len(places) - verified,
                    has_text=new.prompt_embeds is None,
                    media=media_of(new.mm_features),
                )
            )
        started: Mapping[str, str | None] = {}
        if not late:
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
            trees=None if self.trees is None else self.trees.room(len(requests), rows),
            preempted=output.preempted_req_ids or (),
            ended=self.ended,
        )

    @property
    def without_drafts(self) -> bool | None:
        """True if the step has no drafts, before or after it; None if steps are synchronous."""
        assert self._output is not None, "no step has begun"
        drafts = self._verified or self._output.num_spec_tokens_to_schedule
        return not drafts if self.buckets else None

    def untimed(self) -> None:
        super().untimed()
        self._device_clock.idle()

    def attach_to_output(self, output: object, lookahead: int) -> None:
        super().attach_to_output(output, lookahead)
        if not self.buckets or self._output is None:
            return
        padding = {
            req_id: count
            for req_id, places in self._output.scheduled_spec_decode_tokens.items()
            if (count := len(places) - self._verified[req_id])
        }
        AsyncStepInfo(lookahead, padding).put_on(output)

    def prepares_first(self, scheduler_output: "SchedulerOutput") -> bool:
        """Return True if vLLM can prepare the step's other inputs before its drafts are ready."""
        computes = scheduler_output.total_num_scheduled_tokens > 0
        return computes and self.fills and self.inputs.may_follow

    @property
    def fills(self) -> bool:
        """True if drafts may be written into inputs that vLLM has prepared."""
        return bool(self.buckets) and not self.staged and self.trees is None

    def take_drafts(
        self, batch: "InputBatch", drafts: Sequence[list[int]], *, late: bool = False
    ) -> "DraftTokenIds":
        """Store a step's drafts, target ids for each request, and return them for the scheduler.

        With pipeline stages, the result has the drafts of all requests, because the scheduler calls
        this when other requests have sampled. With `late`, the next step has begun. Requests that
        began, ended or were preempted in it get no draft.
        """
        from vllm.v1.outputs import DraftTokenIds

        others: set[str] = set()
        if late:
            assert self._output is not None, "no step has begun"
            others |= self._output.finished_req_ids | (self._output.preempted_req_ids or set())
            others |= {each.req_id for each in self._output.scheduled_new_reqs}
        pairs = zip(batch.req_ids, map(list, drafts), strict=True)
        self._drafted |= {req_id: draft for req_id, draft in pairs if req_id not in others}
        self._places |= {of: self._written.get(of, 0) for of in batch.req_ids if of not in others}
        if self.trees is not None:
            handed_out = dict(zip(batch.req_ids, drafts, strict=True))
            self.trees.on_drafts_taken(handed_out, self._lengths)
        req_ids = list(self._drafted) if self.staged else batch.req_ids
        return DraftTokenIds(req_ids, [list(self._drafted.get(req_id, ())) for req_id in req_ids])

    def drafts_of_running_step(self) -> Mapping[str, Sequence[int]]:
        """Return the drafts by request, and count those that the running step verifies."""
        if self._output is not None:  # start-up timing runs no step
            self._count_drafts()
        return self._drafted

    def on_drafts_taken(self) -> None:
        self._clock.on_drafts_taken()
        self.forward_begins()

    def forward_begins(self) -> None:
        """Mark the start of a step, because its forward is queued next."""
        self._device_clock.start()

    def batch(self, batch: "InputBatch") -> BatchView:
        """Return the batch for which tokens are being sampled; its seeds are in the runner.

        The text of a request does not grow between its draft and the verification.
        """
        req_ids, first_rows = batch.req_ids, batch.cu_num_logits_np
        if any(req_id not in self._new for req_id in req_ids):
            rows = np.diff(first_rows) - 1  # without the bonus token's
            places = [0] * len(rows)
            return BatchView(req_ids, (), places, rows.tolist(), first_rows=first_rows)
        asked = self._runner.sampler.logprob_token_ids_state
        return BatchView(
            req_ids,
            num_output_tokens=[self._places.get(req_id, 0) for req_id in req_ids],
            lengths=[self._verified.get(req_id, 0) for req_id in req_ids],
            trees=None if self.trees is None else self.trees.view(),
            named=asked.max_num_token_ids(batch.idx_mapping_np),
            first_rows=first_rows,
        )

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return int64 [n], the index in its request's output of the token after each position.

        `slots` int64 [n] are requests, and `positions` int64 [n] include the prompt.
        """
        prompts: torch.Tensor = self._runner.req_states.prompt_len.gpu[slots]
        return positions + 1 - prompts

    def replace_randomness(self, make: "Callable[[SamplingStates], _Draw]") -> _Draw:
        """Replace the sampler's random draw by `make(sampling_states)`, and return it."""
        sampler = self._runner.sampler
        sampler._sample_random = made = make(sampler.sampling_states)
        return made

    def replace_drafts_handler(self, handler: Any) -> None:
        """Replace the object from which vLLM gets the drafts of a step."""
        self._runner.draft_tokens_handler = handler

    def map_adapters_by_row(self) -> None:
        """Apply each request's LoRA adapter to all rows of its logits.

        vLLM lists one adapter per request, which is wrong for requests with drafts.
        """
        state = self._runner.lora_state
        by_request = state.make_lora_inputs

        def make_lora_inputs(req_ids: Sequence[str], *args: Any) -> tuple[Any, ...]:
            assert self._output is not None, "no step has begun"
            adapters, *rest = by_request(req_ids, *args)
            drafts = self._output.scheduled_spec_decode_tokens
            rows = [1 + len(drafts.get(req_id, ())) for req_id in req_ids]
            return (tuple(np.repeat(adapters, rows)), *rest)

        state.make_lora_inputs = make_lora_inputs

    def _params_of(self, req_id: str) -> RequestParams:
        params = self._params.get(req_id)
        if params is None:
            # vLLM has a seed for every request: the request's own or a random one.
            runner, seeds = self._runner, self._runner.sampler.sampling_states.seeds.np
            seed = int(seeds[runner.req_states.req_id_to_index[req_id]])
            params = self._params[req_id] = params_of(self._new[req_id].sampling_params, seed)
        return params
