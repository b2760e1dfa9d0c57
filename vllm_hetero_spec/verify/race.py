# SPDX-License-Identifier: Apache-2.0
"""Exponential races: the first arrival of clocks with rates p is a draw from p.

A request's clocks depend only on its seed, the index of the token in its output (its place) and the
token id. A drafter that races its row on the same clocks predicts the target's draw. Requests
without drafts use the same races, so drafter, draft length and batch cannot change an output.

*Speculative Decoding via Exponential Races*; *Coupling without Communication and Drafter-Invariant
Speculative Decoding*. Never verify raced drafts with the ratio test: the output distribution would
be wrong.
"""

from collections.abc import Iterator

import torch

from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.verify.noise import RACE, keys_of, random_bits, slices

# Largest float32 below 1; it limits arrival times to about 16.6, so that none is infinite.
_LATEST = 1.0 - 2.0**-24


def race(rows: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the winner of each row's race.

    Args:
        rows: float32 [n, V], rates: probabilities or any multiple of them.
        places: int64 [n], index of the token in the request's output.

    Returns:
        int64 [n] token ids; tokens of rate 0 never win.
    """
    winners = torch.empty_like(seeds)
    for part, speeds in _speeds(rows, seeds, places):
        winners[part] = fast_argmax(speeds)
    return winners


def first_arrivals(
    rows: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` arrivals of each row's race; other arguments as in `race`.

    Returns:
        Token ids int64 [n, count], the winner first, and 1 / their arrival times, float32
        [n, count]. Tokens of rate 0 come last, with 0.
    """
    ids = torch.empty(len(seeds), count, dtype=torch.int64, device=rows.device)
    found = torch.empty(len(seeds), count, device=rows.device)
    for part, speeds in _speeds(rows, seeds, places):
        found[part], ids[part] = speeds.topk(count)
    return ids, found


def _speeds(
    rows: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield 1 / arrival time of all tokens, for a slice of the rows at a time."""
    ids = torch.arange(rows.shape[-1], device=rows.device)[None]
    keys = keys_of(seeds, RACE)
    for part in slices(len(seeds), rows.shape[-1], rows.device):
        yield part, rows[part] / _arrivals(random_bits(keys[part], places[part], ids))


def _arrivals(bits: torch.Tensor) -> torch.Tensor:
    """Return independent Exp(1) arrival times, float32, for numbers in [0, 2**53).

    float32 is enough, because small values win races and float32 is precise near 0.
    """
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-53).clamp_max_(_LATEST)
    return uniform.neg_().log1p_().neg_()
