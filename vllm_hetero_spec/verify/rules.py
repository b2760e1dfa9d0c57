# SPDX-License-Identifier: Apache-2.0
"""Rules of verification over a batch (readable forms: `tests/oracle/reference.py`).

p and q are the rows of target_probs and draft_probs at a draft token, K is the token. The token
rule computes a residual at one place per request only: where acceptance ends.
"""

from collections.abc import Callable

import torch

from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import choose, slices
from vllm_hetero_spec.verify.race import race

# Signature of `token_rule`.
Rule = Callable[[DraftBatch, torch.Tensor, torch.Tensor], Verdict]


def verdict_of(
    rule: Rule,
    drafts: DraftBatch,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | bool,
    best: Callable[[], torch.Tensor],
    target_probs: Callable[[], torch.Tensor],
) -> Verdict:
    """Verify greedy requests by comparison and sampled requests by the rule, independently.

    Args:
        rule: Verification rule for sampled requests.
        drafts: N draft tokens of B requests.
        bonus: int64 [B], the target's choice after each draft.
        is_greedy: bool [B], True for greedy requests; one value if all are alike.
        best: Returns the target's likeliest token at each draft token, int64 [N]. Called only for
            greedy requests, and before `target_probs`.
        target_probs: Returns float32 [N, V]. Called only for sampled requests.
    """
    if isinstance(is_greedy, bool):
        if is_greedy:
            return greedy_rule(drafts, best(), bonus)
        return rule(drafts, target_probs(), bonus)
    greedy = greedy_rule(drafts, best(), bonus)
    verdict = rule(drafts, target_probs(), bonus)
    return Verdict(
        torch.where(is_greedy[:, None], greedy.tokens, verdict.tokens),
        torch.where(is_greedy, greedy.accepted, verdict.accepted),
    )


