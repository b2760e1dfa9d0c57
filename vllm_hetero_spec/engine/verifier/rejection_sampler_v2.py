# SPDX-License-Identifier: Apache-2.0
"""Verification inside Model Runner V2: applies our rules to logits that vLLM has prepared.

vLLM's sampler applies all sampling parameters to the rows of draft and bonus tokens. Bonus tokens
are sampled as vLLM samples tokens without drafts, so that a seed gives the same result in any
batch. One packet contains all indices and the random numbers of the rule. If all requests are
greedy, verification is a comparison with each row's likeliest token.

Memory: target_probs overwrite the logits that vLLM has copied, at most 1 GiB at a time. They need a
table of their own if vLLM has made no copy, or if logprobs need the logits.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs
from vllm_hetero_spec.engine.verifier.race_sampler_v2 import RaceSamplerV2
from vllm_hetero_spec.engine.verifier.requested_logprobs import flat
from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.staging import Send
from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch
from vllm_hetero_spec.verify.noise import slices
from vllm_hetero_spec.verify.rules import Rule, verdict_of


class HeteroRejectionSamplerV2(RejectionSampler):
    """Verifies drafts with one of our rules.

    Args:
        rule: Verification rule for sampled requests.
        pending: Contains the draft_probs of the proposer.
        races: Sampler of tokens if they are raced for; else None.
        batch: Returns the requests of vLLM's batch, and the true lengths of their drafts.
        send: Copies arrays to the device, at most once for each part of a batch.
    """

    def __init__(
        self,
        rule: Rule,
        pending: PendingDraftProbs,
        races: RaceSamplerV2 | None,
        batch: Callable[[InputBatch], BatchView],
        send: Send,
        stats: DraftStats,
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._rule, self._pending, self._races = rule, pending, races
        self._batch, self._send, self._stats = batch, send, stats
        self._processed_logprobs = self.sampler.logprobs_mode.startswith("processed")
        # With trees: input token of each row that is not verified yet.
        self._fed = torch.zeros(0, dtype=torch.int64)
        self._view = BatchView([])
        self._verified = 0  # number of verified requests of the batch
        # For each row of a part: its request in the runner, and its index in the request.
        self._rows = (self._fed, self._fed)
        # Rows of a part in the order of its tokens (`Walk.order`); None without walks.
        self._order: torch.Tensor | None = None

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Verify a batch. RejectionSampler calls `_verify` for each part of it."""
        began = time.perf_counter()
        self._view, self._verified = self._batch(input_batch), 0
        if self._view.trees is not None:
            self._fed = input_batch.input_ids[input_batch.logits_indices].long()
        output = super().__call__(logits, input_batch, *args, **kwargs)
        self._stats.verify_seconds += time.perf_counter() - began
        return output

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verify a part of a batch. `draft_logits` is unused, because `pending` contains ours."""
        sampler, states = self.sampler, self.sampler.sampling_states
        processed = sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        self._rows, self._order = (expanded_idx_mapping, expanded_local_pos), None
        part = slice(self._verified, self._verified + len(idx_mapping_np))
        self._verified = part.stop
        temperature = states.temperature.np[idx_mapping_np]
        greedy, random = not temperature.any(), bool(temperature.all())
        trees = self._view.trees
        if greedy and trees is None:
            return processed, *self._greedy(processed, part, verify_draft_sampled)
        seeds = None if greedy else states.seeds.np[idx_mapping_np]
        drafts = self._drafts(part, seeds, verify_draft_sampled)
        assert drafts.rows is not None
        assert drafts.ends is not None
        rows, ends = drafts.rows, drafts.ends
        # Before the rule overwrites the logits.
        best = None if random else fast_argmax(processed)
        if greedy and best is not None:
            bonus = best[ends]
        else:
            bonus = self._drawn(processed[ends], idx_mapping, pos[ends])
        is_greedy: torch.Tensor | bool = greedy
        if not (greedy or random):
            is_greedy = states.temperature.gpu[idx_mapping] == 0
        kept = processed is logits or self._processed_logprobs or sampler.return_sampling_mask
        walk = None
        if trees is not None:
            count = trees.num_rows(part)
            fed, self._fed = self._fed[:count], self._fed[count:]
            walks, chosen = trees.is_tree[part], best
            if self._races is not None:
                chosen = self._races.winners(processed, expanded_idx_mapping, pos)
            else:
                walks = walks & is_greedy  # a walk follows the likeliest tokens
            if chosen is not None:
                rows_of_trees = trees.rows(fed, part, self._send)
                walk = rows_of_trees.walk(chosen, walks, expanded_local_pos.long())
        verdict = verdict_of(
            self._rule,
            drafts,
            bonus,
            is_greedy,
            lambda: fast_argmax(processed)[rows] if best is None else best[rows],
            lambda: _target_probs(processed, rows, kept=kept),
        )
        sampled, accepted = self._padded(verdict.tokens), verdict.accepted
        if walk is not None:
            sampled = torch.where(walk.walks[:, None], self._padded(walk.tokens), sampled)
            accepted = torch.where(walk.walks, walk.accepted, accepted)
            self._order = walk.order
            if self.sampler.return_sampling_mask or self._processed_logprobs:
                processed = processed[walk.order]
        counts = torch.empty_like(accepted, dtype=torch.int32)
        return processed, sampled, torch.add(accepted, 1, out=counts)

    def _greedy(
        self, logits: torch.Tensor, part: slice, fed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emit the likeliest token of each row, up to the first draft token that differs.

        Args:
            logits: [R, V], rows of these requests of the batch.
            fed: int [R], the token before each row; -1 for no token.

        Returns:
            Tokens int64 [B, num_speculative_steps + 1], and the number of valid ones of each
            request, int32 [B]. The others are undefined, as in vLLM's own sampler.
        """
        first, best = self._first(part), fast_argmax(logits)
        counts, lengths = np.diff(first), np.array(self._view.lengths[part])
        width = int(counts.max())
        inside = np.arange(width - 1) < lengths[:, None]  # padding is never accepted
        masks: list[torch.Tensor] = []
        if (counts == width).all():
            tokens, fed = best.view(-1, width), fed.view(-1, width)
            if not inside.all():
                masks = self._send(inside)
        else:
            grid = np.minimum(first[:-1, None] + np.arange(width), first[1:, None] - 1)
            places, *masks = self._send(grid, inside)
            tokens, fed = best[places], fed[places]
        agrees = tokens[:, :-1] == fed[:, 1:]
        for mask in masks:
            agrees &= mask
        return self._padded(tokens), agrees.cumprod(1).sum(1, dtype=torch.int32).add_(1)

    def _first(self, part: slice) -> np.ndarray:
        """Return int64 [B + 1], first row of each request in a part, then the number of rows."""
        assert self._view.first_rows is not None
        first: np.ndarray = self._view.first_rows[part.start : part.stop + 1].astype(np.int64)
        return first - first[0]

    def _padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return emitted tokens as int64 [B, num_speculative_steps + 1]."""
        missing = self.num_speculative_steps + 1 - tokens.shape[1]
        return pad(tokens, (0, missing), value=FILLER) if missing else tokens

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """Use our order of rows after walks, and add tokens that requests name."""
        wanted = max_num_logprobs != NO_LOGPROBS or self._view.named
        if self._order is not None and wanted and not self._processed_logprobs:
            logits = logits[self._order]
        if self._view.named:
            requests, local = self._rows
            return compute_topk_scores(
                logits,
                max(0, max_num_logprobs),
                flat(sampled, num_sampled, cu_num_logits, local),
                cu_num_logits_np.tolist(),
                self.sampler.logprob_token_ids_state,
                requests,
                self._view.named,
                self.sampler.logprobs_mode.endswith("logits"),
            )
        return super()._get_logprobs_tensors(
            sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
        )

    def _drafts(
        self, part: slice, seeds: np.ndarray | None, draft_sampled: torch.Tensor
    ) -> DraftBatch:
        """Return the drafts of the next requests, with the rows of logits of their tokens.

        Requests with a tree have no draft here; only their root's row counts.

        Args:
            part: Requests of the batch.
            seeds: int64 [B]; None if all requests are greedy.
            draft_sampled: int [R], the token before each row: each request's last token, its draft
                and padding; -1 stands for no token.
        """
        view = self._view
        lengths = view.lengths[part]
        if view.trees is not None:
            planned = view.trees.planned[part]
            lengths = [0 if tree else length for tree, length in zip(planned, lengths, strict=True)]
        drafts = self._pending.batch(
            view.req_ids[part],
            lengths,
            draft_sampled,
            seeds,
            None if seeds is None else view.num_output_tokens[part],
            first_rows=self._first(part)[:-1],
            room=self.num_speculative_steps,
        )
        assert drafts.rows is not None
        return replace(drafts, tokens=draft_sampled[1:].index_select(0, drafts.rows).long())

    def _drawn(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Sample int64 [n] tokens as without drafts; arguments as in `RaceSamplerV2.winners`."""
        if self._races is not None:
            return self._races.winners(logits, requests, positions)
        states = self.sampler.sampling_states
        return gumbel_sample(
            logits,
            requests,
            states.temperature.gpu,
            states.seeds.gpu,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )


def _target_probs(logits: torch.Tensor, rows: torch.Tensor, *, kept: bool) -> torch.Tensor:
    """Return float32 [N, V], probabilities of some rows; they overwrite `logits` unless `kept`.

    No row moves towards the end, so none is overwritten before it is read.
    """
    count, width = len(rows), logits.shape[1]
    probs = logits.new_empty((count, width), dtype=torch.float32) if kept else logits[:count]
    for part in slices(count, width):
        some = logits.index_select(0, rows[part])
        torch.softmax(some, -1, dtype=torch.float32, out=probs[part])
    return probs
