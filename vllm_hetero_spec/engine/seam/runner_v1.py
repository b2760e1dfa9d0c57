# SPDX-License-Identifier: Apache-2.0
"""Access to Model Runner V1: views of its batch, and changes to its samplers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.seam.cache_salt import salt_of
from vllm_hetero_spec.engine.seam.request_params import RequestParams, params_of
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.engine.seam.step_view import BatchView, RequestView, StepView, media_of
from vllm_hetero_spec.engine.seam.tree_adapter import TreeAdapter

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


_Module = TypeVar("_Module", bound=torch.nn.Module)


class RunnerV1(Runner):
    def __init__(self, runner: "GPUModelRunner", trees: TreeAdapter | None = None) -> None:
        super().__init__(runner, trees)
        self._params: dict[str, tuple[SamplingParams | None, RequestParams]] = {}
        self._made_seeds = np.random.default_rng(runner.model_config.seed)
        self._lengths: dict[str, int] = {}  # tokens by request, in the last view
        # vLLM disables drafts of the whole batch if one request nears this length. Our drafter has
        # a limit for each request instead.
        rows = runner.speculative_config.num_speculative_tokens
        runner.effective_drafter_max_model_len = runner.max_model_len + rows + 1

    def after_sampling(self, sampled: Sequence[Sequence[int]]) -> None:
        """Let draft trees commit their KV. Must run before another forward."""
        if self.trees is not None and self.trees.uneven:
            req_ids = self._runner.input_batch.req_ids
            self.trees.after_sampling(dict(zip(req_ids, sampled, strict=True)))

    def view(
        self, scheduler_output: "SchedulerOutput", sampled: Sequence[Sequence[int]]
    ) -> StepView:
        """Build the view of the step that has just sampled.

        `sampled` has the target ids of each request of the batch, none in prefill.
        """
        times = self._clock.viewed()
        runner, drafted = self._runner, scheduler_output.scheduled_spec_decode_tokens
        batch, states = runner.input_batch, runner.requests
        requests = []
        lengths = batch.num_tokens_no_spec[: len(sampled)].tolist()
        if self.trees is not None:
            self._lengths = dict(zip(batch.req_ids, lengths, strict=False))
        nodes = {} if self.trees is None else self.trees.nodes
        token_ids = batch.token_ids_cpu
        for index, (req_id, tokens) in enumerate(zip(batch.req_ids, sampled, strict=True)):
            state, places = states[req_id], drafted.get(req_id, ())
            rows = len(places)
            held = 0 if places and places[0] < 0 else rows  # see `StepView.preempted`
            verified = nodes.get(req_id, held)
            requests.append(
                RequestView(
                    req_id,
                    self._params_of(req_id),
                    token_ids[index, : lengths[index]],
                    state.num_prompt_tokens,
                    tokens,
                    num_drafted=verified,
                    num_padding=rows - verified,
                    has_text=state.prompt_embeds is None,
                    media=media_of(state.mm_features),
                )
            )
        if len(self._params) > len(states):
            for req_id in self._params.keys() - states.keys():
                del self._params[req_id]
        return StepView(
            requests=requests,
            started={new.req_id: salt_of(new) for new in scheduler_output.scheduled_new_reqs},
            live=states.keys(),
            lookahead=min(scheduler_output.num_spec_tokens_to_schedule, self._longest),
            max_model_len=runner.max_model_len,
            num_rows=scheduler_output.total_num_scheduled_tokens,
            target_seconds=times.target,
            step_seconds=times.step,
            trees=None
            if self.trees is None
            else self.trees.room(len(requests), scheduler_output.num_spec_tokens_to_schedule),
            preempted=scheduler_output.preempted_req_ids or (),
            early_bonus=True,
        )

    def on_step_start(self, scheduler_output: "SchedulerOutput") -> bool:
        """Return True if new requests begin in the step."""
        return bool(scheduler_output.scheduled_new_reqs)

    def on_drafts_taken(self) -> None:
        # `PendingDraftProbs` holds our draft_probs, so the runner must not pass on its own.
        self._runner._draft_probs = self._runner._draft_prob_req_ids = None
        self._clock.on_drafts_taken()

    def expect_trees(self, drafts: Sequence[Draft]) -> None:
        super().expect_trees(drafts)
        if self.trees is not None:
            self.trees.on_drafts_taken(None, self._lengths)

    def batch(self) -> BatchView:
        """Return the batch for which tokens are being sampled."""
        states, batch = self._runner.requests, self._runner.input_batch
        req_ids, drafted = list(batch.req_ids), batch.spec_token_ids
        return BatchView(
            req_ids=req_ids,
            void=[of for of, ids in zip(req_ids, drafted, strict=False) if ids and ids[0] < 0],
            noise_seeds=[self._params_of(req_id).noise_seed for req_id in req_ids],
            num_output_tokens=[len(states[req_id].output_token_ids) for req_id in req_ids],
            trees=None if self.trees is None else self.trees.view(),
        )

    def replace_randomness(self, make: Callable[[str], _Module]) -> _Module:
        """Replace the top-k/top-p sampler by `make(logprobs_mode)`, and return it."""
        sampler = self._runner.sampler
        sampler.topk_topp_sampler = made = make(sampler.logprobs_mode)
        return made

    def _params_of(self, req_id: str) -> RequestParams:
        params = self._runner.requests[req_id].sampling_params
        known = self._params.get(req_id)
        if known is None or known[0] is not params:  # new, or another request with the same id
            seed = None if params is None else params.seed
            if seed is None:  # the same on all ranks, which see requests in the same order
                seed = int(self._made_seeds.integers(1 << 63))
            read = params_of(params, (seed + (1 << 63)) % (1 << 64) - (1 << 63))  # as int64
            known = self._params[req_id] = params, read
        return known[1]
