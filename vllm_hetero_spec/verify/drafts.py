# SPDX-License-Identifier: Apache-2.0
"""Draft tokens of a batch with their draft_probs, and the result of verification.

The row of a draft token is its exact distribution given all tokens before it. The row is dense
over the target's vocabulary, or one-hot if the token is certain: a greedy draft token, or a further
token of a drafter token that was already drawn. One-hot rows are not stored. Drafts may differ in
length or be empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.noise import ACCEPT, CORRECT, keys_of, uniform

FILLER = -1  # fills a row of a verdict after the last emitted token


@dataclass(frozen=True)
class DraftBatch:
    """Drafts of B requests, N tokens in all, concatenated in request order; made by `of`.

    All indices that follow from the draft lengths are computed on the host and sent to the device
    once, so that no rule synchronizes with the device.

    Attributes:
        tokens: int64 [N], target ids; -1 is no token and is never accepted.
        lengths: Draft length of each request, [B], on the host.
        counts: int64 [B], `lengths` on the device.
        starts: int64 [B], index of each request's first token in `tokens`.
        drafted: int64 [D], the requests with a nonempty draft.
        request_of: int64 [N], the request of each token.
        place_of: int64 [N], index of each token in its draft.
        later: int64 [N - D], the tokens that are not the first of their draft.
        places: int64 [B], index of each draft's first token in its request's output; None if the
            batch needs no random numbers.
        seeds: int64 [B], seeds of the requests' random numbers (`verify.noise`); None as `places`.
        noise: float64 [N + D], `accept_noise` and `correct_noise`; None if `places` are only on
            the device.
        keys: int64 [N + D], from `verify.noise.keys_of`; None if there is `noise`.
        draft_probs: float32 [R, V] each, one table per drafting round, not copied; empty if all
            tokens are certain. A row may sum to less than 1; the rest is "nothing proposed".
        row_of: int64 [N], row of each token, counted across all tables, or -1 if it is certain;
            None if all are certain.
        req_ids: Request ids, [B]; empty if there are none.
    """

    tokens: torch.Tensor
    lengths: Sequence[int]
    counts: torch.Tensor
    starts: torch.Tensor
    drafted: torch.Tensor
    request_of: torch.Tensor
    place_of: torch.Tensor
    later: torch.Tensor
    places: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    draft_probs: Sequence[torch.Tensor] = ()
    row_of: torch.Tensor | None = None
    req_ids: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        tokens: torch.Tensor,
        lengths: Sequence[int],
        seeds: Sequence[int] | np.ndarray | None,
        places: Sequence[int] | torch.Tensor | None,
        draft_probs: Sequence[torch.Tensor] = (),
        row_of: Sequence[int] = (),
        req_ids: Sequence[str] = (),
        send: Send = on_host,
    ) -> "DraftBatch":
        """Build a batch from host data; the arguments are attributes of the class.

        Args:
            seeds: None if the batch needs no random numbers; then `places` is unused.
            places: On the host, or a tensor on the device of `tokens`.
            row_of: Required with `draft_probs`.
            send: Copies arrays to the device of `tokens`; called once.
        """
        counts = np.array(lengths, np.int64)
        starts = counts.cumsum() - counts
        request_of = np.arange(len(counts)).repeat(counts)
        place_of = np.arange(len(request_of)) - starts[request_of]
        arrays = {
            "counts": counts,
            "starts": starts,
            "drafted": np.flatnonzero(counts),
            "request_of": request_of,
            "place_of": place_of,
            "later": np.flatnonzero(place_of),
        }
        if draft_probs:
            arrays["row_of"] = np.array(row_of, np.int64)
        there = {}
        if seeds is not None:
            arrays["seeds"] = np.array(seeds, np.int64)
            if isinstance(places, torch.Tensor):
                there["places"] = places
            else:
                arrays["places"] = np.array(places, np.int64)
            arrays |= _noise_of(arrays)
        there |= dict(zip(arrays, send(*arrays.values()), strict=True))
        return cls(tokens, lengths, draft_probs=draft_probs, req_ids=req_ids, **there)

    @property
    def size(self) -> int:
        """Number of requests, B."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Length of the longest draft, K."""
        return max(self.lengths, default=0)

    def accept_noise(self) -> torch.Tensor:
        """Return float64 [N], uniform in [0, 1), for the acceptance test of each token."""
        return self._noise[: len(self.request_of)]

    def correct_noise(self) -> torch.Tensor:
        """Return float64 [D], uniform in [0, 1), for the recovered token of each draft."""
        return self._noise[len(self.request_of) :]

    @cached_property
    def _noise(self) -> torch.Tensor:
        if self.noise is not None:
            return self.noise
        assert self.keys is not None, "a batch without seeds"
        assert self.places is not None
        of = torch.cat([self.request_of, self.drafted])
        index = torch.cat([self.place_of, torch.zeros_like(self.drafted)])
        return uniform(self.keys, self.places[of], index)

    def padded(self, values: torch.Tensor, fill: float | int | bool) -> torch.Tensor:
        """Return values [N] as [B, K + 1], with at least one `fill` after each draft."""
        table = values.new_full((self.size, self.width + 1), fill)
        table[self.request_of, self.place_of] = values
        return table

    def mass(self) -> torch.Tensor:
        """Return the probability with which each token was proposed, float32 [N]."""
        if self.row_of is None:
            return torch.ones(len(self.tokens), device=self.tokens.device)
        tokens = self.tokens.clamp_min(0)
        drawn = self._looked_up(self.row_of, lambda table, rows: table[rows, tokens])
        return torch.where(self.row_of >= 0, drawn, 1.0)

    def drawn_from(self, row_of: torch.Tensor) -> torch.Tensor:
        """Return rows `row_of`, int64 [n], of `draft_probs`: float32 [n, V]; any row for -1."""
        return self._looked_up(row_of, lambda table, rows: table.index_select(0, rows))

    def _looked_up(
        self, row_of: torch.Tensor, take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of `take(table, rows)` from each row's own table; rows int64 [n]."""
        first, found = 0, row_of
        for table in self.draft_probs:
            rows = row_of - first
            taken = take(table, rows.clamp(0, len(table) - 1))
            is_here = (rows >= 0).view(-1, *[1] * (taken.dim() - 1))
            found = torch.where(is_here, taken, found) if first else taken
            first += len(table)
        return found

    def residual(
        self, target_probs: torch.Tensor, index: torch.Tensor, support: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (support * target_probs - draft_probs)+ at some tokens, float32 [n, V].

        Args:
            target_probs: float32 [N, V].
            index: int64 [n] into `tokens`; n bounds the memory.
            support: float32 [n]; None for 1.
        """
        rest = target_probs.index_select(0, index)  # on a CPU faster than target_probs[index]
        if support is not None:
            rest.mul_(support[:, None])
        tokens = self.tokens[index, None]
        dense = torch.zeros_like(index, dtype=torch.bool)
        if self.row_of is not None:
            row_of = self.row_of[index]
            dense = row_of >= 0
            rest.addcmul_(self.drawn_from(row_of), dense[:, None].to(rest.dtype), value=-1)
        certain = ~dense[:, None] & (tokens >= 0)
        places = tokens.clamp_min(0)
        rest.scatter_(1, places, rest.gather(1, places).masked_fill(certain, 0.0))
        return rest.clamp_min_(0.0)


def _noise_of(known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the random numbers of a batch, or only their keys if the host lacks the places."""
    of = np.concatenate([known["request_of"], known["drafted"]])
    purposes = np.array([ACCEPT, CORRECT]).repeat([len(known["request_of"]), len(known["drafted"])])
    keys = keys_of(known["seeds"][of], purposes)
    if "places" not in known:
        return {"keys": keys}
    index = np.concatenate([known["place_of"], np.zeros_like(known["drafted"])])
    return {"noise": uniform(keys, known["places"][of], index)}


@dataclass(frozen=True)
class Verdict:
    """Emitted tokens of a batch.

    Attributes:
        tokens: int64 [B, K + 1]: accepted draft tokens, then the recovered or bonus token, then
            FILLER.
        accepted: int64 [B], number of accepted draft tokens.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def of(cls, tokens: torch.Tensor, accepted: torch.Tensor) -> "Verdict":
        """Keep the first `accepted` [B] of each request's `tokens` [B, K + 1], and one more."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return cls(tokens.masked_fill(places > accepted[:, None], FILLER), accepted)
