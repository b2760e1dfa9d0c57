# SPDX-License-Identifier: Apache-2.0
"""Makes a Llama as slow as a larger one without changing a single output.

Speculation pays when a target forward costs much more than a drafter forward, as with real
models. A model small enough to train in minutes is too fast for that. Adding columns of zeros to
its MLPs gives each forward the memory traffic and the arithmetic of a larger model.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

_COLUMNS = 64  # columns are added in multiples of this, for aligned matrices


def widen(src: Path, dst: Path, parameters: float) -> int:
    """Copy the Llama in `src` to `dst` with zero MLP columns up to about `parameters`.

    An added intermediate unit is silu(0) * 0 = 0 and adds 0 to the residual stream, so logits are
    unchanged. Everything else in the folder is copied as it is. Returns the parameter count, the
    largest not above `parameters` that a multiple of 64 columns gives.

    Raises ValueError where `src` is already as large as asked for.
    """
    config = json.loads((src / "config.json").read_text())
    tensors = load_file(src / "model.safetensors")
    outer = [name for name in tensors if name.endswith(".down_proj.weight")]
    inner = [name for name in tensors if name.endswith((".gate_proj.weight", ".up_proj.weight"))]
    count = sum(tensor.numel() for tensor in tensors.values())
    per_column = len(inner + outer) * config["hidden_size"]
    added = int((parameters - count) / per_column) // _COLUMNS * _COLUMNS
    if added <= 0:
        raise ValueError(
            f"{src} has {count:,} parameters; it cannot be widened to {parameters:,.0f}"
        )
    config["intermediate_size"] += added
    tensors |= {name: pad(tensors[name], (0, added)) for name in outer}
    tensors |= {name: pad(tensors[name], (0, 0, 0, added)) for name in inner}
    shutil.copytree(src, dst, ignore=shutil.ignore_patterns("model.safetensors"))
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})
    return count + added * per_column
