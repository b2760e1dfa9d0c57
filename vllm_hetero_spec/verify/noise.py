# SPDX-License-Identifier: Apache-2.0
"""Stateless random numbers, and draws that use them.

A request's numbers are a function of its seed, the index in its output where a draft begins (its
place), and their purpose. They are equal in any batch and on every rank, and no random state has to
be kept or restored.
"""

from collections.abc import Iterator
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch.nn.functional import pad

# Elements of a table that are processed at once. On a CPU they fit into its caches. On other
# devices the temporary tensors, about eight float32 tables, stay below 1 GiB.
_CELLS_ON_CPU = 1 << 20
_CELLS = 1 << 25
_BLOCK = 4096  # weights of a row that `choose` first sums up as one block, about
_BELOW_ONE = 1.0 - 2.0**-53  # the largest float64 below 1
# Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

# Purposes; each has its own stream (digits of pi). If drafting and verification shared random
# numbers, acceptance would depend on the proposed token, and the output would be biased.
RACE = 0
ACCEPT = 0x243F6A8885A308D3
CORRECT = 0x13198A2E03707344
DRAFT = 0x24093822299F31D0


# On the host or on a device; both compute equal numbers with the same operators.
Numbers = TypeVar("Numbers", torch.Tensor, np.ndarray)


def keys_of(seeds: Numbers, purpose: "int | Numbers") -> Numbers:
    """Return the keys for `random_bits` of seeds, int64 [n].

    `purpose` is `RACE`, `ACCEPT`, `CORRECT` or `DRAFT`, or int64 [n] of them.
    """
    return _mixed((seeds ^ purpose) + _GAMMA)


def random_bits(keys: Numbers, places: Numbers, index: Numbers) -> Numbers:
    """Return int64 numbers in [0, 2**53), independent for different arguments.

    Args:
        keys: int64 [n], from `keys_of`.
        places: int64 [n], indices in the requests' outputs.
        index: int64 [n], or [n, m] for m numbers each; at least 0.
    """
    keys = _mixed(keys + (places + 1) * _GAMMA)
    if index.ndim > 1:
        keys = keys[:, None]
    bits = _mixed(keys + (index + 1) * _GAMMA)
    bits >>= 11
    bits &= (1 << 53) - 1
    return bits


def uniform(keys: Numbers, places: Numbers, index: Numbers) -> Numbers:
    """Return float64 numbers in [0, 1); arguments as in `random_bits`."""
    bits = random_bits(keys, places, index)
    whole = bits.astype(np.float64) if isinstance(bits, np.ndarray) else bits.to(torch.float64)
    whole *= 2.0**-53
    return whole


def slices(rows: int, width: int, device: torch.device | None = None) -> Iterator[slice]:
    """Return slices of a table's rows to process one after the other, which bounds the memory.

    On a CPU the slices are smaller and fit into its caches. `device` None omits this, for
    operations that process one row per core.
    """
    cells = _CELLS_ON_CPU if device is not None and device.type == "cpu" else _CELLS
    step = max(1, cells // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def choose(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one index per row with probability proportional to its weight.

    Args:
        weights: float [n, V], not negative, with a positive weight in every row.
        uniform: float64 [n] in [0, 1).

    Returns:
        int64 [n]. The cumulative sum is inverted in float64; sums of blocks have the dtype of the
        weights. An index with weight 0 is never chosen.
    """
    parts = [
        _choose(weights[part], uniform[part, None])
        for part in slices(len(weights), weights.shape[1], weights.device)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty_like(uniform, dtype=torch.int64)


def _choose(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    width = weights.shape[1]
    if width <= _BLOCK:
        return _inverse(weights, uniform)[0][:, 0]
    # A sum is faster than a cumulative sum: choose the block first, then the weight in it.
    size = _block_size(width)
    missing = -width % size
    cells = (pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, size))
    sizes = cells.sum(-1)
    block, sums, aim = _inverse(sizes, uniform)
    # Share of the block before the drawn point; below 1.
    rest = 1.0 - (sums.gather(1, block) - aim) / sizes.gather(1, block)
    inside = cells.gather(1, block[:, :, None].expand(-1, -1, size))[:, 0]
    place = _inverse(inside, rest.clamp_(0.0, _BELOW_ONE))[0]
    chosen = torch.add(place, block, alpha=size)[:, 0]
    return chosen.clamp_max_(width - 1) if missing else chosen


@cache
def _block_size(width: int) -> int:
    """Return the number of weights in a block: the divisor of the width nearest to `_BLOCK`.

    Without a divisor of similar size it is `_BLOCK`, and the rows have to be padded.
    """
    divisors = [size for size in range(_BLOCK // 8, 4 * _BLOCK + 1) if width % size == 0]
    return min(divisors, key=lambda size: abs(size - _BLOCK), default=_BLOCK)


def _inverse(
    weights: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the index at which each row's cumulative sum exceeds a share of its total.

    Args:
        weights: float [n, W].
        uniform: float64 [n, 1], the share, in [0, 1). It is at most 1 - 2**-53, so that its product
            with the total is below the total even after rounding.

    Returns:
        The index int64 [n, 1], the cumulative sum float64 [n, W], and share * total float64 [n, 1].
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    aim = sums[:, -1:] * uniform
    index = torch.searchsorted(sums, aim, right=True).clamp_max_(sums.shape[1] - 1)
    return index, sums, aim


def _mixed(keys: Numbers) -> Numbers:
    """Apply splitmix64's output function in place; integer overflow wraps around."""
    keys ^= _shifted(keys, 30)
    keys *= _MIX[0]
    keys ^= _shifted(keys, 27)
    keys *= _MIX[1]
    keys ^= _shifted(keys, 31)
    return keys


def _shifted(keys: Numbers, bits: int) -> Numbers:
    """Shift right logically: the sign bit is not extended."""
    shifted = keys >> bits
    shifted &= (1 << (64 - bits)) - 1
    return shifted
