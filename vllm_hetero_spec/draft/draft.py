# SPDX-License-Identifier: Apache-2.0
"""A draft: what every method of drafting makes, and all that verification needs to know of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_hetero_spec.trees.growth import TreeCandidates
from vllm_hetero_spec.trees.layout import TreeRows


@dataclass(frozen=True)
class DraftProbs:
    """What the tokens of one draft were drawn from.

    Attributes:
        rows: float32 [R, V_T], shared by all requests of the round it was drafted in.
        row_of: The row of each draft token, -1 where the token was certain.
    """

    rows: torch.Tensor
    row_of: Sequence[int]


def confidences_of(peaks: Sequence[float], ends: Sequence[int]) -> list[float]:
    """The drafter's confidence in each target token: in all drafter tokens that only it needs.

    Args:
        peaks: The drafter's largest probability in the place of each of its tokens.
        ends: Leading ones that each target token needs.
    """
    confidences, start = [], 0
    for end in ends:
        confidences.append(math.prod(peaks[start:end]))
        start = max(start, end)
    return confidences


class Draft(NamedTuple):
    """A draft of one request: a tree of target tokens, of which a chain is the usual case.

    Attributes:
        req_id: The request.
        tokens: Target ids, each behind its parent.
        parents: Index of each token's parent, -1 for one that continues the text itself.
        confidences: Of each token, where they were asked for: known before it was drawn.
        draft_probs: What the tokens were drawn from; None where all are certain.
        rows: How its target is fed a tree (`trees.layout.lay_out`), which is not cut any more
            from then on; None for a chain.
        explored: All that was found, of a chain that may still become a tree.
    """

    req_id: str
    tokens: list[int]
    parents: Sequence[int]
    confidences: Sequence[float] = ()
    draft_probs: DraftProbs | None = None
    rows: TreeRows | None = None
    explored: TreeCandidates | None = None

    @property
    def fed(self) -> list[int]:
        """Target ids that its target is fed, as the scheduler has them."""
        return self.tokens if self.rows is None else self.rows.tokens

    @property
    def depth(self) -> int:
        """Tokens of its longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return max(depths, default=0)

    @classmethod
    def chain(
        cls,
        req_id: str,
        tokens: list[int],
        confidences: Sequence[float] = (),
        draft_probs: DraftProbs | None = None,
    ) -> "Draft":
        """A draft in which each token continues the one before."""
        return cls(req_id, tokens, range(-1, len(tokens) - 1), confidences, draft_probs)

    def common(self, chain: Sequence[int]) -> list[int]:
        """The leading tokens of a chain that are a path of this tree."""
        node, path = -1, list[int]()
        for token in chain:
            children = (i for i, parent in enumerate(self.parents) if parent == node)
            node = next((i for i in children if self.tokens[i] == token), len(self.tokens))
            if node == len(self.tokens):
                break
            path.append(token)
        return path

    def first(self, count: int) -> "Draft":
        """The first `count` tokens; parents come before their children, so it is a tree again."""
        if count >= len(self.tokens):
            return self
        assert self.rows is None, "it has been laid out"
        probs = self.draft_probs
        if probs is not None:
            probs = DraftProbs(probs.rows, probs.row_of[:count])
        return self._replace(
            tokens=self.tokens[:count],
            parents=self.parents[:count],
            confidences=self.confidences[:count],
            draft_probs=probs,
        )
