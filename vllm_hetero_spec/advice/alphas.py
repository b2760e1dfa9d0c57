# SPDX-License-Identifier: Apache-2.0
"""How often one drafted token of each method is accepted on a pair, from rows of both models.

At places of some texts both models say what they expect next; from their rows follows what every
method would have accepted there, exactly. A greedy target has one right token, which needs no law.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_hetero_spec.advice.place_rows import PairRows, TextRows
from vllm_hetero_spec.draft.calibration import Calibration, Estimate
from vllm_hetero_spec.draft.rows import probabilities
from vllm_hetero_spec.draft.selection import order
from vllm_hetero_spec.draft.slrs import Reach
from vllm_hetero_spec.text.statistics import PairMeter

GREEDY = "slem_greedy"
# Methods that drafts are chosen among, by the name that their acceptance has.
_CHOSEN = {"push_forward": "push_forward", "tli": "tli", GREEDY: "slem"}


def method_of(name: str) -> str | None:
    """The method behind a figure, as a configuration calls it; None where it is not one."""
    return "slrs" if name.startswith("slrs_") else _CHOSEN.get(name)


@dataclass(frozen=True)
class Alphas:
    """One temperature.

    Attributes:
        temperature: Of target and drafter.
        figures: By the names that `Calibration.measure` gives, the mean over all places; of
            temperature 0 only that of greedy drafts.
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


def measure(
    pair: PairRows,
    texts: Sequence[str],
    temperatures: Sequence[float],
    places: int,
    longest: int,
    reaches: Sequence[Reach],
    seed: int,
    progress: Callable[[Sequence[str]], Any] = lambda texts: texts,
) -> tuple[list[Alphas], int]:
    """Every temperature on the same places, and how many these are.

    Args:
        pair: Both models.
        texts: What they read.
        temperatures: 0 is greedy.
        places: Of each text, at most.
        longest: Target tokens of a text that are read.
        reaches: Of SLRS-n.
        seed: Of the choice of places.
        progress: Goes through the texts and says so.

    Raises:
        ValueError: Fewer than two texts are long enough.
    """
    calibration = Calibration(pair.twins, pair.firsts, pair.merging, reaches)
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
    if not counts:
        raise ValueError("no text is long enough to have a place")
    statistics, places_of = meter.statistics(), torch.tensor(counts)
    results = []
    for temperature, named in sums.items():
        figures = {
            name: Estimate.of(torch.tensor(values), places_of) for name, values in named.items()
        }
        predicted = order(statistics, temperature=temperature)[0].method
        results.append(Alphas(temperature, figures, predicted))
    return results, sum(counts)


def _measure(
    calibration: Calibration,
    pair: PairRows,
    rows: TextRows,
    temperature: float,
    ahead: dict[tuple[int, ...], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """One text at one temperature; `ahead` keeps logits behind (place, *path) for the next one."""
    if temperature == 0:
        return {GREEDY: (rows.p.argmax(-1).cpu() == torch.tensor(rows.greedy)).double()}

    def law(logits: torch.Tensor) -> torch.Tensor:
        return probabilities(logits, logits.new_full((len(logits),), temperature))

    def follow(places: Sequence[int], paths: Sequence[Sequence[int]]) -> torch.Tensor:
        keys = [(place, *path) for place, path in zip(places, paths, strict=True)]
        for key in keys:
            if key not in ahead:
                ahead[key] = pair.behind([*rows.contexts[key[0]], *key[1:]])
        return law(torch.stack([ahead[key] for key in keys]))

    return calibration.measure(law(rows.p), law(rows.q), rows.greedy, follow)