def token_rule(drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept K with probability min(1, p(K) / q(K)); draw the recovered token from (p - q)+.

    Args:
        target_probs: float32 [N, V], after all sampling parameters; not changed.
        bonus: int64 [B], bonus tokens, drawn from the target's distribution after each draft.
    """
    accept = passes(drafts, target_probs)
    return corrected(drafts, target_probs, in_a_row(drafts, accept), None, bonus)


def block_rule(drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept the longest surviving prefix of a draft; arguments as in `token_rule`.

    *Block Verification Accelerates Speculative Decoding*: P_j is the running support. The prefix of
    length j survives with probability h_j = S_j / (1 - P_j + S_j), where
    S_j = sum (P_j p_{j+1} - q_{j+1})+. On average it accepts no fewer tokens than `token_rule`.
    """
    mass = drafts.mass()
    proposed = (mass > 0) & drafts.real
    ratios = torch.where(proposed, at_tokens(drafts, target_probs) / mass, 0.0)
    ratios = drafts.padded(ratios, 0.0)
    running = [target_probs.new_ones(drafts.size)]
    for place in range(drafts.width):
        running.append((running[-1] * ratios[:, place]).clamp_max(1.0))
    support = torch.stack(running, 1)
    survival = support.clone()  # at the end of a draft h_j = P_j
    for part in slices(len(drafts.later), target_probs.shape[1], target_probs.device):
        index = drafts.later[part]
        cells = drafts.request_of[index], drafts.place_of[index]
        behind = support[cells]
        own = target_probs.index_select(0, index)  # on a CPU faster than target_probs[index]
        excess = drafts.residual(own, index, behind).sum(-1)
        survival[cells] = excess / (1.0 - behind + excess)
    survival.nan_to_num_(0.0)
    uniform = drafts.padded(drafts.accept_noise(), 0.0)
    places = torch.arange(1, drafts.width + 1, device=support.device)
    survives = (uniform[:, :-1] < survival[:, 1:]) & (places <= drafts.counts[:, None])
    # The first column is 0: the empty prefix always survives.
    accepted = drafts.counts.new_zeros(drafts.size, drafts.width + 1)
    accepted[:, 1:] = places * survives
    longest = accepted.amax(1)
    reached = support.gather(1, longest[:, None])[:, 0]
    return corrected(drafts, target_probs, longest, reached, bonus)


def greedy_rule(drafts: DraftBatch, best: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept draft tokens while they equal the target's choices.

    Args:
        best: int64 [N], the target's choice at each draft token.
        bonus: int64 [B], the target's choice after each draft.
    """
    accepted = in_a_row(drafts, drafts.tokens == best)
    return _emitted(drafts, best, accepted, drafts.counts, bonus)


def race_rule(drafts: DraftBatch, target_probs: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept draft tokens while they win the target's races (`verify.race`).

    Arguments as in `token_rule`; `bonus` are the winners after the drafts. All rows are raced,
    because selecting the rows up to the first rejection would synchronize with the device.
    """
    assert drafts.seeds is not None
    assert drafts.places is not None
    seeds, places = drafts.seeds[drafts.request_of], drafts.places[drafts.request_of]
    return greedy_rule(drafts, race(target_probs, seeds, places + drafts.place_of), bonus)


def passes(drafts: DraftBatch, target_probs: torch.Tensor) -> torch.Tensor:
    """Return the result of the ratio test for each draft token separately, bool [N]."""
    mass = drafts.mass()
    # The minimum refuses tokens of mass 0. It changes nothing else, because the noise is below 1.
    target = at_tokens(drafts, target_probs).minimum(mass)
    return (drafts.accept_noise() * mass < target) & drafts.real


def at_tokens(drafts: DraftBatch, target_probs: torch.Tensor) -> torch.Tensor:
    """Return p(K) per draft token, float32 [N]; undefined for no token (-1)."""
    return target_probs.gather(1, drafts.ids[:, None])[:, 0]


def in_a_row(drafts: DraftBatch, accept: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens before each draft's first rejection, int64 [B].

    `accept`, bool [N], is True for tokens that pass by themselves.
    """
    ends = torch.add(drafts.place_of, accept, alpha=drafts.width)  # accepted: behind every draft
    return drafts.counts.scatter_reduce(0, drafts.request_of, ends, "amin")


def corrected(
    drafts: DraftBatch,
    target_probs: torch.Tensor,
    accepted: torch.Tensor,
    support: torch.Tensor | None,
    bonus: torch.Tensor,
) -> Verdict:
    """Append the bonus token or a recovered token, drawn from (support * p - q)+.

    A recovered token is drawn even for requests that get a bonus token, because selecting the
    others would synchronize with the device.
    """
    some, uniform = drafts.drafted, drafts.correct_noise()
    every = len(some) == drafts.size
    ends, last = (accepted, bonus) if every else (accepted[some], bonus[some])
    if support is not None and not every:
        support = support[some]
    places = (drafts.heads + ends).minimum(drafts.tails)
    drawn = []
    for part in slices(len(some), target_probs.shape[1], target_probs.device):
        own = target_probs.index_select(0, places[part])
        rest = drafts.residual(own, places[part], None if support is None else support[part])
        # If p equals q, rounding can leave nothing; then p itself is the right distribution.
        empty = rest.sum(-1, keepdim=True) <= 0
        drawn.append(choose(torch.where(empty, own, rest), uniform[part]))
    if drawn:
        recovered = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        last = torch.where(ends < drafts.sizes, recovered, last)
    if not every:
        last = bonus.index_copy(0, some, last)
    return _emitted(drafts, drafts.ids, accepted, accepted, last)


def _emitted(
    drafts: DraftBatch,
    values: torch.Tensor,
    accepted: torch.Tensor,
    at: torch.Tensor,
    last: torch.Tensor,
) -> Verdict:
    """Return a verdict whose tokens are values [N] with `last` [B] at the places `at` [B]."""
    if len(values):
        tokens = values[drafts.grid].scatter_(1, at[:, None], last[:, None])
    else:
        tokens = last[:, None].repeat(1, len(drafts.columns))
    return Verdict.of(tokens, accepted, drafts.columns)
