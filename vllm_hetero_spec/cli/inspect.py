# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec inspect`: what a pair of tokenizers shares and loses, without any model."""

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_hetero_spec.bench.tables import print_json
from vllm_hetero_spec.cli.pair_report import PairReport, Side, control_tokens
from vllm_hetero_spec.cli.pair_tables import show
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.inputs.tokenizer_source import OpenTokenizer, open_tokenizer
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.chat_template import chat_of
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import (
    PairMeter,
    count_vocabulary,
    documents_of,
    length_histogram,
    measure_overlap,
    shared_text,
    unspelled_characters,
)
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache

_LONGEST = 16  # bytes; longer tokens share the last bar of a histogram
_BATCH = 64  # documents between two moves of the progress bar


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "inspect",
        help="say what two tokenizers share, what is lost between them and which methods fit",
        description="Compares the tokenizers of a target and a drafter. Reads no weights and "
        "starts no engine.",
    )
    what = "Hugging Face name, folder, or a tokenizer.json, tekken.json or .model file"
    parser.add_argument("target", help=what)
    parser.add_argument("drafter", help="the same of the drafter")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help='text like the one to be generated, or JSONL with "prompt" keys (default: a built-in '
        "text of prose, code and several scripts)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run tokenizer code of the repositories"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Inspect and print.

    Raises:
        ConfigError: A tokenizer or the text cannot be used.
    """
    documents = _documents(arguments.text)
    with _collector_off(), _progress() as progress:
        target, drafter = (
            _open(progress, arguments, role, name)
            for role, name in (("target", arguments.target), ("drafter", arguments.drafter))
        )
        source = str(arguments.text or "built-in")
        report = _inspect(target, drafter, documents, source, progress)
    if arguments.json:
        print_json(report.as_json())
    else:
        show(report, Console())


def _documents(file: Path | None) -> list[str]:
    if file is None:
        return documents_of(CALIBRATION_TEXT)
    if file.suffix == ".jsonl":
        documents = load_prompts(file, sys.maxsize)
    else:
        try:
            documents = documents_of(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the text in {file}: {error}.") from error
    text = "".join(documents)
    if not text.strip():
        raise ConfigError(f"the text in {file} is empty.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"the text in {file} holds half a surrogate pair; it must be Unicode.")
    return documents


def _open(progress: Progress, arguments: argparse.Namespace, role: str, name: str) -> OpenTokenizer:
    with _step(progress, f"opening the {role}'s tokenizer"):
        return open_tokenizer(name, role, trust_remote_code=arguments.trust_remote_code)


def _inspect(
    target: OpenTokenizer,
    drafter: OpenTokenizer,
    documents: Sequence[str],
    source: str,
    progress: Progress,
) -> PairReport:
    theirs, ours = target.text, drafter.text
    with _step(progress, "comparing the vocabularies"):
        lengths = {
            "target": length_histogram(set(theirs.token_bytes), _LONGEST),
            "drafter": length_histogram(set(ours.token_bytes), _LONGEST),
            "shared": length_histogram(shared_text(theirs, ours), _LONGEST),
        }
        overlap = measure_overlap(theirs, ours, target.strings, drafter.strings)
    with _step(progress, "comparing the two on the text", len(documents)) as task:
        meter = PairMeter(theirs, ours, build_maps(theirs, ours, cache=default_cache()))
        for start in range(0, len(documents), _BATCH):
            meter.add(documents[start : start + _BATCH])
            progress.advance(task, _BATCH)
    bridge = make_bridge(
        theirs,
        ours,
        target_eos=target.eos_ids,
        drafter_eos=drafter.eos_ids,
        chats=(chat_of(target.backend), chat_of(drafter.backend)),
    )
    pair = meter.statistics()
    return PairReport(
        target=_side(
            target, documents, pair.target_tokens, pair.target_straddle, pair.target_failures
        ),
        drafter=_side(
            drafter, documents, pair.drafter_tokens, pair.drafter_straddle, pair.drafter_failures
        ),
        overlap=overlap,
        lengths=lengths,
        text=source,
        documents=len(documents),
        pair=pair,
        identity=bridge.identity,
        control=control_tokens(target, bridge.special),
        chat_template=bridge.chat.reason,
    )


def _side(
    opened: OpenTokenizer, documents: Sequence[str], tokens: int, straddle: float, changed: int
) -> Side:
    text = "".join(documents)
    return Side(
        opened=opened,
        counts=count_vocabulary(opened.text),
        tokens=tokens,
        tokens_per_byte=tokens / len(text.encode()),
        straddle=straddle,
        changed_lines=changed,
        changed_documents=sum(opened.round_trip(text) != text for text in documents),
        unspelled=unspelled_characters(opened.text, Counter(text)),
    )


def _progress() -> Progress:
    """A bar on the error stream, on terminals only; it leaves nothing behind."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def _step(progress: Progress, description: str, total: int | None = None) -> Iterator[Any]:
    task = progress.add_task(description, total=total)
    try:
        yield task
    finally:
        progress.remove_task(task)


@contextmanager
def _collector_off() -> Iterator[None]:
    """No cyclic garbage collection: it would walk vocabularies of 100,000s of objects over again.

    A quarter of the run's time; what is allocated here is kept until the end anyway.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
