# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of a seed and a place, and draws by them.

Nothing here has a random state: a request's numbers follow from its seed, the place in its output
where a draft begins, and what they are for. So they are the same in any batch, in any part of it,
on every rank, and nothing has to be kept or set back.
"""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch

# Cells of a table that are worked on at the same time. On a CPU what its caches hold; elsewhere so
# many that all that is made of them at once, about eight float32 tables, stays below 1 GiB.
_CELLS_ON_CPU = 1 << 20
_CELLS = 1 << 25
# Weights of a row that are added up in one before it is known which of them are looked into.
_BLOCK = 4096
_BELOW_ONE = 1.0 - 2.0**-53  # the largest float64
# Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

# What numbers are for, each a stream of its own (digits of pi): the same numbers in drafting and in
# verification would couple what is proposed to whether it is accepted.
RACE = 0
ACCEPT = 0x243F6A8885A308D3
CORRECT = 0x13198A2E03707344
DRAFT = 0x24093822299F31D0


# Of the host or of a device: both compute the same numbers, by the same operators.
Numbers = TypeVar("Numbers", torch.Tensor, np.ndarray)


def keys_of(seeds: Numbers, purpose: "int | Numbers") -> Numbers:
    """int64 [n], what the numbers of a seed follow from.

    Args:
        seeds: int64 [n].
        purpose: One of those above, or int64 [n] of them.
    """
    return _mixed((seeds ^ purpose) + _GAMMA)


def random_bits(keys: Numbers, places: Numbers, index: Numbers) -> Numbers:
    """int64 in [0, 2**53), independent for different arguments.

    Args:
        keys: int64 [n], of the seeds.
        places: int64 [n], in the outputs of the seeds' requests.
        index: int64 [n], or [n, m] for m numbers each, from 0 on.
    """
    keys = _mixed(keys + (places + 1) * _GAMMA)
    if index.ndim > 1:
        keys = keys[:, None]
    bits = _mixed(keys + (index + 1) * _GAMMA)
    bits >>= 11
    bits &= (1 << 53) - 1
    return bits


def uniform(keys: Numbers, places: Numbers, index: Numbers) -> Numbers:
    """float64 in [0, 1); arguments as of `random_bits`."""
    bits = random_bits(keys, places, index)
    whole = bits.astype(np.float64) if isinstance(bits, np.ndarray) else bits.to(torch.float64)
    whole *= 2.0**-53
    return whole


def slices(rows: int, width: int, device: torch.device | None = None) -> Iterator[slice]:
    """Parts of a table of so many rows that are worked on one after the other.

    Args:
        rows: Of the table.
        width: Of a row.
        device: Where the table is. None bounds the memory alone: for what a CPU does row by row,
            with its cores side by side.
    """
    cells = _CELLS_ON_CPU if device is not None and device.type == "cpu" else _CELLS
    step = max(1, cells // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def choose(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One index per row, with probability in proportion to its weight.

    Args:
        weights: float [n, V], not negative, some weight in every row.
        uniform: float64 [n] in [0, 1).

    Returns:
        int64 [n]. Inverts the cumulative sum, in float64 but for the sums of blocks, which are as
        exact as the weights: no weight of 0 is ever chosen.
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
    # A cumulative sum is slow, a sum is not: first the block, then the weight inside of it.
    whole = width - width % _BLOCK
    blocks = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    tail = weights[:, whole:].sum(-1, keepdim=True)
    sizes = torch.cat([blocks, tail], 1)
    block, sums, aim = _inverse(sizes, uniform)
    # How much of the block is passed: less than all of it.
    rest = 1.0 - (sums.gather(1, block) - aim) / sizes.gather(1, block)
    first = block * _BLOCK
    index = first + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, index.clamp_max(width - 1)).masked_fill_(index >= width, 0.0)
    chosen = first + _inverse(inside, rest.clamp_(0.0, _BELOW_ONE))[0]
    return chosen[:, 0].clamp_max_(width - 1)


def _inverse(
    weights: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each row's cumulative sum passes a share of it.

    Args:
        weights: float [n, W].
        uniform: float64 [n, 1] in [0, 1), the share: as a float64 is at most 1 - 2**-53, what it is
            of a sum is less than that also when rounded.

    Returns:
        int64 [n, 1] the index, float64 [n, W] the cumulative sum, float64 [n, 1] the share of all.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    aim = sums[:, -1:] * uniform
    index = torch.searchsorted(sums, aim, right=True).clamp_max_(sums.shape[1] - 1)
    return index, sums, aim


def _mixed(keys: Numbers) -> Numbers:
    """splitmix64's output function, in place; integer overflow wraps around."""
    keys ^= _shifted(keys, 30)
    keys *= _MIX[0]
    keys ^= _shifted(keys, 27)
    keys *= _MIX[1]
    keys ^= _shifted(keys, 31)
    return keys


def _shifted(keys: Numbers, bits: int) -> Numbers:
    """Logical shift to the right: the sign bit does not follow."""
    shifted = keys >> bits
    shifted &= (1 << (64 - bits)) - 1
    return shifted
