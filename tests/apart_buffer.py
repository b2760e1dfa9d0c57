# SPDX-License-Identifier: Apache-2.0
"""A buffer of `staging` whose bytes on the device are no memory of the host's, on a CPU."""

import torch

from vllm_hetero_spec import staging


class ApartBuffer(staging._Buffer):
    """To be put in the place of `staging._Buffer`."""

    def __init__(
        self, size: int, device: torch.device, other: "staging._Buffer | None" = None
    ) -> None:
        super().__init__(size, device, other)
        self.on_host = False
        if other is None:
            self._there = torch.empty_like(self._host)

    def send(self, size: int) -> None:
        """Bring the first `size` bytes over."""
        self._there[:size].copy_(self._host[:size])
