# SPDX-License-Identifier: Apache-2.0
"""Fuzzy verification, which is LOSSY and only used on request, with a report for each request."""

import logging
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.staging import Fetched, Receiver
from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.fuzzy import fuzzy_rule

logger = logging.getLogger("vllm.hetero_spec")


class FuzzyRule:
    """`verify.fuzzy` with counts for each request, which are read after a step's tokens.

    A sampled draft token passes if its divergence is below `threshold`. `receiver` makes a receiver
    for two float64 per request; each part of a batch needs one.
    """

    def __init__(
        self,
        divergence: str,
        threshold: float,
        receiver: Callable[[], Receiver],
        stats: DraftStats,
    ) -> None:
        self._divergence, self._threshold = divergence, threshold
        self._make_receiver, self._stats = receiver, stats
        self._receivers: list[Receiver] = []
        self._coming: list[tuple[Sequence[str], Fetched]] = []  # one for each part of a step
        # By request: tokens accepted by the fuzzy rule only, and total variation.
        self._accounts: dict[str, np.ndarray] = {}

    def __call__(
        self, drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor
    ) -> Verdict:
        """Apply the rule; same signature as `verify.rules.token_rule`."""
        found = fuzzy_rule(drafts, target_probs, bonus, self._divergence, self._threshold)
        if not drafts.req_ids:  # vLLM profiles with dummy requests
            return found.verdict
        if len(self._coming) == len(self._receivers):
            self._receivers.append(self._make_receiver())
        stacked = torch.stack([found.only_fuzzy.to(torch.float64), found.variation.double()])
        self._coming.append((drafts.req_ids, self._receivers[len(self._coming)].fetch(stacked)))
        return found.verdict

    def keep(self, live: Collection[str], greedy: Collection[str]) -> None:
        """Report ended requests when a step's tokens are on the host, but no `greedy` ones."""
        coming, self._coming = self._coming, []
        for req_ids, fetched in coming:
            for req_id, own in zip(req_ids, fetched.wait().T, strict=True):
                if req_id not in greedy:
                    self._stats.fuzzy_tokens += int(own[0])
                    self._stats.fuzzy_variation += float(own[1])
                    self._accounts[req_id] = self._accounts.get(req_id, 0) + own
        for req_id in self._accounts.keys() - live:
            only_fuzzy, variation = self._accounts.pop(req_id)
            logger.info(
                "Lossy request %s: %d tokens accepted only by the fuzzy rule; total variation from "
                "the target's distribution at most %.3f.",
                req_id,
                only_fuzzy,
                min(1.0, variation),
            )
