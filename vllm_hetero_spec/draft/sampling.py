# SPDX-License-Identifier: Apache-2.0
"""Sampled drafts: draws from the drafter's rows, and the draft_probs of each draw.

The draft_probs are computed from the same row as the draw, so they are exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.draft.token_map import TokenMap, probabilities
from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.staging import Send
from vllm_hetero_spec.verify.noise import DRAFT, choose, keys_of, slices, uniform
from vllm_hetero_spec.verify.race import first_arrivals, race


@dataclass(frozen=True)
class DraftSampling:
    """Sampling parameters of one request's draft.

    Attributes:
        temperature: The request's own; above 0.
        top_k: 0 for no limit.
        top_p: 1 for no limit.
        place: Index of the first draft token in the request's output.
        races: True if the target chooses its tokens by exponential races (`verify.race`).
        first: Index of the first random number to use for this place.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    place: int = 0
    races: bool = False
    first: int = 0


@dataclass(frozen=True)
class SampledMethod:
    """A sampled drafting method, with its data on the device.

    Attributes:
        tokens: First target token that each drafter token proposes.
        lengths: int64 [V_D], number of target tokens that a drafter token spells; used by races
            only.
        spell: Returns all target tokens that a drafter token proposes.
        likeliest: Only so many most likely drafter tokens are drawn from; None for all.
    """

    tokens: TokenMap
    lengths: torch.Tensor
    spell: Callable[[int], Sequence[int]]
    likeliest: int | None = None


class Arrivals(NamedTuple):
    """The first m arrivals in the races of n rows.

    Attributes:
        tokens: int64 [n, m], target ids.
        fed: int64 [n, m], the drafter token to feed for each; any id if nothing arrives.
        speeds: float32 [n, m], 1 / arrival times, decreasing; 0 if nothing arrives.
        shares: float32 [n, m], probabilities of the tokens.
    """

    tokens: torch.Tensor
    fed: torch.Tensor
    speeds: torch.Tensor
    shares: torch.Tensor


class BatchSampler:
    """Sampler of the n sampled requests of one drafting round.

    Args:
        rows: Indices of the n requests in the batch.
        steps: Number of drafter tokens to draw for each request; not increasing.
        send: Copies arrays to the device; called once.
        beside: Number of first arrivals to keep of each race.

    Attributes:
        index: int64 [n], `rows` on the device.
        arrivals: First arrivals of the last races; None without races or if `beside` is 0.
    """

    def __init__(
        self,
        rows: Sequence[int],
        draws: Sequence[DraftSampling],
        steps: Sequence[int],
        method: SampledMethod,
        send: Send,
        beside: int = 0,
    ) -> None:
        tokens = method.tokens
        self.arrivals: Arrivals | None = None
        self._beside = beside if draws[0].races else 0
        self._tokens, self._lengths, self._likeliest = tokens, method.lengths, method.likeliest
        seeds, places, first = np.array(
            [(draw.seed, draw.place, draw.first) for draw in draws], np.int64
        ).T
        numbers = first[:, None] + np.arange(max(steps))
        self.index, self._temperature, top_k, top_p, self._seeds, places, self._shares = send(
            np.array(rows, np.int64),
            np.array([draw.temperature for draw in draws], np.float32),
            np.array([draw.top_k for draw in draws], np.int64),
            np.array([draw.top_p for draw in draws], np.float32),
            seeds,
            places,
            uniform(keys_of(seeds, DRAFT), places, numbers).T,
        )
        self._top_k = top_k if any(draw.top_k for draw in draws) else None
        self._top_p = top_p if min(draw.top_p for draw in draws) < 1 else None
        # Either all requests race or none.
        self._raced = places.clone() if draws[0].races else None
        self._table = tokens.table(sum(steps))
        self._used = self._steps = 0

    @property
    def draft_probs(self) -> torch.Tensor:
        """float32 [R, V_T], distributions of the proposed tokens, one row per draw, in order."""
        return self._table[: self._used, :-1]

    @property
    def stand_ins(self) -> torch.Tensor | None:
        """int64 [R], target tokens that replace null proposals; None if there can be none."""
        return None if self._tokens.renormalise else fast_argmax(self.draft_probs)

    def rows(self, logits: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
        """Return probabilities, float32 [m, V_D], for logits [m, V_D] of requests `index`."""
        rows = torch.empty_like(logits, dtype=torch.float32)
        for part in slices(len(logits), logits.shape[1], logits.device):
            rows[part] = self._rows(logits[part], index[part])
        return rows

    def _rows(self, logits: torch.Tensor, index: Sequence[int] | slice) -> torch.Tensor:
        forbidden = self._tokens.forbidden(logits.shape[1])
        if self._likeliest is not None:
            logits = _only(self._likeliest, logits if forbidden is None else logits + forbidden)
            forbidden = None
        return probabilities(
            logits,
            self._temperature[index],
            None if self._top_k is None else self._top_k[index],
            None if self._top_p is None else self._top_p[index],
            forbidden,
        ).nan_to_num_()  # a row without tokens that may be drawn becomes 0

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw a drafter id for each of the first m requests, and add its row to `draft_probs`.

        `logits` are float [m, V_D]. Returns int64 [m].
        """
        count = len(logits)
        table = self._table[self._used : self._used + count]
        self._used += count
        seeds, shares = self._seeds[:count], self._shares[self._steps, :count]
        self._steps += 1
        drawn, arrivals = [], []
        for part in slices(len(logits), logits.shape[1], logits.device):
            q = self._rows(logits[part], part)
            self._tokens.add_draft_probs(q, table[part])
            if self._raced is not None:
                raced = table[part, :-1], seeds[part], self._raced[part]
                if self._beside:
                    arrivals.append(self._arrived(q, *raced))
                    winners = arrivals[-1].tokens[:, 0]
                else:
                    winners = race(*raced)
                q = q[:, : len(self._tokens.first)] * (self._tokens.first == winners[:, None])
            drawn.append(choose(q, shares[part]))
        chosen = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        if arrivals:
            self.arrivals = Arrivals(*map(torch.cat, zip(*arrivals, strict=True)))
            self.arrivals.fed[:, 0] = chosen
        if self._raced is not None:
            self._raced[:count] += self._lengths[chosen]
        return chosen

    def _arrived(
        self, q: torch.Tensor, psi: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor
    ) -> Arrivals:
        """Run the races of rows q with draft_probs psi; other arguments as in `race`."""
        ids, speeds = first_arrivals(psi, seeds, places, self._beside)
        fed = self._tokens.likeliest(q).gather(1, ids).clamp_max_(len(self._tokens.first) - 1)
        return Arrivals(ids, fed, speeds, psi.gather(1, ids))

    def skip(self, first: int, chosen: torch.Tensor, times: int = 1) -> None:
        """Advance the race places of the requests from `first` on by one chosen token each.

        `chosen` are drafter ids, int32 [n - first]; `times` is 1, or -1 to undo it.
        """
        assert self._raced is not None
        self._raced[first:] += times * self._lengths[chosen.long()]


def _only(count: int, logits: torch.Tensor) -> torch.Tensor:
    """Return logits [B, V_D] with exactly `count` tokens per row, the most likely; others -inf."""
    kept = logits.topk(min(count, logits.shape[1]))
    return torch.full_like(logits, float("-inf")).scatter_(1, kept.indices, kept.values)
