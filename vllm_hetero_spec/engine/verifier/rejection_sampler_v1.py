# SPDX-License-Identifier: Apache-2.0
"""Verification inside Model Runner V1: computes target_probs and applies our rules.

vLLM's sampler prepares the logits (penalties, bad words, grammar) and samples the bonus tokens.
Temperature, top-k and top-p of the draft rows are applied here, before a rule of `verify`. A batch
may mix greedy and sampled requests, and certain and sampled drafts of any length. Nothing here
waits for the device: one packet goes to it, and sampled tokens stay there until vLLM reads them.

Memory: vLLM's processors need the logits of all draft rows in one float32 table, and target_probs
overwrite it. Everything else is computed in parts (`verify.noise.slices`).
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.seam.tree_adapter import TreesView, Walk
from vllm_hetero_spec.engine.verifier.cpu_rows_v1 import apply_row_penalties, apply_top_k_top_p
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs
from vllm_hetero_spec.engine.verifier.race_sampler_v1 import RaceSamplerV1
from vllm_hetero_spec.engine.verifier.requested_logprobs import with_asked
from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.staging import Send
from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch
from vllm_hetero_spec.verify.noise import slices
from vllm_hetero_spec.verify.race import race
from vllm_hetero_spec.verify.rules import Rule, verdict_of


class HeteroRejectionSamplerV1(RejectionSampler):
    """Verifies drafts with one of our rules.

    Args:
        rule: Verification rule for sampled requests.
        pending: Contains the draft_probs of the proposer.
        racing: Sampler of the bonus tokens if tokens are raced for; else None.
        send: Copies arrays to the device, at most twice for a batch.
    """

    def __init__(
        self,
        rule: Rule,
        pending: PendingDraftProbs,
        racing: RaceSamplerV1 | None,
        batch: Callable[[], BatchView],
        send: Send,
        stats: DraftStats,
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._rule, self._pending, self._racing = rule, pending, racing
        self._batch, self._send, self._stats = batch, send, stats

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify a batch. `draft_probs` is unused, because `pending` contains ours."""
        if not metadata.max_spec_len:
            # Prefill: top-k raises on CPU without rows (`max(): Expected reduction dim`).
            rows = logits.index_select(0, metadata.bonus_logits_indices)
            return self.sampler(logits=rows, sampling_metadata=sampling_metadata)
        began = time.perf_counter()
        processed = self.is_processed_logprobs_mode
        likeliest, named = sampling_metadata.max_num_logprobs, sampling_metadata.logprob_token_ids
        asked = {index: ids for index, ids in (named or {}).items() if ids}
        wanted = likeliest is not None or bool(asked)
        view, nowhere = self._batch(), [0] * len(metadata.num_draft_tokens)
        drafts = self._pending.batch(
            view.req_ids,
            metadata.num_draft_tokens,
            metadata.draft_token_ids.long(),
            None if sampling_metadata.all_greedy else view.noise_seeds or nowhere,
            view.num_output_tokens or nowhere,
            view.void,
        )
        with self._racing.behind(drafts) if self._racing is not None else nullcontext():
            bonus = self.sampler(
                logits=logits.index_select(0, metadata.bonus_logits_indices),
                sampling_metadata=replace(
                    sampling_metadata, max_num_logprobs=-1, logprob_token_ids=None
                )
                if wanted
                else sampling_metadata,
                predict_bonus_token=True,
                logprobs_mode_override="processed_logits" if processed else "raw_logits",
            )
        # Faster than indexing on a CPU.
        raw = logits.index_select(0, metadata.target_logits_indices).to(torch.float32)
        target = self.apply_logits_processors(
            raw.clone() if wanted and not processed else raw, sampling_metadata, metadata
        )
        last = bonus.sampled_token_ids[:, 0].long()
        is_greedy: torch.Tensor | bool = sampling_metadata.all_greedy
        if not (is_greedy or sampling_metadata.all_random):
            is_greedy = sampling_metadata.temperature == 0
        walk = None
        if view.trees is not None:  # before the rule overwrites the logits
            walk = self._walk(view.trees, drafts, metadata, logits, sampling_metadata, is_greedy)
        verdict = verdict_of(
            self._rule,
            drafts,
            last,
            is_greedy,
            lambda: fast_argmax(target),
            lambda: _target_probs(
                target, drafts.request_of, sampling_metadata, wanted and processed
            ),
        )
        tokens = verdict.tokens
        rows = target if processed else raw
        last_rows = bonus.logprobs_tensors.logprobs if wanted else None
        if walk is not None:
            # In requests with a tree, rows after the root are not a chain.
            behind = torch.arange(tokens.shape[1], device=tokens.device) > 0
            tokens = tokens.masked_fill(walk.trees[:, None] & behind, FILLER)
            tokens = torch.where(walk.walks[:, None], walk.tokens, tokens)
            if wanted:
                rows, last_rows, metadata = _in_order(walk.order, rows, last_rows, metadata)
        tokens = tokens.to(torch.int32)
        logprobs = None
        if wanted:
            logprobs = self._get_logprobs_tensors(
                likeliest or 0, metadata, logits, rows, last_rows, tokens
            )
            if asked:
                every = _every(len(logits), rows, last_rows, metadata)
                logprobs = with_asked(
                    logprobs,
                    asked,
                    lambda lines: self._scores(every[lines]),
                    metadata.num_draft_tokens,
                    self._send,
                )
        self._stats.verify_seconds += time.perf_counter() - began
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    @staticmethod
    def apply_penalties(
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        metadata: SpecDecodeMetadata,
        repeat_indices: torch.Tensor,
        output_token_ids: list[list[int]],
    ) -> torch.Tensor:
        """Penalize draft rows. On a CPU, the cost of a row depends on the request's length only."""
        sampling = sampling_metadata
        if sampling.no_penalties or logits.device.type != "cpu":
            return RejectionSampler.apply_penalties(
                logits, sampling, metadata, repeat_indices, output_token_ids
            )
        each = sampling.presence_penalties, sampling.frequency_penalties
        penalties = torch.stack([*each, sampling.repetition_penalties], 1)
        apply_row_penalties(
            logits, sampling.prompt_token_ids, repeat_indices, penalties, output_token_ids
        )
        return logits

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, V], the scores that users get for some rows of logits."""
        return logits if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(logits)

    def _walk(
        self,
        view: TreesView,
        drafts: DraftBatch,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        sampling: SamplingMetadata,
        is_greedy: torch.Tensor | bool,
    ) -> Walk:
        """Follow the trees of a batch. `logits` [R, V] has all its rows.

        Requests with a tree only have sampling parameters that apply to single rows.
        """
        fed = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        fed[metadata.target_logits_indices + 1] = drafts.tokens
        trees = view.rows(fed, slice(None), self._send)
        best, walks, of = fast_argmax(logits), view.is_tree, trees.request_of
        if self._racing is None:
            walks = walks & is_greedy  # a walk follows the likeliest tokens
        elif is_greedy is not True:
            assert drafts.seeds is not None
            assert drafts.places is not None
            seeds, places = drafts.seeds[of], drafts.places[of] + trees.depths.clamp_min(0)
            raced = torch.empty_like(best)
            for part in slices(*logits.shape):
                rows = logits[part].to(torch.float32, copy=True)
                probs = _target_probs(rows, of[part], sampling, False)
                raced[part] = race(probs, seeds[part], places[part])
            best = (
                torch.where(is_greedy[of], best, raced)
                if isinstance(is_greedy, torch.Tensor)
                else raced
            )
        starts = metadata.cu_num_sampled_tokens - drafts.counts - 1
        place_of = torch.arange(len(fed), device=fed.device) - starts[of]
        return trees.walk(best, walks, place_of)


def _in_order(
    order: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, metadata: SpecDecodeMetadata
) -> tuple[torch.Tensor, torch.Tensor, SpecDecodeMetadata]:
    """Reorder rows by `Walk.order`, so that a request's token i comes from its row i.

    `rows` [N, V] belong to draft tokens, and `last` [B, V] come after the drafts.
    """
    every = _every(len(order), rows, last, metadata)[order]
    everywhere = torch.arange(len(order), device=order.device)
    last = every[metadata.bonus_logits_indices]
    return every, last, replace(metadata, target_logits_indices=everywhere)


def _every(
    count: int, rows: torch.Tensor, last: torch.Tensor, metadata: SpecDecodeMetadata
) -> torch.Tensor:
    """Return [count, V], the rows of draft tokens and those after the drafts, in batch order."""
    every = rows.new_empty((count, rows.shape[1]))
    every[metadata.target_logits_indices] = rows
    every[metadata.bonus_logits_indices] = last.to(rows.dtype)
    return every


def _target_probs(
    logits: torch.Tensor, request_of: torch.Tensor, sampling: SamplingMetadata, keep_logits: bool
) -> torch.Tensor:
    """Return [N, V] probabilities after the requests' temperature, top-k and top-p.

    They overwrite the logits. With `keep_logits`, the logits after these parameters are kept
    instead.
    """
    temperature = sampling.temperature[request_of, None]
    temperature = torch.where(temperature == 0, 1.0, temperature)
    top_k = sampling.top_k[request_of] if sampling.top_k is not None else None
    top_p = sampling.top_p[request_of] if sampling.top_p is not None else None
    target_probs = torch.empty_like(logits) if keep_logits else logits
    for part in slices(*logits.shape):
        rows = apply_top_k_top_p(
            logits[part].div_(temperature[part]),
            None if top_k is None else top_k[part],
            None if top_p is None else top_p[part],
        )
        if keep_logits:
            logits[part] = rows
        torch.softmax(rows, -1, out=target_probs[part])
    return target_probs
