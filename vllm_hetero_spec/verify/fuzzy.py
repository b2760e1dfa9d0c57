# SPDX-License-Identifier: Apache-2.0
"""Fuzzy verification (LOSSY): accept a draft token whose row is close to the target's row.

*Fuzzy Speculative Decoding for a Tunable Accuracy-Runtime Tradeoff*. The rule applies to sampled
draft tokens only, because a certain token has no row to compare. If the rule does not accept, the
strict test decides, so threshold 0 is lossless.
"""

from dataclasses import dataclass
from math import log

import torch

from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import slices
from vllm_hetero_spec.verify.rules import at_tokens, corrected, in_a_row, passes

# Share of a uniform distribution mixed into the drafter's row for "kl". Without it "kl" is infinite
# if a token has probability in the target's row only, as always between different vocabularies.
KL_SMOOTHING = 1e-4


@dataclass(frozen=True)
class FuzzyVerdict:
    """A verdict and the loss that it causes.

    Attributes:
        only_fuzzy: int64 [B], emitted draft tokens that the strict test would have rejected.
        variation: float [B], sum of the total variation at emitted tokens to which the rule
            applied. Its expectation bounds the distance between output and target distribution.
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
    """Apply the token rule with the fuzzy exception; other arguments as in `token_rule`.

    Args:
        divergence: "js" or "kl" in nats, or "tv".
        threshold: A sampled draft token is accepted if its rows diverge by less.
    """
    target = at_tokens(drafts, target_probs)
    strict = passes(drafts, target_probs)
    near = torch.zeros_like(strict)
    variation = torch.zeros_like(target)
    if drafts.row_of is not None and drafts.row_at is not None:
        eligible = (drafts.row_of >= 0) & (target > 0) & drafts.real
        for part in slices(len(target), target_probs.shape[1], target_probs.device):
            p, q = target_probs[part], drafts.drawn_from(drafts.row_at[part])
            near[part] = eligible[part] & (diverge(p, q, divergence) < threshold)
            variation[part] = diverge(p, q, "tv") * near[part]
    accepted = in_a_row(drafts, strict | near)
    emitted = drafts.place_of < accepted[drafts.request_of]
    rescued = drafts.padded(near & ~strict & emitted, False)
    spent = drafts.padded(variation * emitted, 0.0)
    verdict = corrected(drafts, target_probs, accepted, None, bonus)
    return FuzzyVerdict(verdict, rescued.sum(1), spent.sum(1))


def diverge(p: torch.Tensor, q: torch.Tensor, divergence: str) -> torch.Tensor:
    """Return the divergence of each pair of rows [n, V] of target_probs and draft_probs, [n]."""
    if divergence == "tv":
        return (p - q).abs().sum(-1) / 2
    if divergence == "kl":
        smooth = (1 - KL_SMOOTHING) * q + KL_SMOOTHING / q.shape[-1]
        return torch.special.xlogy(p, p / smooth).sum(-1)
    middle = (p + q) / 2
    to_p, to_q = (torch.special.xlogy(x, x / middle).nan_to_num().sum(-1) for x in (p, q))
    return ((to_p + to_q) / 2).clamp_max(log(2))
