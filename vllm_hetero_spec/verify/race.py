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

import torch

from vllm_hetero_spec.verify.noise import slices

# Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
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
    keys = _mixed(_mixed(seeds + _GAMMA) ^ _mixed(places + 1 + _GAMMA))
    ids = torch.arange(1, rows.shape[-1] + 1, device=rows.device) * _GAMMA
    for part in slices(len(seeds), rows.shape[-1], rows.device):
        winners[part] = (rows[part] / _arrivals(keys[part, None] + ids)).argmax(-1)
    return winners


def _arrivals(keys: torch.Tensor) -> torch.Tensor:
    """Independent Exp(1) arrival times, float32, one per key; the keys are changed in place.

    Of a uniform number it is the small values that win races, and these float32 tells apart.
    """
    fraction = _mixed(keys).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    uniform = fraction.to(torch.float32).add_(0.5).mul_(2.0**-53).clamp_max_(_LATEST)
    return uniform.neg_().log1p_().neg_()


def _mixed(keys: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function, in place; integer overflow wraps around."""
    keys.bitwise_xor_(_shifted(keys, 30)).mul_(_MIX[0])
    keys.bitwise_xor_(_shifted(keys, 27)).mul_(_MIX[1])
    return keys.bitwise_xor_(_shifted(keys, 31))


def _shifted(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: the sign bit does not follow."""
    return (keys >> bits).bitwise_and_((1 << (64 - bits)) - 1)
