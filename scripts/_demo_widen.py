# SPDX-License-Identifier: Apache-2.0
"""Makes a Llama as slow as a larger one without changing a single output.

Speculation pays when a target forward costs much more than a drafter forward, as with real
models. A model small enough to train in minutes is too fast for that. Adding columns of zeros to
its MLPs gives each forward the memory traffic and the arithmetic of a larger model.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_COLUMNS = 64  # columns are added in multiples of this, for aligned matrices


def widen(src: Path, dst: Path, parameters: float) -> int:
    """Copy the Llama in `src` to `dst` with zero MLP columns up to about `parameters`.

    New rows of `gate_proj` and `up_proj` and new columns of `down_proj` are zero: an added
    intermediate unit is silu(0) * 0 = 0 and adds 0 to the residual stream, so logits are
    unchanged. Everything else in the folder is copied as it is. Returns the parameter count,
    the largest not above `parameters` that a multiple of 64 columns gives.

    Raises ValueError where `src` is no Llama-like model with one safetensors file, or is already
    as large as asked for.
    """
    weights = src / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{src} has no model.safetensors; sharded models are large enough already")
    config = json.loads((src / "config.json").read_text())
    tensors = load_file(weights)
    ups = [name for name in tensors if name.endswith((".gate_proj.weight", ".up_proj.weight"))]
    downs = [name for name in tensors if name.endswith(".mlp.down_proj.weight")]
    if not downs or len(ups) != 2 * len(downs) or config.get("mlp_bias"):
        raise ValueError(f"{src} is not a Llama-like model: no gate, up and down projections")
    count = sum(tensor.numel() for tensor in tensors.values())
    per_column = 3 * config["hidden_size"] * len(downs)
    added = int((parameters - count) / per_column) // _COLUMNS * _COLUMNS
    if added <= 0:
        raise ValueError(
            f"{src} has {count:,} parameters; it cannot be widened to {parameters:,.0f}"
        )
    for name in ups:
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, added))
    for name in downs:
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, added))
    shutil.copytree(src, dst, ignore=shutil.ignore_patterns("model.safetensors"))
    config["intermediate_size"] += added
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})
    return count + added * per_column
