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

# Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
# Rows whose clocks exist at the same time, to bound the memory of a large vocabulary.
_CHUNK = 8


def race(rows: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The winner of each row's race.

    Args:
        rows: float [n, V], rates: probabilities, or any multiple of them.
        seeds: int64 [n], of each row's request.
        places: int64 [n], index of the token in the request's output.

    Returns:
        int64 [n] token ids; tokens of rate 0 never win.
    """
    winners = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    ids = torch.arange(rows.shape[-1], device=rows.device)
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        keys = _mixed(_mixed(seeds[part]) ^ _mixed(places[part] + 1))
        score = rows[part].to(torch.float64).log() - _log_arrivals(keys[:, None] + ids * _GAMMA)
        winners[part] = score.argmax(-1)
    return winners


def _log_arrivals(keys: torch.Tensor) -> torch.Tensor:
    """Logarithms of independent Exp(1) arrival times, one per key."""
    fraction = (_mixed(keys) >> 11) & ((1 << 53) - 1)
    uniform = (fraction.to(torch.float64) + 0.5) * 2.0**-53
    return (-uniform.log()).log()


def _mixed(keys: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function; integer overflow wraps around."""
    keys = keys + _GAMMA
    keys = (keys ^ _shifted(keys, 30)) * _MIX[0]
    keys = (keys ^ _shifted(keys, 27)) * _MIX[1]
    return keys ^ _shifted(keys, 31)


def _shifted(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: the sign bit does not follow."""
    return (keys >> bits) & ((1 << (64 - bits)) - 1)
