# SPDX-License-Identifier: Apache-2.0
"""The rules of verification over a batch (`verify.reference` has them for reading).

p and q are the rows of target_probs and draft_probs at a draft token, K is the token.
The token rule looks at the probabilities of the draft's tokens alone to see how far it is accepted,
and computes a residual only at the one place per request where it ends.
"""

import torch

from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import Noise, choose, slices
from vllm_hetero_spec.verify.race import race


def token_rule(
    drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor, noise: Noise
) -> Verdict:
    """Accept K with min(1, p(K) / q(K)), token by token; correct from (p - q)+.

    Args:
        drafts: N draft tokens of B requests.
        target_probs: float32 [N, V], the target's at each draft token, after all sampling
            parameters; not changed.
        bonus: int64 [B], a draw from the target's distribution behind each draft.
        noise: Uniform numbers.
    """
    accept = passes(drafts, target_probs, noise)
    accepted = drafts.padded(accept, False).long().cumprod(1).sum(1)
    support = torch.ones_like(accepted, dtype=target_probs.dtype)
    return corrected(drafts, target_probs, accepted, support, bonus, noise)


def block_rule(
    drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor, noise: Noise
) -> Verdict:
    """Accept the longest prefix that the block as a whole supports; never less than token by token.

    *Block Verification Accelerates Speculative Decoding*: with P_j the running support, the prefix
    of length j survives with h_j = S_j / (1 - P_j + S_j), S_j = sum (P_j p_{j+1} - q_{j+1})+.
    Arguments as of `token_rule`.
    """
    ratios = drafts.padded(at_tokens(target_probs, drafts.tokens) / drafts.mass(), 0.0)
    support = target_probs.new_ones(drafts.size)
    accepted = torch.zeros_like(drafts.counts)
    reached = support.clone()
    uniform = drafts.padded(noise.uniform(drafts.lengths), 0.0)
    for place in range(1, drafts.width + 1):
        # Padding has ratio 0, so a draft that has ended changes no more.
        support = (support * ratios[:, place - 1]).clamp_max(1.0)
        inside = (drafts.counts > place).nonzero()[:, 0]
        survival = support.clone()  # at a draft's end S_j is all of P_j
        for part in slices(len(inside), target_probs.shape[1], target_probs.device):
            some = inside[part]
            index = drafts.starts[some] + place
            excess = drafts.residual(target_probs, index, support[some]).sum(-1)
            survival[some] = excess / (1.0 - support[some] + excess)
        survival.nan_to_num_(0.0)
        survives = (uniform[:, place - 1] < survival) & (drafts.counts >= place)
        accepted = torch.where(survives, place, accepted)
        reached = torch.where(survives, support, reached)
    return corrected(drafts, target_probs, accepted, reached, bonus, noise)


def greedy_rule(drafts: DraftBatch, best: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept while the draft is the target's own first choice.

    Args:
        drafts: N draft tokens of B requests; rows do not matter.
        best: int64 [N], the target's first choice at each draft token.
        bonus: int64 [B], its first choice behind each draft.
    """
    accepted = drafts.padded(drafts.tokens == best, False).long().cumprod(1).sum(1)
    last = bonus.clone()
    short = (accepted < drafts.counts).nonzero()[:, 0]
    last[short] = best[drafts.starts[short] + accepted[short]]
    return Verdict.of(drafts, accepted, last)


def race_rule(
    drafts: DraftBatch,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    seeds: torch.Tensor,
    places: torch.Tensor,
) -> Verdict:
    """Accept while the draft is what the target's own race gives (`verify.race`).

    Nothing is raced for behind a token that is not accepted.

    Args:
        drafts: N draft tokens of B requests; rows do not matter.
        target_probs: float32 [N, V], the target's at each draft token.
        bonus: int64 [B], the winner of the race behind each draft.
        seeds: int64 [B], of the requests' races.
        places: int64 [B], index of each draft's first token in its request's output.
    """
    best = drafts.tokens.new_full((len(drafts.tokens),), FILLER)
    alive = torch.arange(drafts.size, device=target_probs.device)
    for place in range(drafts.width):
        alive = alive[drafts.counts[alive] > place]
        index = drafts.starts[alive] + place
        best[index] = race(target_probs, seeds[alive], places[alive] + place, index)
        alive = alive[best[index] == drafts.tokens[index]]
    return greedy_rule(drafts, best, bonus)


def passes(drafts: DraftBatch, target_probs: torch.Tensor, noise: Noise) -> torch.Tensor:
    """bool [N], the ratio test of each draft token by itself."""
    mass, target = drafts.mass(), at_tokens(target_probs, drafts.tokens)
    return (noise.uniform(drafts.lengths) * mass < target) & (mass > 0)


def at_tokens(target_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """p(K) per draft token; 0 for ids that are none (padding of a draft by the scheduler)."""
    return torch.where(tokens >= 0, target_probs.gather(1, tokens.clamp_min(0)[:, None])[:, 0], 0.0)


def corrected(
    drafts: DraftBatch,
    target_probs: torch.Tensor,
    accepted: torch.Tensor,
    support: torch.Tensor,
    bonus: torch.Tensor,
    noise: Noise,
) -> Verdict:
    """The token behind what was accepted: the bonus, or a draw from (support * p - q)+."""
    last = bonus.clone()
    # A request without a draft uses up none of its numbers, as in a step where nobody has one: its
    # seed means the same whoever is in the batch.
    uniform = noise.uniform([min(1, length) for length in drafts.lengths])
    number = (drafts.counts > 0).cumsum(0) - 1
    short = (accepted < drafts.counts).nonzero()[:, 0]
    for part in slices(len(short), target_probs.shape[1], target_probs.device):
        some = short[part]
        index = drafts.starts[some] + accepted[some]
        rest = drafts.residual(target_probs, index, support[some])
        # Rounding can leave nothing where both distributions are the same; then p itself is right.
        empty = rest.sum(-1) <= 0
        rest[empty] = target_probs[index[empty]]
        last[some] = choose(rest, uniform[number[some]])
    return Verdict.of(drafts, accepted, last)
