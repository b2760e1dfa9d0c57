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
        drafted: int64 [D], the requests with a nonempty draft.
        heads, tails: int64 [D], index of the first and the last token of each nonempty draft.
        sizes: int64 [D], length of each nonempty draft.
        request_of: int64 [N], the request of each token.
        place_of: int64 [N], index of each token in its draft.
        later: int64 [N - D], the tokens that are not the first of their draft.
        columns: int64 [C + 1], 0 to C, the columns of a verdict.
        grid: int64 [B, C + 1], index of the token in each place of a verdict; any token behind a
            draft.
        rows: int64 [N], the row of logits of each token; None if `of` got no `first_rows`.
        ends: int64 [B], the row of logits after each draft; None as `rows`.
        places: int64 [B], index of each draft's first token in its request's output; None if the
            batch needs no random numbers.
        seeds: int64 [B], seeds of the requests' random numbers (`verify.noise`); None as `places`.
        noise: float64 [N + D], `accept_noise` and `correct_noise`; None as `places`.
        draft_probs: float32 [R, V] each, one table per drafting round, not copied; empty if all
            tokens are certain. A row may sum to less than 1; the rest is "nothing proposed".
        row_of: int64 [N], row of each token, counted across all tables, or -1 if it is certain;
            None if all are certain.
        row_at: int64 [N], `row_of`, but 0 for a certain token; None as `row_of`.
        weights: float32 [2, N]: 1 if a token has a row, else 0; then -2 if it is certain, else 0.
            None if no token is certain.
        req_ids: Request ids, [B]; empty if there are none.
    """

    tokens: torch.Tensor
    lengths: Sequence[int]
    counts: torch.Tensor
    drafted: torch.Tensor
    heads: torch.Tensor
    tails: torch.Tensor
    sizes: torch.Tensor
    request_of: torch.Tensor
    place_of: torch.Tensor
    later: torch.Tensor
    columns: torch.Tensor
    grid: torch.Tensor
    rows: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    places: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    draft_probs: Sequence[torch.Tensor] = ()
    row_of: torch.Tensor | None = None
    row_at: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    req_ids: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        tokens: torch.Tensor,
        lengths: Sequence[int],
        seeds: Sequence[int] | np.ndarray | None,
        places: Sequence[int] | None,
        draft_probs: Sequence[torch.Tensor] = (),
        row_of: Sequence[int] = (),
        req_ids: Sequence[str] = (),
        send: Send = on_host,
        first_rows: np.ndarray | None = None,
        room: int = 0,
    ) -> "DraftBatch":
        """Build a batch from host data; the arguments are attributes of the class.

        Args:
            seeds: None if the batch needs no random numbers; then `places` is unused.
            row_of: Required with `draft_probs`.
            send: Copies arrays to the device of `tokens`; called once.
            first_rows: int64 [B], first row of logits of each request; a draft's rows are adjacent.
            room: Minimum of C, which otherwise is K, the length of the longest draft.
        """
        counts = np.array(lengths, np.int64)
        starts = counts.cumsum() - counts
        request_of = np.arange(len(counts)).repeat(counts)
        place_of = np.arange(len(request_of)) - starts[request_of]
        drafted = np.flatnonzero(counts)
        columns = np.arange(max(int(counts.max(initial=0)), room) + 1)
        of_tokens = {"request_of": request_of, "place_of": place_of}
        of_requests = {"counts": counts}
        of_drafts = {
            "drafted": drafted,
            "heads": starts[drafted],
            "tails": (starts + counts - 1)[drafted],
            "sizes": counts[drafted],
        }
        others = {
            "later": np.flatnonzero(place_of),
            "columns": columns,
            "grid": np.minimum(starts[:, None] + columns, max(len(request_of) - 1, 0)),
        }
        certain = np.ones(len(request_of), bool)
        if draft_probs:
            of_tokens["row_of"] = np.array(row_of, np.int64)
            of_tokens["row_at"] = of_tokens["row_of"].clip(0)
            certain = of_tokens["row_of"] < 0
        if certain.any():
            others["weights"] = np.stack([~certain, -2.0 * certain]).astype(np.float32)
        if first_rows is not None:
            of_tokens["rows"] = first_rows[request_of] + place_of
            of_requests["ends"] = first_rows + counts
        if seeds is not None:
            of_requests["seeds"] = np.array(seeds, np.int64)
            of_requests["places"] = np.array(places, np.int64)
            others["noise"] = _noise_of(of_tokens | of_requests | of_drafts)
        groups = of_tokens, of_requests, of_drafts
        stacked = (np.stack(list(group.values())) for group in groups)
        sent = send(*stacked, *others.values())
        there = dict(zip(others, sent[len(groups) :], strict=True))
        for group, matrix in zip(groups, sent, strict=False):
            there |= dict(zip(group, matrix.unbind(0), strict=True))
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

    @property
    def _noise(self) -> torch.Tensor:
        assert self.noise is not None, "a batch without seeds"
        return self.noise

    @cached_property
    def ids(self) -> torch.Tensor:
        """`tokens`, but 0 for no token: valid ids, int64 [N]."""
        return self.tokens.clamp_min(0)

    @cached_property
    def real(self) -> torch.Tensor:
        """True for tokens, False for no token, bool [N]."""
        return self.tokens >= 0

    @cached_property
    def _real_weights(self) -> torch.Tensor:
        """`weights`, but 0 instead of -2 for no token, float32 [2, N]."""
        assert self.weights is not None
        return torch.where(self.real, self.weights, self.weights.clamp_min(0.0))

    def padded(self, values: torch.Tensor, fill: float | int | bool) -> torch.Tensor:
        """Return values [N] as [B, K + 1], with at least one `fill` after each draft."""
        table = values.new_full((self.size, self.width + 1), fill)
        table[self.request_of, self.place_of] = values
        return table

    def mass(self) -> torch.Tensor:
        """Return the probability with which each token was proposed, float32 [N]."""
        if self.row_of is None or self.row_at is None:
            return torch.ones(len(self.tokens), device=self.tokens.device)
        drawn = self._looked_up(self.row_at, lambda table, rows: table[rows, self.ids])
        return drawn if self.weights is None else drawn.masked_fill_(self.row_of < 0, 1.0)

    def drawn_from(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, V], some rows of `draft_probs`, int64 [n], not negative."""
        return self._looked_up(rows, lambda table, rows: table.index_select(0, rows))

    def _looked_up(
        self, rows: torch.Tensor, take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of `take(table, rows)` from each row's own table; rows int64 [n]."""
        if len(self.draft_probs) == 1:
            return take(self.draft_probs[0], rows)
        first, found = 0, rows
        for table in self.draft_probs:
            own = rows - first
            taken = take(table, own.clamp(0, len(table) - 1))
            is_here = (own >= 0).view(-1, *[1] * (taken.dim() - 1))
            found = torch.where(is_here, taken, found) if first else taken
            first += len(table)
        return found

    def residual(
        self, own: torch.Tensor, index: torch.Tensor, support: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (support * target_probs - draft_probs)+ at some tokens, float32 [n, V].

        Args:
            own: float32 [n, V], the rows of target_probs at these tokens; not changed.
            index: int64 [n] into `tokens`; n bounds the memory.
            support: float32 [n]; None for 1.
        """
        rest = own if support is None else own * support[:, None]
        weights = None if self.weights is None else self._real_weights[:, index, None]
        if self.row_at is not None:
            drawn = self.drawn_from(self.row_at[index])
            if weights is None:
                rest = rest - drawn
            else:
                rest = torch.addcmul(rest, drawn, weights[0], value=-1)
        if weights is not None:  # a certain token has probability 1 in its row; -2 is enough
            add = rest.scatter_add if rest is own else rest.scatter_add_
            rest = add(1, self.ids[index, None], weights[1])
        return rest.clamp_min_(0.0)


def _noise_of(known: dict[str, np.ndarray]) -> np.ndarray:
    """Return the random numbers of a batch, float64 [N + D]."""
    of = np.concatenate([known["request_of"], known["drafted"]])
    purposes = np.array([ACCEPT, CORRECT]).repeat([len(known["request_of"]), len(known["drafted"])])
    index = np.concatenate([known["place_of"], np.zeros_like(known["drafted"])])
    return uniform(keys_of(known["seeds"][of], purposes), known["places"][of], index)


@dataclass(frozen=True)
class Verdict:
    """Emitted tokens of a batch.

    Attributes:
        tokens: int64 [B, C + 1]: accepted draft tokens, then the recovered or bonus token, then
            FILLER. C is at least the length of the longest draft.
        accepted: int64 [B], number of accepted draft tokens.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def of(cls, tokens: torch.Tensor, accepted: torch.Tensor, columns: torch.Tensor) -> "Verdict":
        """Keep the first `accepted` [B] of each request's `tokens` [B, C + 1], and one more.

        `tokens` are changed in place. `columns` int64 [C + 1] are 0 to C.
        """
        return cls(tokens.masked_fill_(columns > accepted[:, None], FILLER), accepted)
