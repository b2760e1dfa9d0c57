# SPDX-License-Identifier: Apache-2.0
"""Is drafting right and fast on this GPU? Five parts, each a line of JSON.

    python scripts/measure_gpu.py                   # the demo pair, all parts
    python scripts/measure_gpu.py --parts 0 A --target DIR --drafter DIR --prompts FILE.jsonl

Part 0: does it run at all? A: are the outputs the target's own, token by token, and the drafts the
same with CUDA graphs and without? B: what do the drafter's forwards take? C: tokens per second
beside the target alone and vLLM's own drafting, in interleaved rounds. D: where does the GPU wait?
In B, C and D the small models given are written into the shapes of an 8B target and a 0.5B drafter,
with zeros elsewhere: costs are those of the shapes, texts those of the small models. Where it says
"imposed_rate", drafts were replaced so that as many tokens are accepted. Nothing is downloaded.
Part C has up to three such targets up at a time, in about 55 GB of the GPU's memory.
Without a GPU the parts run too, on small shapes: their counts mean something, their times nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["PYTHONPATH"] = os.pathsep.join(  # the engines' program is beside this file
    [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # or float32 is multiplied as TF32

from _gpu_parts import part_0, part_a, part_b, part_d
from _gpu_ratios import part_c
from _gpu_setups import Options

from vllm_hetero_spec.paths import demo_folder

PARTS = {"0": part_0, "A": part_a, "B": part_b, "C": part_c, "D": part_d}
_ENGINE = 120  # seconds for an engine, of which starting it from a slow disk may be most
_LIMITS = {"0": 2 * _ENGINE, "A": 7 * _ENGINE, "B": 2 * _ENGINE, "C": 1800, "D": 300}
_LATE = 3  # exit code where all that is not good is that a part took too long
_CHARACTERS = 2000  # of what a part that ended has said


def run_part(part: str, arguments: list[str], *, verbose: bool) -> dict[str, Any]:
    """Run a part in a process of its own; what it found, as far as it came."""
    began = time.perf_counter()
    command = [sys.executable, __file__, *arguments, "--inside", part]
    late = False
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as log:
        try:
            code = subprocess.run(
                command, stdout=said, stderr=None if verbose else log, timeout=_LIMITS[part]
            ).returncode
            error = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            error, late = f"not done after {_LIMITS[part]} s", True
        said.seek(0)
        lines = [line for line in said if line.startswith("{")]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        if "ok" not in found:
            log.seek(0)
            found |= {"ok": False, "late": late, "error": error, "said": log.read()[-_CHARACTERS:]}
    return {"part": part, "ok": found.pop("ok"), "seconds": _since(began), **found}


def _inside(part: str, options: Options) -> None:
    """Run a part here; each line is what is known by then, the last one all."""

    def report(result: dict[str, Any]) -> None:
        print(json.dumps(result), flush=True)

    found: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        found.update(result)
        report(result)

    try:
        good = PARTS[part](options, keep)
    except Exception as error:
        report({**found, "ok": False, "error": f"{type(error).__name__}: {error}"})
        raise
    report({**found, "ok": good})


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)


def main() -> int:
    import torch

    demo = demo_folder()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--target", type=Path, default=demo / "target", help="a small Llama")
    parser.add_argument("--drafter", type=Path, default=demo / "drafter", help="another")
    parser.add_argument("--prompts", type=Path, default=demo / "prompts.jsonl")
    parser.add_argument("--attention-backend", default="", help="of 16 bits (vLLM's choice)")
    parser.add_argument("--traces", type=Path, help="an empty folder for the profiles of part D")
    parser.add_argument("--verbose", action="store_true", help="show what the engines say")
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = Options(
        given.target.expanduser(),
        given.drafter.expanduser(),
        given.prompts.expanduser(),
        given.attention_backend,
        torch.cuda.is_available(),
        given.verbose,
        str(given.traces.resolve()) if given.traces else "",
    )
    if given.inside:
        _inside(given.inside, options)
        return 0
    missing = [p for p in (options.target, options.drafter, options.prompts) if not p.exists()]
    if missing:
        parser.error(
            f"{missing[0]} does not exist; scripts/make_demo.py makes the demo pair, other "
            "models go with --target, --drafter and --prompts"
        )
    codes = {0}
    for part in given.parts:
        found = run_part(part, sys.argv[1:], verbose=given.verbose)
        print(json.dumps(found), flush=True)
        codes.add(0 if found["ok"] else _LATE if found.get("late") else 1)
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
