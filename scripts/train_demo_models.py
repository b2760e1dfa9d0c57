# SPDX-License-Identifier: Apache-2.0
"""Trains a demo pair of models with different tokenizers, in minutes, on a CPU, offline.

The target reads byte-level BPE, the drafter SentencePiece-style BPE; both learn the Python
standard library's own sources, and conversations about them in chat templates that differ too. The
result is kept and reused:

    python scripts/train_demo_models.py                      # train, or show what is there
    python scripts/train_demo_models.py --widen SRC DST --parameters 176e6
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _demo_chat import chat_prompts
from _demo_corpus import Corpus, standard_library
from _demo_distill import continuations
from _demo_tokenizers import restyled
from _demo_training import Budget, ModelSpec, train
from _demo_widen import widen
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from vllm_hetero_spec.paths import cache_folder, demo_folder

TARGET = ModelSpec("byte_bpe", vocab_size=4096, layers=4, heads=4)
DRAFTER = ModelSpec("sentencepiece", vocab_size=2048, layers=2, heads=2)
SECONDS = 200.0
WIDE_PARAMETERS = 176e6
_RECIPE = 2  # raise it when a change to the training makes kept pairs stale
_MANIFEST = "manifest.json"

Report = Callable[[str, float, str], None]


@dataclass(frozen=True)
class PairBudget:
    """What each stage may spend; a step of `continuations` is a batch of texts."""

    target: Budget
    continuations: Budget
    drafter: Budget

    @classmethod
    def of_seconds(cls, seconds: float) -> "PairBudget":
        """Split a time so that the pair agrees best; on a slow machine it takes longer."""
        target, continuations, drafter = (share * seconds for share in (0.5, 0.15, 0.35))
        return cls(
            Budget(seconds=target, slowest=0.7),
            Budget(seconds=continuations),
            Budget(seconds=drafter, slowest=0.2),
        )


def train_pair(
    out: Path,
    target: ModelSpec,
    drafter: ModelSpec,
    budget: PairBudget,
    *,
    corpus: Corpus | None = None,
    wide_parameters: float | None = None,
    force: bool = False,
    report: Report = lambda stage, spent, status: None,
) -> dict[str, Any]:
    """Train a pair into `out`, or return the manifest of the pair that lies there already.

    `out` gets `target/`, `drafter/`, `prompts.jsonl`, `chats.jsonl`, `manifest.json` and, where
    `wide_parameters` is given, `target-wide/`. The drafter learns from the corpus and from the
    target's own continuations of it. A kept pair is reused if its recipe (specs, budget, Python
    version) is the one asked for, and replaced otherwise or with `force`. `out` appears
    whole or not at all: everything is made in a folder beside it and renamed at the end.
    `corpus` defaults to the standard library; `report(stage, spent, status)` follows the
    stages, which are named as in `PairBudget`.

    Raises FileExistsError where `out` holds something that is no demo pair.
    """
    recipe = _recipe(target, drafter, budget, wide_parameters)
    manifest_path = out / _MANIFEST
    if manifest_path.is_file():
        manifest = json.loads(manifest_path.read_text())
        if manifest["recipe"] == recipe and not force:
            return manifest
    elif out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and holds no demo pair; choose another folder")
    corpus = corpus or standard_library()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        pair = Path(scratch) / "pair"

        models: dict[str, Any] = {
            "target": train(
                pair / "target", target, corpus, budget.target, report=_losses("target", report)
            )
        }
        own_words = continuations(
            pair / "target",
            corpus.train,
            budget.continuations,
            report=lambda spent: report("continuations", spent, "of the target, to learn from"),
        )
        models["drafter"] = train(
            pair / "drafter",
            drafter,
            corpus,
            budget.drafter,
            imitate=[restyled(text, target.tokenizer, drafter.tokenizer) for text in own_words],
            report=_losses("drafter", report),
        )
        if wide_parameters is not None:
            models["target-wide"] = {
                "parameters": widen(pair / "target", pair / "target-wide", wide_parameters)
            }
        _write_lines(pair / "prompts.jsonl", corpus.prompts())
        tokenizer = AutoTokenizer.from_pretrained(pair / "target")
        chats = chat_prompts(corpus.heldout)
        for chat in chats:
            chat["prompt"] = tokenizer.apply_chat_template(
                chat["messages"], add_generation_prompt=True, tokenize=False
            )
        _write_lines(pair / "chats.jsonl", chats)
        manifest = {"recipe": recipe, "models": models}
        (pair / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        pair.rename(out)
    return manifest


def _losses(stage: str, report: Report) -> Callable[[float, float], None]:
    return lambda spent, loss: report(stage, spent, f"{loss:.2f} nats per token")


def _write_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _recipe(*parts: Any) -> str:
    """A hash of all that decides what a pair is, to tell whether a kept one is the one wanted."""
    described = json.dumps([_RECIPE, platform.python_version(), parts], default=asdict)
    return hashlib.sha256(described.encode()).hexdigest()


def _train_with_progress(out: Path, seconds: float, force: bool, console: Console) -> None:
    columns = (
        TextColumn("{task.description:13}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            stage.name: progress.add_task(stage.name, total=1.0, status="", start=False)
            for stage in fields(PairBudget)
        }

        def report(stage: str, spent: float, status: str) -> None:
            progress.start_task(tasks[stage])
            progress.update(tasks[stage], completed=spent, status=status)

        manifest = train_pair(
            out,
            TARGET,
            DRAFTER,
            PairBudget.of_seconds(seconds),
            wide_parameters=WIDE_PARAMETERS,
            force=force,
            report=report,
        )
        for task in tasks.values():
            progress.update(task, completed=1.0)
    _describe(out, manifest["models"], console)


def _describe(out: Path, models: dict[str, Any], console: Console) -> None:
    for role in ("target", "drafter"):
        model = models[role]
        console.print(
            f"{role}: {model['parameters']:,} parameters, {model['spec']['tokenizer']} vocabulary "
            f"of {model['spec']['vocab_size']}, {model['heldout_nats_per_byte']:.3f} nats per byte "
            f"on held-out files after {model['tokens']:,} tokens"
        )
    millions = models["target-wide"]["parameters"] / 1e6
    console.print(
        f"target-wide: the target widened with zero MLP columns to {millions:.0f}M parameters; "
        f"outputs are unchanged; this only makes each forward cost what a {millions:.0f}M model "
        "costs, so that speculation can pay as it does on real models"
    )
    console.print(
        f"prompts: {out / 'prompts.jsonl'} and, as conversations, {out / 'chats.jsonl'}, cut from "
        "files neither model has seen"
    )
    activate = Path(sys.prefix) / "bin" / "activate"
    serve = "bash examples/serve.sh"
    usual = cache_folder()
    if usual is None or out.resolve() != (usual / "demo").resolve():
        serve = f"HETERO_SPEC_DEMO={shlex.quote(str(out.absolute()))} {serve}"
    console.print(
        "\nto serve them, from the repository's root:",
        *([f"    . {shlex.quote(str(activate))}"] if activate.exists() else []),
        f"    {serve}",
        sep="\n",
        soft_wrap=True,
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=demo_folder(), help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="training time in all (%(default)g)"
    )
    parser.add_argument("--force", action="store_true", help="train again over a kept pair")
    parser.add_argument(
        "--widen", nargs=2, type=Path, metavar=("SRC", "DST"), help="widen a Llama folder instead"
    )
    parser.add_argument(
        "--parameters", type=float, default=WIDE_PARAMETERS, help="of --widen (%(default)g)"
    )
    arguments = parser.parse_args()
    disable_progress_bar()  # transformers' own, which would break ours
    console = Console()
    try:
        if arguments.widen:
            source, widened = arguments.widen
            count = widen(source, widened, arguments.parameters)
            console.print(
                f"{widened}: {source} widened with zero MLP columns to {count:,} parameters; "
                "outputs are unchanged"
            )
        else:
            _train_with_progress(arguments.out, arguments.seconds, arguments.force, console)
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
