# SPDX-License-Identifier: Apache-2.0
"""Verification inside vLLM: target_probs from the target's logits, our rules on them.

vLLM's own sampler prepares the logits (penalties, bad words, grammar) and draws the bonus tokens;
temperature, top-k and top-p of the draft rows are applied here, and `verify` decides. A batch may
mix greedy and random requests, certain and sampled drafts of any length.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs
from vllm_hetero_spec.engine.verifier.race_sampler import RacingSampler
from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import Noise
from vllm_hetero_spec.verify.rules import greedy_rule

Rule = Callable[[DraftBatch, torch.Tensor, torch.Tensor, Noise], Verdict]


class HeteroRejectionSampler(RejectionSampler):
    """Verifies drafts by one of our rules.

    Args:
        rule: Decides over the drafts of random requests.
        pending: Where the proposer leaves what its drafts were drawn from.
        racing: The sampler's last step where tokens are raced for, the bonus token too; else None.
        batch: Gives the batch that tokens are being chosen for.
        stats: Where `verify_seconds` is counted.
        args: What RejectionSampler takes.
    """

    def __init__(
        self,
        rule: Rule,
        pending: PendingDraftProbs,
        racing: RacingSampler | None,
        batch: Callable[[], BatchView],
        stats: DraftStats,
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._rule = rule
        self._pending = pending
        self._racing = racing
        self._batch = batch
        self._stats = stats

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """See RejectionSampler.forward; `draft_probs` is not used, ours are in `pending`."""
        if not metadata.max_spec_len:
            # Prefill: on no rows at all top-k raises on CPU (`max(): Expected reduction dim`).
            rows = logits[metadata.bonus_logits_indices]
            return self.sampler(logits=rows, sampling_metadata=sampling_metadata)
        began = time.perf_counter()
        processed = self.is_processed_logprobs_mode
        behind = (
            self._racing.behind(metadata.num_draft_tokens)
            if self._racing is not None
            else nullcontext()
        )
        with behind:
            bonus = self.sampler(
                logits=logits[metadata.bonus_logits_indices],
                sampling_metadata=replace(sampling_metadata, max_num_logprobs=-1)
                if sampling_metadata.max_num_logprobs is not None
                else sampling_metadata,
                predict_bonus_token=True,
                logprobs_mode_override="processed_logits" if processed else "raw_logits",
            )
        raw = logits[metadata.target_logits_indices].to(torch.float32)
        wants_raw = sampling_metadata.max_num_logprobs is not None and not processed
        target = self.apply_logits_processors(
            raw.clone() if wants_raw else raw, sampling_metadata, metadata
        )
        drafts = self._pending.batch(
            self._batch().req_ids, metadata.num_draft_tokens, metadata.draft_token_ids.long()
        )
        last = bonus.sampled_token_ids[:, 0].long()
        tokens = self._verdict(drafts, target, last, sampling_metadata).tokens.to(torch.int32)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                target if processed else raw,
                bonus.logprobs_tensors.logprobs,
                tokens,
            )
        self._stats.verify_seconds += time.perf_counter() - began
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _verdict(
        self,
        drafts: DraftBatch,
        logits: torch.Tensor,
        bonus: torch.Tensor,
        sampling: SamplingMetadata,
    ) -> Verdict:
        """Greedy requests by comparison, random ones by the rule, each blind to the other."""
        if sampling.all_greedy:
            return greedy_rule(drafts, logits.argmax(-1), bonus)
        greedy = None
        if not sampling.all_random:
            greedy = greedy_rule(drafts, logits.argmax(-1), bonus)
        target_probs = _constrained(logits, drafts.request_of, sampling).softmax(-1)
        noise = Noise(logits.device, sampling.generators)
        verdict = self._rule(drafts, target_probs, bonus, noise)
        if greedy is None:
            return verdict
        cold = sampling.temperature == 0
        return Verdict(
            torch.where(cold[:, None], greedy.tokens, verdict.tokens),
            torch.where(cold, greedy.accepted, verdict.accepted),
        )


def _constrained(
    logits: torch.Tensor, request_of: torch.Tensor, sampling: SamplingMetadata
) -> torch.Tensor:
    """[N, V] logits under their requests' temperature, top-k and top-p, in place."""
    temperature = sampling.temperature[request_of]
    logits.div_(torch.where(temperature == 0, 1.0, temperature)[:, None])
    top_k = sampling.top_k[request_of] if sampling.top_k is not None else None
    top_p = sampling.top_p[request_of] if sampling.top_p is not None else None
    return apply_top_k_top_p(logits, top_k, top_p)
