# SPDX-License-Identifier: Apache-2.0
"""Exponential races: the first arrival of clocks with rates p is a draw from p.

The clocks of a request depend on its seed, the place of the token in its output and the token id,
on nothing else. A drafter that races its own row against the same clocks guesses what the target
will draw; and as a request without a draft is raced in the same way, its output is a function of
seed and target alone: no drafter, lookahead or batch can change it.

*Speculative Decoding via Exponential Races*; *Coupling without Communication and Drafter-Invariant
Speculative Decoding*. Never verify with the ratio test what was drafted by these clocks: the law of
the result would be wrong.
"""

from collections.abc import Iterator

import torch

from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.verify.noise import RACE, keys_of, random_bits, slices

# Largest float32 below 1: nothing arrives later than what it stands for, about 16.6.
_LATEST = 1.0 - 2.0**-24


def race(rows: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The winner of each row's race.

    Args:
        rows: float32 [n, V], rates: probabilities, or any multiple of them.
        seeds: int64 [n], of each row's request.
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
    """The first arrivals of each row's race; arguments as of `race`.

    Returns:
        int64 [n, count] token ids, the winner first; float32 [n, count], 1 / their times: 0 for
        tokens of rate 0, which come last.
    """
    ids = torch.empty(len(seeds), count, dtype=torch.int64, device=rows.device)
    found = torch.empty(len(seeds), count, device=rows.device)
    for part, speeds in _speeds(rows, seeds, places):
        found[part], ids[part] = speeds.topk(count)
    return ids, found


def _speeds(
    rows: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """1 / the arrival times of all tokens, some rows at a time."""
    ids = torch.arange(rows.shape[-1], device=rows.device)[None]
    keys = keys_of(seeds, RACE)
    for part in slices(len(seeds), rows.shape[-1], rows.device):
        yield part, rows[part] / _arrivals(random_bits(keys[part], places[part], ids))


def _arrivals(bits: torch.Tensor) -> torch.Tensor:
    """Independent Exp(1) arrival times, float32, of numbers in [0, 2**53).

    Of a uniform number it is the small values that win races, and these float32 tells apart.
    """
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-53).clamp_max_(_LATEST)
    return uniform.neg_().log1p_().neg_()
