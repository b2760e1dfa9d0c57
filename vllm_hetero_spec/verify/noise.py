# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of a seed and a place, and draws by them.

Nothing here has a random state: a request's numbers follow from its seed, the place in its output
where a draft begins, and what they are for. So they are the same in any batch, in any part of it,
on every rank, and nothing has to be kept or set back.
"""

from collections.abc import Iterator

import torch

# Cells of a table that are worked on at the same time. On a CPU what its caches hold; elsewhere so
# many that all that is made of them at once, about eight float32 tables, stays below 1 GiB.
_CELLS_ON_CPU = 1 << 20
_CELLS = 1 << 25
# Weights of a row that are added up in one before it is known which of them are looked into.
_BLOCK = 4096
# Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

# What numbers are for, each a stream of its own (digits of pi): the same numbers in drafting and in
# verification would couple what is proposed to whether it is accepted.
RACE = 0
ACCEPT = 0x243F6A8885A308D3
CORRECT = 0x13198A2E03707344
DRAFT = 0x24093822299F31D0


def random_bits(
    seeds: torch.Tensor, places: torch.Tensor, purpose: int, index: torch.Tensor
) -> torch.Tensor:
    """int64 in [0, 2**53), independent for different arguments.

    Args:
        seeds: int64 [n].
        places: int64 [n], in the outputs of the seeds' requests.
        purpose: One of those above.
        index: int64 [n], or [n, m] for m numbers each, from 0 on.
    """
    keys = _mixed(_mixed((seeds ^ purpose) + _GAMMA) + (places + 1) * _GAMMA)
    if index.dim() > 1:
        keys = keys[:, None]
    bits = _mixed(keys + (index + 1) * _GAMMA)
    return bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)


def uniform(
    seeds: torch.Tensor, places: torch.Tensor, purpose: int, index: torch.Tensor
) -> torch.Tensor:
    """float64 in [0, 1); arguments as of `random_bits`."""
    return random_bits(seeds, places, purpose, index).to(torch.float64) * 2.0**-53


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
    chosen = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    for part in slices(len(weights), weights.shape[1], weights.device):
        chosen[part] = _choose(weights[part], uniform[part, None])
    return chosen.clamp_max_(weights.shape[-1] - 1)


def _choose(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    width = weights.shape[1]
    if width <= _BLOCK:
        return _inverse(weights, uniform)[0][:, 0]
    # A cumulative sum is slow, a sum is not: first the block, then the weight inside of it.
    whole = width - width % _BLOCK
    blocks = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    tail = weights[:, whole:].sum(-1, keepdim=True)
    block, rest = _inverse(torch.cat([blocks, tail], 1), uniform)
    index = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, index.clamp_max(width - 1)).masked_fill_(index >= width, 0.0)
    return (block * _BLOCK + _inverse(inside, rest)[0])[:, 0]


def _inverse(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's cumulative sum passes a share of it, and where in that weight.

    Args:
        weights: float [n, W].
        uniform: float64 [n, 1] in [0, 1), the share.

    Returns:
        int64 [n, 1] the index, float64 [n, 1] the share of this weight that is passed.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    aim = (uniform * total).minimum(total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(sums, aim, right=True).clamp_max_(sums.shape[1] - 1)
    weight = weights.gather(1, index)
    return index, (1.0 - (sums.gather(1, index) - aim) / weight).clamp_min_(0.0)


def _mixed(keys: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function, in place; integer overflow wraps around."""
    keys.bitwise_xor_(_shifted(keys, 30)).mul_(_MIX[0])
    keys.bitwise_xor_(_shifted(keys, 27)).mul_(_MIX[1])
    return keys.bitwise_xor_(_shifted(keys, 31))


def _shifted(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: the sign bit does not follow."""
    return (keys >> bits).bitwise_and_((1 << (64 - bits)) - 1)
