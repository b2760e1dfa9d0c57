# SPDX-License-Identifier: Apache-2.0
"""Makes the demo folder: the trained pair of `examples/demo`, and a wide copy of its target.

    python scripts/make_demo.py                             # takes seconds, needs no network
    python scripts/make_demo.py --widen SRC DST --parameters 176e6

The wide copy has MLP columns of zeros. It writes what the target writes, at the cost of a larger
model, so that speculation can pay as it does with real models.
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from _demo_widen import widen

from vllm_hetero_spec.paths import demo_folder

SHIPPED = Path(__file__).resolve().parent.parent / "examples" / "demo"
WIDE_PARAMETERS = 176e6
_WIDE = "target-wide"


def make_demo(out: Path, parameters: float = WIDE_PARAMETERS) -> bool:
    """Put the shipped pair and its wide target into `out`; return False if they are there already.

    `out` gets `target/`, `target-wide/`, `drafter/`, `prompts.jsonl` and `chats.jsonl`. It appears
    whole or not at all: everything is made in a folder beside it, which is renamed at the end. A
    demo pair of another version is replaced.

    Raises:
        FileExistsError: `out` contains something that is no demo pair.
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
    """Return True if `made` contains each shipped file, byte by byte."""
    files = [file.relative_to(shipped) for file in shipped.rglob("*") if file.is_file()]
    return all(
        (made / file).is_file() and filecmp.cmp(shipped / file, made / file, shallow=False)
        for file in files
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=demo_folder(), help="default: %(default)s")
    parser.add_argument(
        "--widen", nargs=2, type=Path, metavar=("SRC", "DST"), help="widen a Llama folder instead"
    )
    parser.add_argument(
        "--parameters", type=float, default=WIDE_PARAMETERS, help="of the wide copy (%(default)g)"
    )
    arguments = parser.parse_args()
    try:
        if arguments.widen:
            source, wide = arguments.widen
            count = widen(source, wide, arguments.parameters)
            print(f"{wide}: {source} with MLP columns of zeros, {count:,} parameters")
        else:
            made = make_demo(arguments.out, arguments.parameters)
            print(f"demo pair in {arguments.out}: {'made' if made else 'already there'}")
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
