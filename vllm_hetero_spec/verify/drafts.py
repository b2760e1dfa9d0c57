# SPDX-License-Identifier: Apache-2.0
"""Drafts of a batch with the probabilities they were drawn from, and what is made of them.

A draft token's row is its exact distribution given everything revealed before it: dense over the
target's vocabulary, or one-hot where the token is certain (greedy drafts, the rest of a token
already drawn). One-hot rows are never stored. Drafts may differ in length, or have none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.noise import ACCEPT, CORRECT, keys_of, uniform

# What fills a verdict's line after the last emitted token.
FILLER = -1


@dataclass(frozen=True)
class DraftBatch:
    """Drafts of B requests, N tokens in all, one request's after the other's; made by `of`.

    What follows from the lengths is known on the host, and lies on the device from the start: no
    rule has to ask the device for a number.

    Attributes:
        tokens: int64 [N], target ids; -1 stands for no token and is never accepted.
        lengths: Tokens of each request's draft, [B], on the host.
        counts: int64 [B], `lengths` on the device.
        starts: int64 [B], index of each request's first token in `tokens`.
        drafted: int64 [D], the requests that have a draft.
        request_of: int64 [N], the request of each token.
        place_of: int64 [N], each token's place in its request's draft.
        later: int64 [N - D], the tokens that follow another of their draft.
        places: int64 [B], index of each draft's first token in its request's output; None where
            nothing is random, as `seeds`.
        seeds: int64 [B], from which each request's random choices follow (`verify.noise`).
        noise: float64 [N + D], `accept_noise` and `correct_noise`; None where the host does not
            know the places.
        keys: int64 [N + D], see `verify.noise.keys_of`; None where there is `noise`.
        draft_probs: float32 [R, V] each, distributions that tokens were drawn from; a row may add
            up to less than 1, the rest standing for "nothing proposed". One table for each round
            of drafting, as it lies; none where all tokens are certain.
        row_of: int64 [N], row of `draft_probs`, numbered through all tables, -1 for a certain
            token; None where all are.
        req_ids: Of the requests, [B]; empty where they do not exist.
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
        """A batch of what is known on the host; see the attributes.

        Args:
            tokens: int64 [N].
            lengths: [B].
            seeds: [B]; None where nothing is random: then nobody asks for `places`.
            places: [B], or where `tokens` is already.
            draft_probs: With `row_of` [N], where tokens were drawn.
            row_of: [N].
            req_ids: [B].
            send: Brings arrays to where `tokens` is; called once.
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
        """float64 [N] uniform in [0, 1): whether each token is accepted."""
        return self._noise[: len(self.request_of)]

    def correct_noise(self) -> torch.Tensor:
        """float64 [D] uniform in [0, 1): which token corrects each draft."""
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
        """[N] values as [B, K + 1], `fill` behind the end of each draft, at least once."""
        table = values.new_full((self.size, self.width + 1), fill)
        table[self.request_of, self.place_of] = values
        return table

    def mass(self) -> torch.Tensor:
        """float32 [N], probability with which each token was proposed."""
        if self.row_of is None:
            return torch.ones(len(self.tokens), device=self.tokens.device)
        tokens = self.tokens.clamp_min(0)
        drawn = self._looked_up(self.row_of, lambda table, rows: table[rows, tokens])
        return torch.where(self.row_of >= 0, drawn, 1.0)

    def drawn_from(self, row_of: torch.Tensor) -> torch.Tensor:
        """float32 [n, V], the rows `row_of` int64 [n] of `draft_probs`; any row for -1."""
        return self._looked_up(row_of, lambda table, rows: table.index_select(0, rows))

    def _looked_up(
        self, row_of: torch.Tensor, take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What `take` gives for a table and int64 [n] rows of it, from each row's own table."""
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
        """float32 [n, V], (support * target_probs - draft_probs)+ at some tokens.

        Args:
            target_probs: float32 [N, V], the target's at each token.
            index: int64 [n] into `tokens`; few of them at a time, to bound the memory.
            support: float32 [n]; 1 where None.
        """
        rest = target_probs.index_select(0, index)  # on a CPU faster than by brackets
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
    """Of what the host knows of a batch: the random numbers, or where it does not know the places,
    what they follow from."""
    of = np.concatenate([known["request_of"], known["drafted"]])
    purposes = np.array([ACCEPT, CORRECT]).repeat([len(known["request_of"]), len(known["drafted"])])
    keys = keys_of(known["seeds"][of], purposes)
    if "places" not in known:
        return {"keys": keys}
    index = np.concatenate([known["place_of"], np.zeros_like(known["drafted"])])
    return {"noise": uniform(keys, known["places"][of], index)}


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
    def of(cls, tokens: torch.Tensor, accepted: torch.Tensor) -> "Verdict":
        """The first `accepted` [B] of each request's `tokens` [B, K + 1], and one more."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return cls(tokens.masked_fill(places > accepted[:, None], FILLER), accepted)
