# SPDX-License-Identifier: Apache-2.0
"""Trains the demo pair of `examples/demo`: two small models with different tokenizers.

The target reads byte-level BPE, the drafter SentencePiece-style BPE. Both learn the Python standard
library's own sources, and conversations about them in two chat templates. The drafter also learns
the target's own continuations of these texts. It needs no network; on one core of an AMD EPYC
(Zen 4) it takes about 80 minutes:

    OMP_NUM_THREADS=1 python scripts/train_demo_models.py --out examples/demo
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _demo_corpus import Corpus, standard_library
from _demo_distill import continuations
from _demo_tokenizers import restyled
from _demo_training import ModelSpec, train
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

TARGET = ModelSpec("byte_bpe", vocab_size=4096, layers=4, heads=4)
DRAFTER = ModelSpec("sentencepiece", vocab_size=2048, layers=2, heads=2)

Report = Callable[[str, float, str], None]


class Steps(NamedTuple):
    """Steps of each stage: of an optimizer; of `continuations`, batches of texts."""

    target: int
    continuations: int
    drafter: int


STEPS = Steps(target=5000, continuations=60, drafter=8000)


def train_pair(
    out: Path,
    target: ModelSpec,
    drafter: ModelSpec,
    steps: Steps,
    *,
    corpus: Corpus | None = None,
    report: Report = lambda stage, spent, status: None,
) -> dict[str, Any]:
    """Train a pair into `out/target` and `out/drafter`, and return the figures of both.

    Both appear whole or not at all, and replace what has their names. `corpus` defaults to the
    standard library. `report(stage, spent, status)` is called after each step; stages have the
    names of `Steps`.
    """
    corpus = corpus or standard_library()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".training-") as folder:
        scratch = Path(folder)
        figures = {
            "target": train(
                scratch / "target", target, corpus, steps.target, report=_losses("target", report)
            )
        }
        own_words = continuations(
            scratch / "target",
            corpus.train,
            steps.continuations,
            report=lambda spent: report("continuations", spent, "of the target, to learn from"),
        )
        figures["drafter"] = train(
            scratch / "drafter",
            drafter,
            corpus,
            steps.drafter,
            imitate=[restyled(text, target.tokenizer, drafter.tokenizer) for text in own_words],
            report=_losses("drafter", report),
        )
        for role in figures:
            if (out / role).exists():
                (out / role).rename(scratch / f"old-{role}")
            (scratch / role).rename(out / role)
    return figures


def _losses(stage: str, report: Report) -> Callable[[float, float], None]:
    return lambda spent, loss: report(stage, spent, f"{loss:.2f} nats per token")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="gets target/ and drafter/")
    arguments = parser.parse_args()
    disable_progress_bar()  # transformers' own, which would break ours
    columns = (
        TextColumn("{task.description:13}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        tasks = {
            stage: progress.add_task(stage, total=1.0, status="", start=False)
            for stage in Steps._fields
        }

        def report(stage: str, spent: float, status: str) -> None:
            progress.start_task(tasks[stage])
            progress.update(tasks[stage], completed=spent, status=status)

        figures = train_pair(arguments.out, TARGET, DRAFTER, STEPS, report=report)
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
