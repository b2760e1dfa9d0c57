# SPDX-License-Identifier: Apache-2.0
"""Verification inside Model Runner V2: the same rules, on logits that vLLM has made ready.

vLLM's sampler applies all sampling parameters to the rows of drafts and bonus tokens alike. Bonus
tokens are drawn as vLLM draws them where nobody has a draft, so that a seed means the same in any
batch. Places and parameters are on the device: one packet says how long the drafts are, and brings
what random numbers follow from.

Memory: target_probs take the place of the logits that vLLM has copied, at most 1 GiB of them at a
time; where it has made no copy, or logprobs want it, they are a table beside.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
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
from vllm_hetero_spec.engine.verifier.verdict import Rule, verdict_of, walk_of
from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.staging import Send
from vllm_hetero_spec.trees.walk import TreeBatch
from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch
from vllm_hetero_spec.verify.noise import slices


class HeteroRejectionSamplerV2(RejectionSampler):
    """Verifies drafts by one of our rules.

    Args:
        rule: Decides over the drafts of random requests.
        pending: Where the proposer leaves what its drafts were drawn from.
        races: What draws tokens where they are raced for; else None.
        batch: Gives the requests of a batch of vLLM's, and the true lengths of their drafts.
        places: See `RaceSamplerV2`.
        send: Brings arrays to the device, once for each part of a batch that has trees.
        stats: Where `verify_seconds` is counted.
        args: What RejectionSampler takes.
    """

    def __init__(
        self,
        rule: Rule,
        pending: PendingDraftProbs,
        races: RaceSamplerV2 | None,
        batch: Callable[[InputBatch], BatchView],
        places: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        send: Send,
        stats: DraftStats,
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._rule, self._pending, self._races = rule, pending, races
        self._batch, self._places, self._stats = batch, places, stats
        self._send = send
        # Of trees: the token of each row that is left.
        self._fed = torch.zeros(0, dtype=torch.int64)
        self._view = BatchView([])
        self._verified = 0  # requests of the batch so far
        # Of the rows of a part: each one's request in the runner, and its place in the request.
        self._rows = (self._fed, self._fed)
        # The rows of a part in the order of its tokens, where walks have left that of the rows.
        self._order: torch.Tensor | None = None

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """See RejectionSampler, which calls `_verify` for a part of the batch at a time."""
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
        """See RejectionSampler; `draft_logits` are not used, ours are in `pending`."""
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
        self._rows = expanded_idx_mapping, expanded_local_pos
        part = slice(self._verified, self._verified + len(idx_mapping_np))
        self._verified = part.stop
        starts = cu_num_logits[:-1].long()
        temperature = states.temperature.np[idx_mapping_np]
        greedy, random = not temperature.any(), bool(temperature.all())
        seeds, places = None, None
        if not greedy:
            seeds = states.seeds.np[idx_mapping_np]
            places = self._places(idx_mapping, pos[starts])
        drafts, rows = self._drafts(part, seeds, places, starts, verify_draft_sampled)
        ends = starts + drafts.counts  # there may be rows behind, of drafts that were filled up
        # Before the rule puts probabilities over the logits.
        best = None if random else fast_argmax(processed)
        if greedy and best is not None:
            bonus = best[ends]
        else:
            bonus = self._drawn(processed[ends], idx_mapping, pos[ends])
        is_greedy: torch.Tensor | bool = greedy
        if not (greedy or random):
            is_greedy = states.temperature.gpu[idx_mapping] == 0
        kept = processed is logits or self._processed_logprobs or sampler.return_sampling_mask
        trees, walk = self._trees(part), None
        if trees is not None and self._view.trees is not None:
            walks, chosen = self._view.trees.is_tree[part], best
            if self._races is not None:
                chosen = self._races.winners(processed, expanded_idx_mapping, pos)
            else:
                walks = walks & is_greedy  # a walk takes the likeliest tokens
            if chosen is not None:
                walk = walk_of(trees, chosen, walks, expanded_local_pos.long())
        verdict = verdict_of(
            self._rule,
            drafts,
            bonus,
            is_greedy,
            lambda: fast_argmax(processed)[rows] if best is None else best[rows],
            lambda: _target_probs(processed, rows, kept=kept),
        )
        sampled, accepted = self._padded(verdict.tokens), verdict.accepted
        self._order = None
        if walk is not None:
            sampled = torch.where(walk.walks[:, None], self._padded(walk.tokens), sampled)
            accepted = torch.where(walk.walks, walk.accepted, accepted)
            self._order = walk.order
            if self.sampler.return_sampling_mask or self._processed_logprobs:
                processed = processed[walk.order]
        return processed, sampled, (accepted + 1).to(torch.int32)

    @property
    def _processed_logprobs(self) -> bool:
        return self.sampler.logprobs_mode.startswith("processed")

    def _padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, most draft tokens + 1], of what is emitted."""
        sampled = tokens.new_full((len(tokens), self.num_speculative_steps + 1), FILLER)
        sampled[:, : tokens.shape[1]] = tokens
        return sampled

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """See RejectionSampler, to which a request's token i comes from its row i."""
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

    def _trees(self, part: slice) -> TreeBatch | None:
        """The trees of the next requests, all rows of all of them; None without any."""
        if self._view.trees is None:
            return None
        parents = self._view.trees.parents[part]
        count = len(parents) + sum(map(len, parents))
        fed, self._fed = self._fed[:count], self._fed[count:]
        return TreeBatch.of(fed, parents, self._send)

    def _drafts(
        self,
        part: slice,
        seeds: np.ndarray | None,
        places: torch.Tensor | None,
        starts: torch.Tensor,
        draft_sampled: torch.Tensor,
    ) -> tuple[DraftBatch, torch.Tensor]:
        """The drafts of the next requests, and which row of logits int64 [N] is for each token.

        Those of trees have no draft here: only the row behind their text counts.

        Args:
            part: Of the batch.
            seeds: int64 [B], on the host; None where nothing is random, as `places`.
            places: int64 [B].
            starts: int64 [B], each request's first row.
            draft_sampled: int, for each row of logits the token before it: each request's last
                token, its draft, and what may fill that up; -1 for a place that holds none.
        """
        lengths = self._view.lengths[part]
        if self._view.trees is not None:
            planned = self._view.trees.planned[part]
            lengths = [0 if tree else length for tree, length in zip(planned, lengths, strict=True)]
        drafts = self._pending.batch(
            self._view.req_ids[part], lengths, draft_sampled, seeds, places
        )
        rows = starts[drafts.request_of] + drafts.place_of
        return replace(drafts, tokens=draft_sampled[rows + 1].long()), rows

    def _drawn(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """int64 [n], as the sampler draws tokens behind no draft; see `RaceSamplerV2.winners`."""
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
    """float32 [N, V], of some rows; over the logits, from the first on, where they are not kept.

    No row moves up, so that none is overwritten before it is read.
    """
    count, width = len(rows), logits.shape[1]
    probs = logits.new_empty((count, width), dtype=torch.float32) if kept else logits[:count]
    for part in slices(count, width):
        some = logits.index_select(0, rows[part])
        torch.softmax(some, -1, dtype=torch.float32, out=probs[part])
    return probs
