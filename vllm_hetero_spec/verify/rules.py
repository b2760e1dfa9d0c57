# SPDX-License-Identifier: Apache-2.0
"""The rules of verification over a batch (`tests/oracle/reference.py` has them for reading).

p and q are the rows of target_probs and draft_probs at a draft token, K is the token.
The token rule looks at the probabilities of the draft's tokens alone to see how far it is accepted,
and computes a residual only at the one place per request where it ends.
"""

import torch

from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import choose, slices
from vllm_hetero_spec.verify.race import race


def token_rule(drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept K with min(1, p(K) / q(K)), token by token; correct from (p - q)+.

    Args:
        drafts: N draft tokens of B requests.
        target_probs: float32 [N, V], the target's at each draft token, after all sampling
            parameters; not changed.
        bonus: int64 [B], a draw from the target's distribution behind each draft.
    """
    accept = passes(drafts, target_probs)
    return corrected(drafts, target_probs, in_a_row(drafts, accept), None, bonus)


def block_rule(drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept the longest prefix that the block as a whole supports; never less than token by token.

    *Block Verification Accelerates Speculative Decoding*: with P_j the running support, the prefix
    of length j survives with h_j = S_j / (1 - P_j + S_j), S_j = sum (P_j p_{j+1} - q_{j+1})+.
    Arguments as of `token_rule`.
    """
    mass = drafts.mass()
    ratios = torch.where(mass > 0, at_tokens(target_probs, drafts.tokens) / mass, 0.0)
    ratios = drafts.padded(ratios, 0.0)
    running = [target_probs.new_ones(drafts.size)]
    for place in range(drafts.width):
        running.append((running[-1] * ratios[:, place]).clamp_max(1.0))
    support = torch.stack(running, 1)
    survival = support.clone()  # at a draft's end S_j is all of P_j
    for part in slices(len(drafts.later), target_probs.shape[1], target_probs.device):
        index = drafts.later[part]
        cells = drafts.request_of[index], drafts.place_of[index]
        behind = support[cells]
        excess = drafts.residual(target_probs, index, behind).sum(-1)
        survival[cells] = excess / (1.0 - behind + excess)
    survival.nan_to_num_(0.0)
    uniform = drafts.padded(drafts.accept_noise(), 0.0)
    places = torch.arange(1, drafts.width + 1, device=support.device)
    survives = (uniform[:, :-1] < survival[:, 1:]) & (places <= drafts.counts[:, None])
    # A column of 0 beside them: the empty prefix survives always.
    accepted = drafts.counts.new_zeros(drafts.size, drafts.width + 1)
    accepted[:, 1:] = places * survives
    longest = accepted.amax(1)
    reached = support.gather(1, longest[:, None])[:, 0]
    return corrected(drafts, target_probs, longest, reached, bonus)


def greedy_rule(drafts: DraftBatch, best: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept while the draft is the target's own first choice.

    Args:
        drafts: N draft tokens of B requests; rows do not matter.
        best: int64 [N], the target's first choice at each draft token.
        bonus: int64 [B], its first choice behind each draft.
    """
    own = drafts.padded(best, FILLER).scatter_(1, drafts.counts[:, None], bonus[:, None])
    return Verdict.of(own, in_a_row(drafts, drafts.tokens == best))


def race_rule(drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept while the draft is what the target's own race gives (`verify.race`).

    Arguments as of `token_rule`; `bonus` are the winners behind the drafts. All draft tokens are
    raced for: how far each draft is accepted is not known in time.
    """
    assert drafts.seeds is not None
    assert drafts.places is not None
    seeds, places = drafts.seeds[drafts.request_of], drafts.places[drafts.request_of]
    return greedy_rule(drafts, race(target_probs, seeds, places + drafts.place_of), bonus)


def passes(drafts: DraftBatch, target_probs: torch.Tensor) -> torch.Tensor:
    """bool [N], the ratio test of each draft token by itself."""
    mass, target = drafts.mass(), at_tokens(target_probs, drafts.tokens)
    return (drafts.accept_noise() * mass < target) & (mass > 0)


def at_tokens(target_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """p(K) per draft token; 0 for ids that are none (padding of a draft by the scheduler)."""
    return torch.where(tokens >= 0, target_probs.gather(1, tokens.clamp_min(0)[:, None])[:, 0], 0.0)


def in_a_row(drafts: DraftBatch, accept: torch.Tensor) -> torch.Tensor:
    """int64 [B], tokens of each draft before its first that is not to be accepted, of bool [N]."""
    ends = torch.where(accept, drafts.width, drafts.place_of)
    return drafts.counts.scatter_reduce(0, drafts.request_of, ends, "amin")


def corrected(
    drafts: DraftBatch,
    target_probs: torch.Tensor,
    accepted: torch.Tensor,
    support: torch.Tensor | None,
    bonus: torch.Tensor,
) -> Verdict:
    """The token behind what was accepted: the bonus, or a draw from (support * p - q)+.

    Where it is the bonus, a correction of the last token is drawn and not used: only the device
    knows where that is.
    """
    some, uniform = drafts.drafted, drafts.correct_noise()
    ends, counts = accepted[some], drafts.counts[some]
    places = drafts.starts[some] + ends.minimum(counts - 1)
    drawn = torch.empty_like(some)
    for part in slices(len(some), target_probs.shape[1], target_probs.device):
        index = places[part]
        rest = drafts.residual(
            target_probs, index, None if support is None else support[some[part]]
        )
        # Rounding can leave nothing where both distributions are the same; then p itself is right.
        empty = rest.sum(-1, keepdim=True) <= 0
        rest.addcmul_(target_probs.index_select(0, index), empty.to(rest.dtype))
        drawn[part] = choose(rest, uniform[part])
    last = bonus.clone()
    last[some] = torch.where(ends < counts, drawn, bonus[some])
    tokens = drafts.padded(drafts.tokens, FILLER).scatter_(1, accepted[:, None], last[:, None])
    return Verdict.of(tokens, accepted)
