# SPDX-License-Identifier: Apache-2.0
"""Verdict over a batch of greedy and sampled requests, for both model runners."""

from collections.abc import Callable

import torch

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
