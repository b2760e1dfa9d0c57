# SPDX-License-Identifier: Apache-2.0
"""Fuzzy speculative decoding: LOSSY, a draft whose row is near the target's passes as it is.

*Fuzzy Speculative Decoding for a Tunable Accuracy-Runtime Tradeoff*. Only sampled drafts can be
fuzzy: the law of a one-hot draft is the draft itself, however near the rows it came from. Where the
rule does not apply the strict test decides, so that threshold 0 is lossless.
"""

from dataclasses import dataclass
from math import log

import torch

from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import Noise
from vllm_hetero_spec.verify.rules import at_tokens, corrected, passes

DIVERGENCES = ("js", "tv", "kl")
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
            output's law is at most the expectation of this from the target's.
    """

    verdict: Verdict
    only_fuzzy: torch.Tensor
    variation: torch.Tensor


def fuzzy_rule(
    drafts: DraftBatch,
    p: torch.Tensor,
    bonus: torch.Tensor,
    noise: Noise,
    divergence: str,
    threshold: float,
) -> FuzzyVerdict:
    """Token rule, with the fuzzy exception.

    Args:
        drafts: N draft tokens of B requests, with dense rows where they were sampled.
        p: float32 [N, V], the target's law at each draft token.
        bonus: int64 [B], a draw from the target's law behind each draft.
        noise: Uniform numbers.
        divergence: One of `DIVERGENCES`; js and kl in nats.
        threshold: A draft token whose rows diverge by less is accepted.
    """
    target = at_tokens(p, drafts.tokens)
    strict = passes(drafts, p, noise)
    near = torch.zeros_like(strict)
    variation = torch.zeros_like(target)
    if drafts.rows is not None and drafts.row_of is not None:
        for index in (drafts.row_of >= 0).nonzero()[:, 0].tolist():
            row = drafts.rows[drafts.row_of[index]]
            if diverge(p[index], row, divergence) < threshold and target[index] > 0:
                near[index] = True
                variation[index] = diverge(p[index], row, "tv")
    accept = drafts.padded(strict | near, False).long().cumprod(1)
    accepted = accept.sum(1)
    emitted = accept.bool()
    rescued = drafts.padded(near & ~strict, False) & emitted
    spent = drafts.padded(variation, 0.0) * emitted
    support = torch.ones_like(accepted, dtype=p.dtype)
    verdict = corrected(drafts, p, accepted, support, bonus, noise)
    return FuzzyVerdict(verdict, rescued.sum(1), spent.sum(1))


def diverge(p: torch.Tensor, row: torch.Tensor, divergence: str) -> float:
    """Divergence of two laws over the target's vocabulary."""
    if divergence == "tv":
        return float((p - row).abs().sum()) / 2
    if divergence == "kl":
        smooth = (1 - KL_SMOOTHING) * row + KL_SMOOTHING / len(row)
        return float(torch.special.xlogy(p, p / smooth).sum())
    middle = (p + row) / 2
    parts = (torch.special.xlogy(x, x / middle).nan_to_num().sum() for x in (p, row))
    return min(float(sum(parts)) / 2, log(2))
