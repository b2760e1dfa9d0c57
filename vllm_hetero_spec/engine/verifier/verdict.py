# SPDX-License-Identifier: Apache-2.0
"""A verdict over a mixed batch of any model runner."""

from collections.abc import Callable

import torch

from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.rules import greedy_rule

# See `verify.rules.token_rule`.
Rule = Callable[[DraftBatch, torch.Tensor, torch.Tensor], Verdict]


def verdict_of(
    rule: Rule,
    drafts: DraftBatch,
    bonus: torch.Tensor,
    cold: torch.Tensor | bool,
    best: Callable[[], torch.Tensor],
    target_probs: Callable[[], torch.Tensor],
) -> Verdict:
    """Greedy requests by comparison, random ones by the rule, each blind to the other.

    Args:
        rule: For the random ones.
        drafts: N draft tokens of B requests.
        bonus: int64 [B], the target's choice behind each draft.
        cold: bool [B], the greedy requests; one value where all are alike.
        best: Gives the target's first choice at each draft token, int64 [N]; called before
            `target_probs`, and where it is needed.
        target_probs: Gives float32 [N, V], see `verify.rules`; called where it is needed.
    """
    greedy = None if cold is False else greedy_rule(drafts, best(), bonus)
    if cold is True:
        assert greedy is not None
        return greedy
    verdict = rule(drafts, target_probs(), bonus)
    if greedy is None:
        return verdict
    assert isinstance(cold, torch.Tensor)
    return Verdict(
        torch.where(cold[:, None], greedy.tokens, verdict.tokens),
        torch.where(cold, greedy.accepted, verdict.accepted),
    )
