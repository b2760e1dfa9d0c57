# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers for drafts: a request with a seed draws from a generator of its own."""

from collections.abc import Mapping, Sequence

import torch


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
