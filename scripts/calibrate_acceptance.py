# SPDX-License-Identifier: Apache-2.0
"""Measures how often one drafted token of each method is accepted on a pair of models.

At places of a text both models say what they expect next; from their rows follows what every
method would have accepted there, exactly. Plain transformers forwards, on a GPU if there is one;
no vLLM. Beside the ranking stands what the tokenizers alone had promised.

    python scripts/calibrate_acceptance.py --target DIR --drafter DIR --text FILE.jsonl
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _markdown import as_json, compared, markdown_table, with_error
from oracle_acceptance import load
from rich.console import Console
from rich.progress import track
from transformers.utils.logging import disable_progress_bar

from vllm_hetero_spec.advice.alphas import Alphas, measure, method_of
from vllm_hetero_spec.advice.place_rows import PairRows
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.draft.selection import span
from vllm_hetero_spec.draft.slrs import Reach
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import documents_of

TITLES = {
    "target_shared": "p(I)",
    "drafter_shared": "Z",
    "union": "union",
    "tli": "TLI",
    "push_forward": "push",
    "slem_greedy": "SLEM greedy",
    "slem_sampled": "SLEM sampled",
    "ersd_tli": "ERSD(TLI)",
    "ersd_slrs": "ERSD(SLRS)",
}


def title(name: str) -> str:
    """The head of a figure's column."""
    if name in TITLES:
        return TITLES[name]
    return name.replace("slrs_", "SLRS-").replace("_", " ")


def reach(text: str) -> Reach:
    """`4:16` as a reach of SLRS-n.

    Raises:
        ValueError: It is none.
    """
    found = Reach(*map(int, text.split(":")))
    if found.span < 2 or found.candidates < 1:
        raise ValueError(text)
    return found


def verdict(result: Alphas) -> str:
    """Which method came first, by how much, and which was expected to."""

    def gain(name: str, other: str) -> str:
        return compared(title(name), result.figures[name], title(other), result.figures[other])

    first = result.ranking[0]
    second = next(name for name in result.ranking if method_of(name) != method_of(first))
    said = next(name for name in result.ranking if method_of(name) == result.predicted)
    statement = "as the tokenizers' statistics had it"
    if method_of(first) != result.predicted:
        statement = f"the tokenizers' statistics had {title(said)}: {gain(first, said)}"
    return (
        f"temperature {result.temperature:g}: {title(first)} comes first, "
        f"{gain(first, second)}; {statement}"
    )


def documents(file: Path | None, count: int) -> list[str]:
    """The first texts of a file, or of the built-in text.

    Raises:
        ConfigError: The file cannot be read.
    """
    if file is None:
        return documents_of(CALIBRATION_TEXT)[:count]
    return load_prompts(file, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument(
        "--text", type=Path, help='JSON lines with a "prompt"; default: a built-in text'
    )
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--places", type=int, default=16, help="of each text (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="of a text that are read (%(default)s)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument(
        "--reaches",
        type=reach,
        nargs="+",
        metavar="N[:M]",
        help="of SLRS-n, at least 2, that looks behind M tokens at each step (1); default: 2, 2:8 "
        "and what the engine takes for this drafter",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of places")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if min(arguments.temperatures) <= 0:
        parser.error("temperatures must be above 0: a greedy target accepts by argument, not law")
    disable_progress_bar()
    stderr = Console(stderr=True)
    try:
        texts = documents(arguments.text, arguments.num_texts)
        pair = PairRows(load(arguments.target), load(arguments.drafter))
        reaches = arguments.reaches or [Reach(), Reach(2, 8), Reach(span(pair.drafter.vocab_size))]
        results, places = measure(
            pair,
            texts,
            arguments.temperatures,
            arguments.places,
            arguments.max_tokens,
            list(dict.fromkeys(reaches)),
            arguments.seed,
            progress=lambda texts: track(texts, "texts", console=stderr, transient=True),
        )
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(_as_data(results, places), indent=2))
        return 0
    print(
        f"Acceptance of one drafted token at {places} places of {len(texts)} texts (standard "
        f"errors over texts): {arguments.target.name} / {arguments.drafter.name}\n"
    )
    names = list(results[0].figures)
    rows = [
        [f"{result.temperature:g}", *(with_error(result.figures[name]) for name in names)]
        for result in results
    ]
    print(markdown_table(["temperature", *map(title, names)], rows), end="\n\n")
    for result in results:
        print(f"* {verdict(result)}")
    print(
        "\nSLRS-n pays for this with up to n - 1 more drafter forwards per drafted token, of m "
        "tokens the first; the others take none."
    )
    return 0


def _as_data(results: Sequence[Alphas], places: int) -> list[dict[str, Any]]:
    return [
        {
            "temperature": result.temperature,
            "places": places,
            "figures": {name: as_json(found) for name, found in result.figures.items()},
            "ranking": result.ranking,
            "predicted": result.predicted,
        }
        for result in results
    ]


if __name__ == "__main__":
    sys.exit(main())
