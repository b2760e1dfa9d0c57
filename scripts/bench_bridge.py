# SPDX-License-Identifier: Apache-2.0
"""Time the tokenizer bridge per request and step, at several context lengths.

Decoding is simulated on real text. Each request receives 1 to 3 target ids per step. Each step also
translates a draft of 4 drafter ids, taken from the following text, to target ids.

    python scripts/bench_bridge.py --tokenizers FOLDER   # FOLDER/NAME/tokenizer.json
"""

import argparse
import gc
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import tokenizers
from _demo_corpus import standard_library
from _demo_tokenizers import KINDS, train_tokenizer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer

CONTEXTS = (256, 1024, 4096, 8192)
PAIRS = (
    ("qwen2", "llama-2"),
    ("llama-2", "qwen2"),
    ("llama-3.1", "tinyllamas-512"),
    ("mistral-v3-32768", "starcoder2"),
    ("qwen2", "gpt2"),
    ("phi-3-medium-128k-instruct", "byte-level"),
)
DRAFT = 4
_CHARACTERS = 3_000_000  # of the corpus that are used


def load(folder: Path | None, text: str) -> dict[str, TextTokenizer]:
    """Load the tokenizers of PAIRS from `folder`; without a folder train two small ones."""
    if folder is None:
        trained = {kind: train_tokenizer(kind, [text[:400_000]], 4000) for kind in KINDS}
        return {kind: load_tokenizer(tokenizer, kind) for kind, tokenizer in trained.items()}
    files = {name: folder / name / "tokenizer.json" for pair in PAIRS for name in pair}
    return {
        name: load_tokenizer(Tokenizer.from_file(str(file)), name)
        for name, file in files.items()
        if file.is_file()
    }


class Decoding:
    """A batch of requests that begin with `context` target ids each.

    Attributes:
        seconds: Seconds per step, in both directions.
    """

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        texts: Sequence[Sequence[int]],
        context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target, self._drafter, self._clock = target, drafter, clock
        self._bridge = make_bridge(target, drafter, mode="text")
        self._requests = [self._bridge.open() for _ in texts]
        longest = max(CONTEXTS)
        self._bridge.extend(
            self._requests, [list(ids[longest - context : longest]) for ids in texts]
        )
        self._futures = [list(ids[longest:]) for ids in texts]
        self.seconds: list[float] = []

    def step(self, counts: Sequence[int]) -> None:
        """Receive `counts[i]` ids for request i, and translate a draft of the following text."""
        arrived = [future[:count] for future, count in zip(self._futures, counts, strict=True)]
        self._futures = [f[count:] for f, count in zip(self._futures, counts, strict=True)]
        following = [self._target.decode_bytes(future[: DRAFT + 2]) for future in self._futures]
        begin = self._clock()
        self._bridge.extend(self._requests, arrived)
        extended = self._clock()
        drafts = [
            self._drafter.encode_bytes(request.held + data)[:DRAFT]
            for request, data in zip(self._requests, following, strict=True)
        ]
        back = self._clock()
        for request, draft in zip(self._requests, drafts, strict=True):
            self._bridge.first_choice(request, draft)
        self._bridge.to_target(self._requests, drafts, [DRAFT + 1] * len(drafts))
        self.seconds.append(extended - begin + self._clock() - back)


def measure(
    target: TextTokenizer, drafter: TextTokenizer, text: str, batch: int, steps: int
) -> list[float]:
    """Median microseconds per request and step for each of CONTEXTS.

    All context lengths decode the same text in turn; they differ only in the text before it.
    """
    rng = random.Random(batch)
    needed = max(CONTEXTS) + 3 * steps + 2 * DRAFT
    texts: list[list[int]] = []
    while len(texts) < batch:
        start = rng.randrange(len(text) - 6 * needed)
        ids = target.encode(text[start : start + 6 * needed])
        if len(ids) >= needed:
            texts.append(ids)
    runs = [Decoding(target, drafter, texts, context) for context in CONTEXTS]
    gc.collect()
    for step in range(steps):
        counts = [rng.randint(1, 3) for _ in range(batch)]
        first = step % len(runs)
        for run in runs[first:] + runs[:first]:
            run.step(counts)
    return [1e6 * statistics.median(run.seconds) / batch for run in runs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizers", type=Path, help="folder of NAME/tokenizer.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=3200, help="decoding steps of one request")
    options = parser.parse_args()
    text = "\n".join(standard_library().train)[:_CHARACTERS]
    known = load(options.tokenizers, text)
    console = Console()
    console.print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, tokenizers {tokenizers.__version__}"
    )
    table = Table(title="microseconds per request and step, both directions, by context length")
    for heading in ("target", "drafter", "batch", *map(str, CONTEXTS), "longest / shortest"):
        table.add_column(heading, justify="left" if heading in ("target", "drafter") else "right")
    for pair in PAIRS if options.tokenizers else permutations(known, 2):
        if not set(pair) <= set(known):
            console.print(f"{' x '.join(pair)}: not in {options.tokenizers}")
            continue
        target, drafter = (known[name] for name in pair)
        for batch in options.batches:
            steps = max(20, options.steps // batch)
            found = measure(target, drafter, text, batch, steps)
            figures = [f"{figure:.1f}" for figure in found]
            table.add_row(*pair, str(batch), *figures, f"{found[-1] / found[0]:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
