# SPDX-License-Identifier: Apache-2.0
"""Choice of the verification rule, and its installation in the model runner."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.engine.seam.runner_v1 import RunnerV1
from vllm_hetero_spec.engine.seam.runner_v2 import RunnerV2
from vllm_hetero_spec.engine.seam.step_view import StepView
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs, shared
from vllm_hetero_spec.engine.verifier.fuzzy_report import FuzzyRule
from vllm_hetero_spec.engine.verifier.race_sampler_v1 import RaceSamplerV1
from vllm_hetero_spec.engine.verifier.race_sampler_v2 import RaceSamplerV2
from vllm_hetero_spec.engine.verifier.rejection_sampler_v1 import HeteroRejectionSamplerV1
from vllm_hetero_spec.options import FuzzyOptions, HeteroOptions
from vllm_hetero_spec.staging import Receiver, Sender
from vllm_hetero_spec.verify.rules import Rule, block_rule, race_rule, token_rule

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = logging.getLogger("vllm.hetero_spec")

# Send buffers. V2 verifies a large batch in parts of 1 GiB of logits; this many do not wait.
_PARTS = 8


class Verifier:
    """Verification of one engine. Replaces the rejection sampler and, for races, the sampling."""

    def __init__(self, options: HeteroOptions, seam: Runner, stats: DraftStats) -> None:
        # Packets without drafts need their own buffers, because those of drafts are still in use.
        send, send_other = (Sender(seam.device, _PARTS).send for _ in range(2))
        self._pending = PendingDraftProbs(send)
        self._fuzzy: FuzzyRule | None = None
        self._greedy: set[str] = set()  # requests of the last step
        self._device = seam.device
        self._group: GroupCoordinator | None = None
        self._likeliest: int | None = None  # tokens of a row that other ranks receive
        asked = options.verification
        rule: Rule = {"block": block_rule, "race": race_rule}.get(str(asked), token_rule)
        if isinstance(asked, FuzzyOptions):
            # A step has at most one request per token. Each has two float64.
            receiver = partial(Receiver, seam.device, 16 * seam.max_num_tokens)
            self._fuzzy = FuzzyRule(asked.divergence, asked.threshold, receiver, stats)
            rule = self._fuzzy
            logger.warning(
                "Fuzzy verification is LOSSY: sampled drafts whose %s divergence from the target "
                "is below %g pass as they are. The log has a line for each request after its "
                "end.",
                asked.divergence,
                asked.threshold,
            )
        if isinstance(seam, RunnerV1):
            racing: RaceSamplerV1 | None = None
            if options.verification == "race":
                racing = seam.replace_randomness(lambda mode: RaceSamplerV1(seam.batch, mode, send))
            seam.replace_rejection_sampler(
                lambda *args: HeteroRejectionSamplerV1(
                    rule, self._pending, racing, seam.batch, send_other, stats, *args
                )
            )
        else:
            assert isinstance(seam, RunnerV2)
            # Imported here because it imports vLLM's modules of V2.
            from vllm_hetero_spec.engine.verifier.rejection_sampler_v2 import (
                HeteroRejectionSamplerV2,
            )

            races: RaceSamplerV2 | None = None
            if options.verification == "race":
                races = seam.replace_randomness(lambda states: RaceSamplerV2(states, seam.places))
            seam.replace_rejection_sampler(
                lambda *args: HeteroRejectionSamplerV2(
                    rule, self._pending, races, seam.batch, send_other, stats, *args
                )
            )

    def share_among(self, group: "GroupCoordinator", likeliest: int | None) -> None:
        """Broadcast draft_probs in a tensor parallel group that verifies together.

        `likeliest` is the maximum number of tokens with a probability in a row; None for all.
        """
        self._group, self._likeliest = group, likeliest
        group.broadcast(torch.zeros(1, device=self._device))  # allocates buffers of the group now

    def close(self) -> None:
        """Report the last requests of a lossy rule."""
        if self._fuzzy is not None:
            self._fuzzy.keep((), self._greedy)

    def expect(self, step: StepView, drafts: Sequence[Draft]) -> None:
        """Set the drafts that the requests of a step will have verified. Collective.

        Requests that are not in the batch keep an earlier draft. The drafts of the first rank are
        used.
        """
        self._pending.keep(step.live, {*step.index_of, *step.preempted})
        if self._fuzzy is not None:
            self._greedy = {each.req_id for each in step.requests if not each.params.random}
            self._fuzzy.keep(step.live, self._greedy)
        draft_probs = {
            draft.req_id: draft.draft_probs for draft in drafts if draft.draft_probs is not None
        }
        if self._group is not None:
            draft_probs = shared(draft_probs, self._group, self._likeliest)
        for req_id, probs in draft_probs.items():
            self._pending.put(req_id, probs)
