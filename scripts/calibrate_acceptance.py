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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _markdown import as_json, compared, markdown_table, with_error
from _place_rows import PairRows, TextRows
from oracle_acceptance import load
from rich.console import Console
from rich.progress import track
from transformers.utils.logging import disable_progress_bar

from vllm_hetero_spec.cli.prompts import load_prompts
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.draft.calibration import Calibration, Estimate
from vllm_hetero_spec.draft.rows import probabilities
from vllm_hetero_spec.draft.selection import order, span
from vllm_hetero_spec.text.calibration import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import PairMeter, documents_of

# Methods that drafts are chosen among, by the name that the choice has for them.
CHOSEN = {"push_forward": "push_forward", "tli": "tli", "slem_greedy": "slem"}
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
    return TITLES.get(name, name.upper().replace("_", "-"))


def method_of(name: str) -> str | None:
    """The method behind a figure, as the choice of methods calls it; None where it is not one."""
    return "slrs" if name.startswith("slrs_") else CHOSEN.get(name)


@dataclass(frozen=True)
class Result:
    """One temperature.

    Attributes:
        temperature: Of target and drafter.
        figures: By the names that `Calibration.measure` gives, the mean over all places.
        predicted: The method that the statistics of the tokenizers put first.
    """

    temperature: float
    figures: Mapping[str, Estimate]
    predicted: str

    @property
    def ranking(self) -> list[str]:
        """Names of the methods that drafts are chosen among, most accepted first."""
        names = filter(method_of, self.figures)
        return sorted(names, key=lambda name: -self.figures[name].value)

    def verdict(self) -> str:
        """Which method came first, by how much, and which was expected to."""
        first = self.ranking[0]
        second = next(name for name in self.ranking if method_of(name) != method_of(first))
        said = next(name for name in self.ranking if method_of(name) == self.predicted)
        statement = "as the tokenizers' statistics had it"
        if method_of(first) != self.predicted:
            statement = f"the tokenizers' statistics had {title(said)}: {self._gain(first, said)}"
        return (
            f"temperature {self.temperature:g}: {title(first)} comes first, "
            f"{self._gain(first, second)}; {statement}"
        )

    def _gain(self, name: str, other: str) -> str:
        return compared(title(name), self.figures[name], title(other), self.figures[other])


def measure(
    pair: PairRows,
    texts: Sequence[str],
    temperatures: Sequence[float],
    places: int,
    longest: int,
    spans: Sequence[int],
    seed: int,
    progress: Callable[[Sequence[str]], Any] = lambda texts: texts,
) -> tuple[list[Result], int]:
    """Every temperature on the same places, and how many these are.

    Raises:
        ValueError: Fewer than two texts are long enough.
    """
    calibration = Calibration(pair.twins, pair.firsts, pair.merging, spans)
    generator = torch.Generator().manual_seed(seed)
    sums: dict[float, dict[str, list[float]]] = {t: defaultdict(list) for t in temperatures}
    counts: list[int] = []
    meter = PairMeter(pair.target, pair.drafter, pair.maps)
    for text in progress(texts):
        rows = pair.read(text, places, longest, generator)
        if rows is None:
            continue
        meter.add([text])
        counts.append(len(rows.contexts))
        ahead: dict[tuple[int, ...], torch.Tensor] = {}
        for temperature in temperatures:
            for name, values in _measure(calibration, pair, rows, temperature, ahead).items():
                sums[temperature][name].append(values.sum().item())
    statistics, places_of = meter.statistics(), torch.tensor(counts)
    results = []
    for temperature, named in sums.items():
        figures = {
            name: Estimate.of(torch.tensor(values), places_of) for name, values in named.items()
        }
        predicted = order(statistics, temperature=temperature)[0].method
        results.append(Result(temperature, figures, predicted))
    if not counts:
        raise ValueError("no text is long enough to have a place")
    return results, sum(counts)


def _measure(
    calibration: Calibration,
    pair: PairRows,
    rows: TextRows,
    temperature: float,
    ahead: dict[tuple[int, ...], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """One text at one temperature; `ahead` keeps logits behind (place, *path) for the next one."""

    def law(logits: torch.Tensor) -> torch.Tensor:
        return probabilities(logits, logits.new_full((len(logits),), temperature))

    def follow(places: Sequence[int], paths: Sequence[Sequence[int]]) -> torch.Tensor:
        keys = [(place, *path) for place, path in zip(places, paths, strict=True)]
        for key in keys:
            if key not in ahead:
                ahead[key] = pair.behind([*rows.contexts[key[0]], *key[1:]])
        return law(torch.stack([ahead[key] for key in keys]))

    return calibration.measure(law(rows.p), law(rows.q), rows.greedy, follow)


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
        "--spans",
        type=int,
        nargs="+",
        metavar="N",
        help="of SLRS-n, at least 2; default: 2 and what the engine takes for this drafter",
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
        spans = arguments.spans or [2, span(pair.drafter.vocab_size)]
        results, places = measure(
            pair,
            texts,
            arguments.temperatures,
            arguments.places,
            arguments.max_tokens,
            spans,
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
        print(f"* {result.verdict()}")
    print(
        "\nSLRS-n pays for this with up to n - 1 more drafter forwards per drafted token; "
        "the others take none."
    )
    return 0


def _as_data(results: Sequence[Result], places: int) -> list[dict[str, Any]]:
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
