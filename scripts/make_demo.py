# SPDX-License-Identifier: Apache-2.0
"""Make the demo folder: the trained pair of `examples/demo`, and a wide copy of its target.

    python scripts/make_demo.py   # takes seconds, needs no network

Speculation pays if a target forward costs much more than a drafter forward. The demo target is too
fast for that. Its wide copy has additional MLP columns of zeros: the same output at a higher cost.
"""

import argparse
import filecmp
import json
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from vllm_hetero_spec.paths import demo_folder

SHIPPED = Path(__file__).resolve().parent.parent / "examples" / "demo"
WIDE_PARAMETERS = 176e6
_WIDE = "target-wide"
_COLUMNS = 64  # the number of added columns is a multiple of this, for aligned matrices


def make_demo(out: Path, parameters: float = WIDE_PARAMETERS) -> bool:
    """Put the shipped pair and its wide target into `out`; return False if they exist already.

    The folder is renamed into place when complete, and replaces a demo pair of another version.

    Raises:
        FileExistsError: `out` contains something other than a demo pair.
    """
    if _same(SHIPPED, out) and (out / _WIDE).is_dir():
        return False
    if out.exists() and any(out.iterdir()) and not (out / _WIDE).is_dir():
        raise FileExistsError(f"{out} is not empty and contains no demo pair; choose another")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        pair = Path(scratch) / "pair"
        shutil.copytree(SHIPPED, pair)
        widen(pair / "target", pair / _WIDE, parameters)
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        pair.rename(out)
    return True


def _same(shipped: Path, made: Path) -> bool:
    """Return True if `made` contains an exact copy of each shipped file."""
    files = [str(file.relative_to(shipped)) for file in shipped.rglob("*") if file.is_file()]
    return filecmp.cmpfiles(shipped, made, files, shallow=False)[1:] == ([], [])


def widen(src: Path, dst: Path, parameters: float) -> int:
    """Copy the Llama in `src` to `dst` with added zero MLP columns; return its parameter count.

    An added unit outputs silu(0) * 0 = 0, so logits are unchanged. The parameter count is the
    largest one up to `parameters` for a multiple of 64 columns.
    """
    config = json.loads((src / "config.json").read_text())
    tensors = load_file(src / "model.safetensors")
    outer = [name for name in tensors if name.endswith(".down_proj.weight")]
    inner = [name for name in tensors if name.endswith((".gate_proj.weight", ".up_proj.weight"))]
    count = sum(tensor.numel() for tensor in tensors.values())
    per_column = len(inner + outer) * config["hidden_size"]
    added = int((parameters - count) / per_column) // _COLUMNS * _COLUMNS
    config["intermediate_size"] += added
    tensors |= {name: pad(tensors[name], (0, added)) for name in outer}
    tensors |= {name: pad(tensors[name], (0, 0, 0, added)) for name in inner}
    shutil.copytree(src, dst, ignore=shutil.ignore_patterns("model.safetensors"))
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})
    return count + added * per_column


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=demo_folder(), help="default: %(default)s")
    out = parser.parse_args().out
    try:
        made = make_demo(out)
    except (FileNotFoundError, FileExistsError) as error:
        parser.error(str(error))
    print(f"demo pair in {out}: {'made' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
