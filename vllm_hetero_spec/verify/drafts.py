# SPDX-License-Identifier: Apache-2.0
"""Drafts of a batch with the probabilities they were drawn from, and what is made of them.

A draft token's row is its exact distribution given everything revealed before it: dense over the
target's vocabulary, or one-hot where the token is certain (greedy drafts, the rest of a token
already drawn). One-hot rows are never stored. Drafts may differ in length, or have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

# What fills a verdict's line after the last emitted token.
FILLER = -1


@dataclass(frozen=True)
class DraftBatch:
    """Drafts of B requests, N tokens in all, one request's after the other's.

    Attributes:
        tokens: int64 [N], target ids; -1 stands for no token and is never accepted.
        lengths: Tokens of each request's draft, [B].
        draft_probs: float32 [R, V], distributions that tokens were drawn from; a row may add up to
            less than 1, the rest standing for "nothing proposed".
        row_of: int64 [N], row of `draft_probs`, -1 for a certain token; None where all are certain.
    """

    tokens: torch.Tensor
    lengths: Sequence[int]
    draft_probs: torch.Tensor | None = None
    row_of: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Number of requests, B."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Length of the longest draft, K."""
        return max(self.lengths, default=0)

    @cached_property
    def counts(self) -> torch.Tensor:
        """int64 [B], `lengths` on the device."""
        return torch.tensor(self.lengths, dtype=torch.int64).to(self.tokens.device)

    @cached_property
    def starts(self) -> torch.Tensor:
        """int64 [B], index of each request's first token in `tokens`."""
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def request_of(self) -> torch.Tensor:
        """int64 [N], the request of each token."""
        every = torch.arange(self.size, device=self.tokens.device)
        return every.repeat_interleave(self.counts, output_size=len(self.tokens))

    @cached_property
    def place_of(self) -> torch.Tensor:
        """int64 [N], each token's place in its request's draft."""
        index = torch.arange(len(self.tokens), device=self.tokens.device)
        return index - self.starts[self.request_of]

    def padded(self, values: torch.Tensor, fill: float | int | bool) -> torch.Tensor:
        """[N] values as [B, K], `fill` behind the end of each draft."""
        table = values.new_full((self.size, self.width), fill)
        table[self.request_of, self.place_of] = values
        return table

    def mass(self) -> torch.Tensor:
        """float32 [N], probability with which each token was proposed."""
        if self.draft_probs is None or self.row_of is None:
            return torch.ones(len(self.tokens), device=self.tokens.device)
        drawn = self.draft_probs[self.row_of.clamp_min(0), self.tokens.clamp_min(0)]
        return torch.where(self.row_of >= 0, drawn, 1.0)

    def residual(
        self, target_probs: torch.Tensor, index: torch.Tensor, support: torch.Tensor
    ) -> torch.Tensor:
        """float32 [n, V], (support * target_probs - draft_probs)+ at some tokens.

        Args:
            target_probs: float32 [N, V], the target's at each token.
            index: int64 [n] into `tokens`; few of them at a time, to bound the memory.
            support: float32 [n].
        """
        rest = target_probs[index].mul_(support[:, None])
        tokens = self.tokens[index, None]
        dense = torch.zeros_like(index, dtype=torch.bool)
        if self.draft_probs is not None and self.row_of is not None:
            row_of = self.row_of[index]
            dense = row_of >= 0
            probs = self.draft_probs[row_of.clamp_min(0)]
            rest.addcmul_(probs, dense[:, None].to(rest.dtype), value=-1)
        certain = ~dense[:, None] & (tokens >= 0)
        places = tokens.clamp_min(0)
        rest.scatter_(1, places, rest.gather(1, places).masked_fill(certain, 0.0))
        return rest.clamp_min_(0.0)


@dataclass(frozen=True)
class Verdict:
    """What a batch emits.

    Attributes:
        tokens: int64 [B, K + 1]: accepted draft tokens, then the corrected or the bonus token,
            then FILLER.
        accepted: int64 [B], accepted draft tokens.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def of(cls, drafts: DraftBatch, accepted: torch.Tensor, last: torch.Tensor) -> "Verdict":
        """`accepted` [B] draft tokens of each request, followed by its `last` [B] token."""
        tokens = drafts.tokens.new_full((drafts.size, drafts.width + 1), FILLER)
        if drafts.width:
            places = torch.arange(drafts.width, device=accepted.device)
            table = drafts.padded(drafts.tokens, FILLER)
            tokens[:, :-1] = torch.where(places < accepted[:, None], table, FILLER)
        tokens.scatter_(1, accepted[:, None], last[:, None].to(tokens.dtype))
        return cls(tokens, accepted)
