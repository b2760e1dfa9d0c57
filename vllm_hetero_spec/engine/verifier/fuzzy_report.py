# SPDX-License-Identifier: Apache-2.0
"""Fuzzy verification, which is LOSSY and only used on request, with a report for each request."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.staging import Fetched, Receiver
from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.fuzzy import fuzzy_rule

logger = logging.getLogger("vllm.hetero_spec")


@dataclass
class _Account:
    """One request's emitted tokens, tokens accepted by the fuzzy rule only, and total variation."""

    tokens: int = 0
    only_fuzzy: int = 0
    variation: float = 0.0


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
        self._accounts: dict[str, _Account] = {}

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
        self._settle()
        for req_id in self._accounts.keys() - live:
            account = self._accounts.pop(req_id)
            logger.info(
                "Lossy request %s: %.1f%% of %d tokens accepted only by the fuzzy rule; total "
                "variation from the target's distribution at most %.3f.",
                req_id,
                100 * account.only_fuzzy / max(1, account.tokens),
                account.tokens,
                min(1.0, account.variation),
            )

    def _settle(self) -> None:
        coming, self._coming = self._coming, []
        for req_ids, fetched in coming:
            for req_id, tokens, only_fuzzy, variation in zip(req_ids, *fetched.wait(), strict=True):
                account = self._accounts.setdefault(req_id, _Account())
                account.tokens += int(tokens)
                account.only_fuzzy += int(only_fuzzy)
                account.variation += float(variation)
                self._stats.fuzzy_tokens += int(only_fuzzy)
                self._stats.fuzzy_variation += float(variation)
