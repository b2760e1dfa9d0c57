# SPDX-License-Identifier: Apache-2.0
"""Forwards of a drafter that belong to no request: for timing, warm-up and compilation.

They have the shapes of a round's forwards, and run on the padding block.
"""

from contextlib import nullcontext

import torch

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.steps import read_texts


@torch.inference_mode()
def idle_step(drafter: Drafter, batch: int) -> None:
    """Queue one decode step of a batch size."""
    planner, steps = drafter.planner, drafter.steps
    nowhere, shape = planner.nowhere([1] * batch), steps.shape(batch, 1, 1)
    steps.begin(planner.plan(nowhere, [[0]] * batch, [1] * batch, *shape))


@torch.inference_mode()
def idle_prefill(drafter: Drafter, tokens: int) -> None:
    """Queue a prefill of this many tokens as in a round."""
    planner, steps, longest = drafter.planner, drafter.steps, drafter.max_length
    lengths = [min(longest, tokens - at) for at in range(0, tokens, longest)]
    nowhere, texts = planner.nowhere(lengths), [[0] * length for length in lengths]
    left = read_texts(nowhere, texts, steps, planner, nullcontext())
    shape = steps.shape(len(left), max(map(len, left)), min(lengths))
    steps.begin(planner.plan(nowhere, left, [1] * len(left), *shape))
