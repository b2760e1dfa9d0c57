# SPDX-License-Identifier: Apache-2.0
"""A buffer of `staging` on a CPU with separate memory for the device, as on a GPU."""

import torch

from vllm_hetero_spec import staging


class ApartBuffer(staging._Buffer):
    """Replacement for `staging._Buffer`."""

    def __init__(
        self, size: int, device: torch.device, other: "staging._Buffer | None" = None
    ) -> None:
        super().__init__(size, device, other)
        self.on_host = False
        if other is None:
            self._there = torch.empty_like(self._host)

    def send(self, size: int) -> None:
        """Copy the first `size` bytes to the device."""
        self._there[:size].copy_(self._host[:size])
