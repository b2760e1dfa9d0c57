# SPDX-License-Identifier: Apache-2.0
"""The result of every drafting method: draft tokens with the data that verification needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# Likeliest drafter tokens to draw from, if rows go to another process or node. A dense row has one
# float32 per token of the target's vocabulary.
SPARSE_TOP_K = 64


@dataclass(frozen=True)
class DraftProbs:
    """The distributions that the tokens of one draft were sampled from.

    Attributes:
        rows: float32 [R, V_T], shared by all requests of a drafting round.
        row_of: Row of each draft token; -1 if the token was certain (not sampled).
    """

    rows: torch.Tensor
    row_of: Sequence[int]


def confidences_of(peaks: Sequence[float], ends: Sequence[int]) -> list[float]:
    """Return for each target token the product of `peaks` that no earlier target token needs.

    Args:
        peaks: The drafter's largest probability at each of its tokens.
        ends: Number of leading drafter tokens that each target token needs.
    """
    confidences, start = [], 0
    for end in ends:
        confidences.append(math.prod(peaks[start:end]))
        start = max(start, end)
    return confidences


class Draft(NamedTuple):
    """A draft of one request: a tree of target tokens, usually a chain.

    Attributes:
        tokens: Target ids; each one comes after its parent.
        parents: Index of each token's parent; -1 if the token directly continues the request.
        confidences: One per token if requested, else empty. Each is known before its token is
            drawn, so that a draft may be shortened by it without loss.
        draft_probs: None if all tokens are certain.
        rows: Rows of a tree in the target's forward, `trees.layout.TreeRows`; None for a chain.
            A draft with rows is not shortened anymore.
        explored: All candidates of a chain that may still become a tree.
    """

    req_id: str
    tokens: list[int]
    parents: Sequence[int]
    confidences: Sequence[float] = ()
    draft_probs: DraftProbs | None = None
    rows: Any = None
    explored: Any = None

    @property
    def fed(self) -> list[int]:
        """Target ids that the scheduler receives and the target is fed."""
        return self.tokens if self.rows is None else self.rows.tokens

    @property
    def depth(self) -> int:
        """Number of tokens of the longest path."""
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
        """Return a draft in which each token continues the previous one."""
        return cls(req_id, tokens, range(-1, len(tokens) - 1), confidences, draft_probs)

    def common(self, chain: Sequence[int]) -> list[int]:
        """Return the longest prefix of a chain that is a path of this tree."""
        node, path = -1, list[int]()
        for token in chain:
            children = (i for i, parent in enumerate(self.parents) if parent == node)
            node = next((i for i in children if self.tokens[i] == token), len(self.tokens))
            if node == len(self.tokens):
                break
            path.append(token)
        return path

    def first(self, count: int) -> "Draft":
        """Return the first `count` tokens: a tree again, because parents precede children."""
        if count >= len(self.tokens):
            return self
        assert self.rows is None, "the draft has already been laid out"
        probs = self.draft_probs
        if probs is not None:
            probs = DraftProbs(probs.rows, probs.row_of[:count])
        return self._replace(
            tokens=self.tokens[:count],
            parents=self.parents[:count],
            confidences=self.confidences[:count],
            draft_probs=probs,
        )


def pack_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Pack rows of `draft_probs`, float32 [R, V_T], with at most `count` (C) nonzero entries.

    Returns:
        int32 [R, 2, C]: target ids, and the bits of their float32 probabilities, padded with 0.
    """
    kept = rows.topk(min(count, rows.shape[1]))
    packed = torch.zeros((len(rows), 2, count), dtype=torch.int32, device=rows.device)
    packed[:, 0, : kept.indices.shape[1]] = kept.indices
    packed[:, 1, : kept.values.shape[1]] = kept.values.view(torch.int32)
    return packed


def unpack_rows(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return dense rows, float32 [R, width], from the result of `pack_rows`."""
    values = packed[:, 1].contiguous().view(torch.float32)
    rows = values.new_zeros((len(packed), width))
    return rows.scatter_add_(1, packed[:, 0].long(), values)
