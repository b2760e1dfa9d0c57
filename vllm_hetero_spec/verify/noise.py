# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers per request: one with a seed draws from a generator of its own."""

from collections.abc import Iterator, Mapping, Sequence

import torch

# Numbers that are worked on at the same time: on a CPU what its caches hold, on other devices what
# keeps them busy. Bounds the memory of temporary rows, whatever the vocabulary.
_CELLS_ON_CPU = 1 << 18
_CELLS = 1 << 22


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


def slices(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Parts of a table of so many rows that are worked on one after the other."""
    cells = _CELLS_ON_CPU if device.type == "cpu" else _CELLS
    step = max(1, cells // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def choose(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One index per row, with probability in proportion to its weight.

    Args:
        weights: float [n, V], not negative, some weight in every row.
        uniform: float64 [n] in [0, 1).

    Returns:
        int64 [n]. Inverts the cumulative sum in float64: no weight of 0 is ever chosen.
    """
    chosen = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    for part in slices(len(weights), weights.shape[1], weights.device):
        sums = weights[part].to(torch.float64).cumsum(-1)
        aim = (uniform[part, None] * sums[:, -1:]).minimum(
            sums[:, -1:].nextafter(sums.new_zeros(1))
        )
        chosen[part] = torch.searchsorted(sums, aim, right=True)[:, 0]
    return chosen.clamp_max_(weights.shape[-1] - 1)
