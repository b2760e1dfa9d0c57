# SPDX-License-Identifier: Apache-2.0
"""How arrays reach the device: the engine brings all of one call there in one copy."""

from collections.abc import Callable

import numpy as np
import torch

# Arrays as tensors of the same shapes and dtypes, for use before the call after the next.
Send = Callable[..., list[torch.Tensor]]


def on_host(*arrays: np.ndarray) -> list[torch.Tensor]:
    """Where the CPU is the device: tensors over the arrays' own memory."""
    return [torch.from_numpy(array) for array in arrays]
