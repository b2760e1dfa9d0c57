# SPDX-License-Identifier: Apache-2.0
"""A verdict over a mixed batch of any model runner."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_hetero_spec.trees.walk import TreeBatch, greedy_walk
from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.rules import greedy_rule

# See `verify.rules.token_rule`.
Rule = Callable[[DraftBatch, torch.Tensor, torch.Tensor], Verdict]


def verdict_of(
    rule: Rule,
    drafts: DraftBatch,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | bool,
    best: Callable[[], torch.Tensor],
    target_probs: Callable[[], torch.Tensor],
) -> Verdict:
    """Greedy requests by comparison, random ones by the rule, each blind to the other.

    Args:
        rule: For the random ones.
        drafts: N draft tokens of B requests.
        bonus: int64 [B], the target's choice behind each draft.
        is_greedy: bool [B], the greedy requests; one value where all are alike.
        best: Gives the target's first choice at each draft token, int64 [N]; called before
            `target_probs`, and where it is needed.
        target_probs: Gives float32 [N, V], see `verify.rules`; called where it is needed.
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
    """What the trees of a batch emit.

    Attributes:
        trees: bool [B], the requests that have one.
        walks: bool [B], those whose tree has been followed.
        tokens: int64 [B, K + 1], see `Verdict`; of the others without meaning, as the next.
        accepted: int64 [B].
        order: int64 [R], the batch's rows so that a request's token i was chosen in its row i.
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
        best: int64 [R], what the target chooses in each row: its likeliest token, or a race's.
        walks: See Walk.
        place_of: int64 [R], of each row among its request's.
    """
    verdict = greedy_walk(trees, best)
    visited = verdict.rows[trees.request_of, place_of]
    counts = walks[trees.request_of] & (visited >= 0)
    order = torch.where(counts, visited, torch.arange(len(best), device=best.device))
    deepest = torch.zeros_like(trees.depths[: trees.size])
    deepest = deepest.scatter_reduce(0, trees.request_of, trees.depths, "amax")
    return Walk(deepest > 0, walks, verdict.tokens, verdict.accepted, order)
