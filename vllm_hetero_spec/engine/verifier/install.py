# SPDX-License-Identifier: Apache-2.0
"""Which rule verifies, and everything of the model runner that the rule needs changed."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_hetero_spec.config import HeteroOptions
from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.engine.seam.runner_v1 import RunnerV1
from vllm_hetero_spec.engine.seam.step_view import StepView
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs, shared
from vllm_hetero_spec.engine.verifier.fuzzy_accounts import FuzzyRule
from vllm_hetero_spec.engine.verifier.race_sampler import RacingSampler
from vllm_hetero_spec.engine.verifier.rejection_sampler import HeteroRejectionSampler
from vllm_hetero_spec.engine.verifier.verdict import Rule
from vllm_hetero_spec.staging import Receiver, Sender
from vllm_hetero_spec.verify.rules import block_rule, race_rule, token_rule

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = logging.getLogger("vllm.hetero_spec")


class Verifier:
    """Verification of one engine: takes the place of the runner's, and of its randomness for races.

    Args:
        options: The user's.
        seam: The target's model runner, which is changed.
        stats: Counters to add to.
    """

    def __init__(self, options: HeteroOptions, seam: Runner, stats: DraftStats) -> None:
        send = Sender(seam.device).send
        self._pending = PendingDraftProbs(send)
        self._fuzzy: FuzzyRule | None = None
        self._group: GroupCoordinator | None = None
        if not isinstance(seam, RunnerV1):
            return  # V2's own sampler takes drafts for certain, which greedy ones are
        racing: RacingSampler | None = None
        rule: Rule = block_rule if options.verification == "block" else token_rule
        if options.verification == "race":
            racing = seam.replace_randomness(lambda mode: RacingSampler(seam.batch, mode, send))
            rule = race_rule
        elif options.verification == "fuzzy":
            assert options.threshold is not None
            # At most one request for each token of a step, three float64 for each.
            receiver = Receiver(seam.device, 24 * seam.max_num_tokens)
            self._fuzzy = FuzzyRule(options.divergence, options.threshold, receiver, stats)
            rule = self._fuzzy
            logger.warning(
                "Fuzzy verification is LOSSY: sampled drafts whose %s divergence from the target "
                "is below %g pass as they are. Every request is accounted for in the log when it "
                "ends.",
                options.divergence,
                options.threshold,
            )
        seam.replace_rejection_sampler(
            lambda *args: HeteroRejectionSampler(
                rule, self._pending, racing, seam.batch, stats, *args
            )
        )

    def share_among(self, group: "GroupCoordinator") -> None:
        """The ranks of a group verify together: all of them need what drafts were drawn from."""
        self._group = group

    def expect(self, step: StepView, drafts: Sequence[Draft]) -> None:
        """These drafts, and no others, are what the requests of a step will have verified.

        Args:
            step: The step; who is not in its batch still waits for an earlier draft.
            drafts: Of this step. Where ranks verify together, all of them call this, and those of
                the first rank count.
        """
        self._pending.keep(step.live)
        if self._fuzzy is not None:
            self._fuzzy.keep(step.live)
        draft_probs = {
            draft.req_id: draft.draft_probs for draft in drafts if draft.draft_probs is not None
        }
        if self._group is not None:
            draft_probs = shared(draft_probs, self._group)
        for request in step.requests:
            self._pending.put(request.req_id, draft_probs.get(request.req_id))
