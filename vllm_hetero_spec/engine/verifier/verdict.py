# SPDX-License-Identifier: Apache-2.0
"""Verdict over a batch of greedy and sampled requests, for both model runners."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_hetero_spec.trees.walk import TreeBatch, greedy_walk
from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.rules import greedy_rule

# Signature of `verify.rules.token_rule`.
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
    greedy = None if is_greedy is False else greedy_rule(drafts, best(), bonus)
    if is_greedy is True:
        assert greedy is not None
        return greedy
    verdict = rule(drafts, target_probs(), bonus)
    if greedy is None:
        return verdict
    assert isinstance(is_greedy, torch.Tensor)
    return Verdict(
        torch.where(is_greedy[:, None], greedy.tokens, verdict.tokens),
        torch.where(is_greedy, greedy.accepted, verdict.accepted),
    )


class Walk(NamedTuple):
    """Result of following the trees of a batch.

    Attributes:
        trees: bool [B], True for requests with a tree.
        walks: bool [B], True for requests whose tree was followed.
        tokens: int64 [B, K + 1], as in `Verdict`; undefined if `walks` is False.
        accepted: int64 [B], as in `Verdict`; undefined if `walks` is False.
        order: int64 [R]. In rows reordered by it, a request's token i was chosen in its row i.
    """

    trees: torch.Tensor
    walks: torch.Tensor
    tokens: torch.Tensor
    accepted: torch.Tensor
    order: torch.Tensor


def walk_of(
    trees: TreeBatch, best: torch.Tensor, walks: torch.Tensor, place_of: torch.Tensor
) -> Walk:
    """Follow the trees of a mixed batch.

    Args:
        trees: All R rows of all requests.
        best: int64 [R], the target's choice in each row: its likeliest token, or a race's winner.
        walks: `Walk.walks`.
        place_of: int64 [R], index of each row in its request.
    """
    verdict = greedy_walk(trees, best)
    visited = verdict.rows[trees.request_of, place_of]
    counts = walks[trees.request_of] & (visited >= 0)
    order = torch.where(counts, visited, torch.arange(len(best), device=best.device))
    deepest = torch.zeros_like(trees.depths[: trees.size])
    deepest = deepest.scatter_reduce(0, trees.request_of, trees.depths, "amax")
    return Walk(deepest > 0, walks, verdict.tokens, verdict.accepted, order)
