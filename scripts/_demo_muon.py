# SPDX-License-Identifier: Apache-2.0
"""Muon, an optimizer of weight matrices, in a number format that the machine multiplies fast.

PyTorch's own always multiplies in bfloat16. A processor without instructions for that takes seconds
for a step of a model of 4M parameters, a hundred times as long as in float32.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MOMENTUM = 0.95
_DECAY = 0.1  # of a weight, times the learning rate
_ROUNDS = 5
_A, _B, _C = 3.4445, -4.775, 2.0315  # a quintic that takes singular values in (0, 1] near 1
_UPDATE_RMS = 0.2  # what AdamW's updates have, so that both may share a learning rate


class Muon(torch.optim.Optimizer):
    """Steps along the momentum with all its singular values made about one.

    Source: Jordan et al., *Muon: An optimizer for hidden layers in neural networks* (2024); the
    size of a step as in Liu et al., *Muon is scalable for LLM training* (2025).

    Args:
        matrices: Parameters of two dimensions.
        lr: Learning rate.
        dtype: Of the multiplications.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], lr: float, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step; matrices of the same shape are multiplied at once."""
        assert closure is None
        for group in self.param_groups:
            shapes = defaultdict(list)
            for matrix in group["params"]:
                shapes[matrix.shape].append(matrix)
            for matrices in shapes.values():
                self._step(matrices, group["lr"])

    def _step(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        ahead = []
        for matrix in matrices:
            if "momentum" not in self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
            momentum = self.state[matrix]["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
            ahead.append(matrix.grad.lerp(momentum, _MOMENTUM))
        updates = orthogonal(torch.stack(ahead).to(self.dtype)).to(matrices[0].dtype)
        size = _UPDATE_RMS * max(matrices[0].shape) ** 0.5
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - lr * _DECAY).add_(update, alpha=-lr * size)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix next to each, roughly: singular values of some size become 0.7 to 1.2.

    Args:
        matrices: [count, rows, columns].

    Returns:
        The same shape and dtype.
    """
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ROUNDS):
        gram = wide @ wide.mT
        wide = _A * wide + (_B * gram + _C * gram @ gram) @ wide
    return wide if wide.shape == matrices.shape else wide.mT
