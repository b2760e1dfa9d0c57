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
    for three float64 per request; each part of a batch needs one.
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
        # By request: emitted tokens, tokens accepted by the fuzzy rule only, and total variation.
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
        figures = [found.verdict.accepted + 1, found.only_fuzzy, found.variation]
        stacked = torch.stack([figure.to(torch.float64) for figure in figures])
        self._coming.append((drafts.req_ids, self._receivers[len(self._coming)].fetch(stacked)))
        return found.verdict

    def keep(self, live: Collection[str]) -> None:
        """Report ended requests. Call this when a step's tokens are on the host."""
        coming, self._coming = self._coming, []
        for req_ids, fetched in coming:
            figures = fetched.wait()
            self._stats.fuzzy_tokens += int(figures[1].sum())
            self._stats.fuzzy_variation += float(figures[2].sum())
            for req_id, own in zip(req_ids, figures.T, strict=True):
                self._accounts[req_id] = self._accounts.get(req_id, 0) + own
        for req_id in self._accounts.keys() - live:
            tokens, only_fuzzy, variation = self._accounts.pop(req_id)
            logger.info(
                "Lossy request %s: %.1f%% of %d tokens accepted only by the fuzzy rule; total "
                "variation from the target's distribution at most %.3f.",
                req_id,
                100 * only_fuzzy / max(1, tokens),
                tokens,
                min(1.0, variation),
            )
