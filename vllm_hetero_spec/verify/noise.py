# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers per request: one with a seed draws from a generator of its own."""

from collections.abc import Mapping, Sequence

import torch

# Rows that are copied to float64 at the same time, to bound the memory of a large vocabulary.
_CHUNK = 16


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


def choose(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One index per row, with probability in proportion to its weight.

    Args:
        weights: float [n, V], not negative, some weight in every row.
        uniform: float64 [n] in [0, 1).

    Returns:
        int64 [n]. Inverts the cumulative sum in float64: no weight of 0 is ever chosen.
    """
    chosen = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    for start in range(0, len(weights), _CHUNK):
        part = slice(start, start + _CHUNK)
        sums = weights[part].to(torch.float64).cumsum(-1)
        aim = (uniform[part, None] * sums[:, -1:]).minimum(
            sums[:, -1:].nextafter(sums.new_zeros(1))
        )
        chosen[part] = torch.searchsorted(sums, aim, right=True)[:, 0]
    return chosen.clamp_max_(weights.shape[-1] - 1)
