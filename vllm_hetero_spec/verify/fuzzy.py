# SPDX-License-Identifier: Apache-2.0
"""Fuzzy speculative decoding: LOSSY, a draft whose row is near the target's passes as it is.

*Fuzzy Speculative Decoding for a Tunable Accuracy-Runtime Tradeoff*. Only sampled drafts can be
fuzzy: what a certain one was computed from does not matter. Where the rule does not apply the
strict test decides, so that threshold 0 is lossless.
"""

from dataclasses import dataclass
from math import log

import torch

from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import slices
from vllm_hetero_spec.verify.rules import at_tokens, corrected, in_a_row, passes

# Smoothing of the drafter's row under "kl", which is infinite where the target has mass and the
# drafter none, as always between different vocabularies.
KL_SMOOTHING = 1e-4


@dataclass(frozen=True)
class FuzzyVerdict:
    """A verdict, and what was given up for it.

    Attributes:
        verdict: What is emitted.
        only_fuzzy: int64 [B], emitted draft tokens that the strict test would have rejected.
        variation: float [B], sum of the total variations at the places where the rule applied: the
            output's distribution is at most the expectation of this from the target's.
    """

    verdict: Verdict
    only_fuzzy: torch.Tensor
    variation: torch.Tensor


def fuzzy_rule(
    drafts: DraftBatch,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    divergence: str,
    threshold: float,
) -> FuzzyVerdict:
    """Token rule, with the fuzzy exception.

    Args:
        drafts: N draft tokens of B requests, with dense rows where they were sampled.
        target_probs: float32 [N, V], the target's at each draft token.
        bonus: int64 [B], a draw from the target's distribution behind each draft.
        divergence: "js" or "kl" in nats, or "tv".
        threshold: A draft token whose rows diverge by less is accepted.
    """
    target = at_tokens(target_probs, drafts.tokens)
    strict = passes(drafts, target_probs)
    near = torch.zeros_like(strict)
    variation = torch.zeros_like(target)
    if drafts.row_of is not None:
        for part in slices(len(target), target_probs.shape[1], target_probs.device):
            row_of = drafts.row_of[part]
            p, q = target_probs[part], drafts.drawn_from(row_of)
            sampled = (row_of >= 0) & (target[part] > 0)
            near[part] = sampled & (diverge(p, q, divergence) < threshold)
            variation[part] = diverge(p, q, "tv") * near[part]
    accepted = in_a_row(drafts, strict | near)
    emitted = drafts.place_of < accepted[drafts.request_of]
    rescued = drafts.padded(near & ~strict & emitted, False)
    spent = drafts.padded(variation * emitted, 0.0)
    verdict = corrected(drafts, target_probs, accepted, None, bonus)
    return FuzzyVerdict(verdict, rescued.sum(1), spent.sum(1))


def diverge(p: torch.Tensor, q: torch.Tensor, divergence: str) -> torch.Tensor:
    """float [n], divergence of rows [n, V] of target_probs and draft_probs."""
    if divergence == "tv":
        return (p - q).abs().sum(-1) / 2
    if divergence == "kl":
        smooth = (1 - KL_SMOOTHING) * q + KL_SMOOTHING / q.shape[-1]
        return torch.special.xlogy(p, p / smooth).sum(-1)
    middle = (p + q) / 2
    to_p, to_q = (torch.special.xlogy(x, x / middle).nan_to_num().sum(-1) for x in (p, q))
    return ((to_p + to_q) / 2).clamp_max(log(2))
