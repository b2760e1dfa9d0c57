# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers per request: one with a seed draws from a generator of its own."""

from collections.abc import Iterator, Mapping, Sequence

import torch

# Cells of a table that are worked on at the same time. On a CPU what its caches hold; elsewhere so
# many that all that is made of them at once, about eight float32 tables, stays below 1 GiB.
_CELLS_ON_CPU = 1 << 20
_CELLS = 1 << 25
# Weights of a row that are added up in one before it is known which of them are looked into.
_BLOCK = 4096


class Noise:
    """Uniform numbers per request.

    Args:
        device: Where they are needed.
        generators: Of the requests that have a seed, by their index in the batch.
        others: Generator for the rest; the device's default where None.
    """

    def __init__(
        self,
        device: torch.device,
        generators: Mapping[int, torch.Generator] | None = None,
        others: torch.Generator | None = None,
    ) -> None:
        self._device = device
        self._generators = generators or {}
        self._others = others

    def uniform(self, lengths: Sequence[int]) -> torch.Tensor:
        """float64 [sum of lengths] in [0, 1), `lengths[i]` of them for request i."""
        drawn = torch.rand(
            sum(lengths), dtype=torch.float64, device=self._device, generator=self._others
        )
        start = 0
        for index, length in enumerate(lengths):
            generator = self._generators.get(index)
            if generator is not None and length:
                drawn[start : start + length].uniform_(generator=generator)
            start += length
        return drawn


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
