# SPDX-License-Identifier: Apache-2.0
"""Which rule verifies, and everything of the model runner that the rule needs changed."""

import logging
from collections.abc import Collection
from typing import Any

from vllm_hetero_spec.config import HeteroOptions
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs
from vllm_hetero_spec.engine.verifier.fuzzy_accounts import FuzzyRule
from vllm_hetero_spec.engine.verifier.race_sampler import RaceSeeds, RacingSampler
from vllm_hetero_spec.engine.verifier.rejection_sampler import HeteroRejectionSampler, Rule
from vllm_hetero_spec.verify.rules import block_rule, token_rule

logger = logging.getLogger("vllm.hetero_spec")


class Verifier:
    """Verification of one engine.

    Args:
        options: The user's.
        runner: The model runner, which `install` changes.
        draft_probs: Where the proposer leaves what its drafts were drawn from.
        stats: Counters to add to.
    """

    def __init__(
        self, options: HeteroOptions, runner: Any, draft_probs: PendingDraftProbs, stats: DraftStats
    ) -> None:
        self._runner, self._draft_probs, self._stats = runner, draft_probs, stats
        self._race_seeds: RaceSeeds | None = None
        self._fuzzy: FuzzyRule | None = None
        self._rule: Rule = block_rule if options.verification == "block" else token_rule
        if options.verification == "race":
            self._race_seeds = RaceSeeds(runner)
            self._rule = self._race_seeds.rule
        elif options.verification == "fuzzy":
            assert options.threshold is not None
            self._fuzzy = FuzzyRule(options.divergence, options.threshold, self._req_ids, stats)
            self._rule = self._fuzzy
            logger.warning(
                "Fuzzy verification is LOSSY: sampled drafts whose %s divergence from the target "
                "is below %g pass as they are. Every request is accounted for in the log when it "
                "ends.",
                options.divergence,
                options.threshold,
            )

    def install(self) -> None:
        """Take the place of the runner's rejection sampler, and of its randomness for races."""
        runner, racing = self._runner, None
        if self._race_seeds is not None:
            racing = RacingSampler(self._race_seeds, runner.sampler.logprobs_mode)
            runner.sampler.topk_topp_sampler = racing
        runner.rejection_sampler = HeteroRejectionSampler(
            self._rule,
            self._draft_probs,
            racing,
            self._req_ids,
            self._stats,
            runner.sampler,
            runner.speculative_config,
            runner.device,
        )

    def race_seed(self, req_id: str) -> int | None:
        """Seed of a request's races; None where nothing is raced for."""
        return None if self._race_seeds is None else self._race_seeds.seed(req_id)

    def keep(self, live: Collection[str]) -> None:
        """Forget the requests that are gone."""
        self._draft_probs.keep(live)
        if self._race_seeds is not None:
            self._race_seeds.keep(live)
        if self._fuzzy is not None:
            self._fuzzy.keep(live)

    def _req_ids(self) -> list[str]:
        req_ids: list[str] = self._runner.input_batch.req_ids
        return req_ids
