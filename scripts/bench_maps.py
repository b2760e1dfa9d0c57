# SPDX-License-Identifier: Apache-2.0
"""Cost of the maps between two vocabularies: seconds to build and to read, extra memory."""

import argparse
import resource
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps, build_maps

MIB = 2**20


def load(folder: Path) -> TextTokenizer:
    """The tokenizer of ``folder``/tokenizer.json; exits with a message where there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        sys.exit(f"error: {folder} holds no tokenizer.json; name a folder that does")
    try:
        return load_tokenizer(Tokenizer.from_file(str(file)), folder.name)
    except UnsupportedTokenizer as error:
        sys.exit(f"error: {error}")
    except Exception as error:  # what the tokenizers library raises for a broken file
        sys.exit(f"error: {file} cannot be read ({error}); download it again")


def timed(build: Callable[[], VocabularyMaps], repeats: int = 1) -> tuple[float, VocabularyMaps]:
    """Seconds of the fastest of ``repeats`` runs, and the maps."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        maps = build()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), maps


def traced_peak(build: Callable[[], VocabularyMaps]) -> int:
    """Bytes that Python and numpy held at most on top of what there was."""
    tracemalloc.start()
    build()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def resident_peak() -> int:
    """Most bytes of memory the process has had, since ``forget_peak`` where that works."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def forget_peak() -> bool:
    """Sets the resident peak back to what the process has now, where the system lets it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="folder with the target's tokenizer.json")
    parser.add_argument("drafter", type=Path, help="folder with the drafter's tokenizer.json")
    options = parser.parse_args()

    begin = time.perf_counter()
    target, drafter = load(options.target), load(options.drafter)
    loading = time.perf_counter() - begin

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        exact = forget_peak()
        before = resident_peak()
        cold, maps = timed(lambda: build_maps(target, drafter, cache=cache))
        grown = resident_peak() - before
        warm, _ = timed(lambda: build_maps(target, drafter, cache=cache), repeats=5)
        stored = sum(file.stat().st_size for file in cache.iterdir())
    traced = traced_peak(lambda: build_maps(target, drafter))

    spelled = sum(len(maps.target_tokens(d)) > 0 for d in range(maps.drafter_size))
    rows = (
        ("ids of the target, of the drafter", f"{maps.target_size}, {maps.drafter_size}"),
        ("drafter ids in the intersection", f"{len(maps.intersection)}"),
        ("drafter ids the target can spell", f"{spelled}"),
        ("loading both tokenizers", f"{loading:.2f} s"),
        ("maps, cold", f"{cold:.3f} s"),
        ("maps, warm", f"{warm:.4f} s"),
        ("tokenizers and maps, cold", f"{loading + cold:.2f} s"),
        ("tokenizers and maps, warm", f"{loading + warm:.2f} s"),
        ("extra memory, cold, traced in Python", f"{traced / MIB:.1f} MiB"),
        (f"extra memory, cold, resident{'' if exact else ' (at least)'}", f"{grown / MIB:.1f} MiB"),
        ("file in the cache", f"{stored / MIB:.1f} MiB"),
    )
    table = Table(title=f"maps of {target.name} (target) x {drafter.name} (drafter)")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
