# SPDX-License-Identifier: Apache-2.0
"""Cost of the tokenizer bridge per request and step, flat in the context length or not.

Decoding is simulated on real text: a request takes in the target's own ids, 1 to 3 a step, and
each step translates the drafter's ids of the text that follows (4 of them) back to target ids.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import tokenizers
from _demo_corpus import standard_library
from _demo_tokenizers import TokenizerKind, train_tokenizer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer

BATCHES = (1, 8, 64)
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


def train(text: str) -> dict[str, TextTokenizer]:
    """Two small tokenizers, for a machine without real ones."""
    kinds: tuple[TokenizerKind, ...] = ("byte_bpe", "sentencepiece")
    return {
        kind: load_tokenizer(train_tokenizer(kind, [text[:400_000]], vocab_size=4000), kind)
        for kind in kinds
    }


def load(folder: Path) -> dict[str, TextTokenizer]:
    """The tokenizers of PAIRS that lie in ``folder``/NAME/tokenizer.json."""
    files = {name: folder / name / "tokenizer.json" for pair in PAIRS for name in pair}
    return {
        name: load_tokenizer(Tokenizer.from_file(str(file)), name)
        for name, file in files.items()
        if file.is_file()
    }


class Decoding:
    """A batch of requests with ``context`` target ids each, going on with ``futures``."""

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        texts: Sequence[Sequence[int]],
        context: int,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._target, self._drafter = target, drafter
        self._bridge = make_bridge(target, drafter, mode="text")
        self._requests = [self._bridge.open() for _ in texts]
        known = [list(ids[max(CONTEXTS) - context : max(CONTEXTS)]) for ids in texts]
        self._bridge.extend(self._requests, known)
        self._futures = [list(ids[max(CONTEXTS) :]) for ids in texts]
        self.extending: list[float] = []
        self.returning: list[float] = []

    def step(self, taken: Sequence[int]) -> None:
        """Take in ``taken[i]`` ids of request i and translate the draft of what follows."""
        arrived = [future[:count] for future, count in zip(self._futures, taken, strict=True)]
        self._futures = [f[count:] for f, count in zip(self._futures, taken, strict=True)]
        following = [self._target.decode_bytes(future[: DRAFT + 2]) for future in self._futures]

        begin = self._clock()
        self._bridge.extend(self._requests, arrived)
        middle = self._clock()
        drafts = [
            self._drafter.encode_bytes(request.held + data)[:DRAFT]
            for request, data in zip(self._requests, following, strict=True)
        ]
        back = self._clock()
        for request, draft in zip(self._requests, drafts, strict=True):
            self._bridge.first_choice(request, draft)
        self._bridge.to_target(self._requests, drafts, [DRAFT + 1] * len(drafts))
        self.extending.append(middle - begin)
        self.returning.append(self._clock() - back)


def measure(
    target: TextTokenizer,
    drafter: TextTokenizer,
    text: str,
    batch: int,
    steps: int,
    clock: Callable[[], float],
) -> list[tuple[float, float]]:
    """For each of CONTEXTS the median microseconds per request and step of (extend, to_target).

    All context lengths decode the same text, turn and turn about, so that they differ in nothing
    but what lies before it.
    """
    rng = random.Random(batch)
    needed = max(CONTEXTS) + 3 * steps + 2 * DRAFT
    texts: list[list[int]] = []
    while len(texts) < batch:
        start = rng.randrange(len(text) - 6 * needed)
        ids = target.encode(text[start : start + 6 * needed])
        if len(ids) >= needed:
            texts.append(ids)
    runs = [Decoding(target, drafter, texts, context, clock) for context in CONTEXTS]
    gc.collect()
    for step in range(steps):
        taken = [rng.randint(1, 3) for _ in range(batch)]
        first = step % len(runs)
        for run in runs[first:] + runs[:first]:
            run.step(taken)
    scale = 1e6 / batch
    return [
        (statistics.median(run.extending) * scale, statistics.median(run.returning) * scale)
        for run in runs
    ]


def look_ups(pair: Sequence[TextTokenizer], text: str, steps: int) -> None:
    """Prints what it takes to find drafts that were made ahead, and to translate them."""
    from _bridge_lookups import DRAFT, LookUps

    target, drafter = pair
    ids, needed = target.encode(text[:1_000_000]), (DRAFT + 1) * (steps + 4)
    for batch in (8, 64):
        rng = random.Random(batch)
        starts = [rng.randrange(len(ids) - needed - CONTEXTS[0]) for _ in range(batch)]
        texts = [ids[start : start + CONTEXTS[0] + needed] for start in starts]
        run = LookUps(target, drafter, texts, CONTEXTS[0], time.perf_counter)
        for _ in range(steps):
            run.step(rng)
        looking, back = (1e3 * statistics.median(of) for of in (run.looking, run.translating))
        share = run.hits / (batch * steps)
        print(
            f"batch {batch}: {looking:.3f} ms to look up, {back:.3f} ms to translate, "
            f"in the median step; hits {share:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizers", type=Path, help="folder of NAME/tokenizer.json")
    parser.add_argument("--steps", type=int, default=3200, help="decoding steps of one request")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu leaves out the time other processes took, for a busy machine",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--lookups",
        nargs=2,
        metavar=("TARGET", "DRAFTER"),
        help="measure look-ups of drafts that were made ahead instead, with two tokenizer.json",
    )
    options = parser.parse_args()
    if options.lookups:
        pair = [load_tokenizer(Tokenizer.from_file(file), file) for file in options.lookups]
        look_ups(pair, "\n".join(standard_library().train)[:3_000_000], options.steps)
        return

    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    console = Console()
    text = "\n".join(standard_library().train)[:3_000_000]
    known = load(options.tokenizers) if options.tokenizers else train(text)
    pairs = PAIRS if options.tokenizers else permutations(known, 2)
    machine = {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "clock": options.clock,
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
    }
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    table = Table(title="microseconds per request and step: to drafter + to target")
    for heading in ("target", "drafter", "batch", *map(str, CONTEXTS), "longest / shortest"):
        table.add_column(heading, justify="left" if heading in ("target", "drafter") else "right")
    rows = []
    for target_name, drafter_name in pairs:
        if target_name not in known or drafter_name not in known:
            console.print(f"{target_name} x {drafter_name}: not in {options.tokenizers}")
            continue
        target, drafter = known[target_name], known[drafter_name]
        for batch in BATCHES:
            steps = max(20, options.steps // batch)
            cells = []
            measured = measure(target, drafter, text, batch, steps, clock)
            for context, (forth, back) in zip(CONTEXTS, measured, strict=True):
                cells.append(forth + back)
                rows.append(
                    {
                        "target": target_name,
                        "drafter": drafter_name,
                        "batch": batch,
                        "context": context,
                        "to_drafter_us": round(forth, 2),
                        "to_target_us": round(back, 2),
                    }
                )
            figures = [f"{cell:.1f}" for cell in cells]
            ratio = f"{cells[-1] / cells[0]:.2f}"
            table.add_row(target_name, drafter_name, str(batch), *figures, ratio)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
