# SPDX-License-Identifier: Apache-2.0
"""The target's own law of its next tokens, and whether samples follow it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LENGTH = 3
# Sequences that are rarer share one cell.
RARE = 2e-4
Path3 = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """How a request samples."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Laws [n, V] of the next token, by the definitions of top-k and top-p."""
        rows = (logits.double() / self.temperature).softmax(-1)
        ordered, ids = rows.sort(-1, descending=True)
        if self.top_k:
            ordered[:, self.top_k :] = 0
        # A token is out once those before it have top_p among them.
        shares = ordered / ordered.sum(-1, keepdim=True)
        ordered[shares.cumsum(-1) - shares >= self.top_p] = 0
        rows = torch.zeros_like(rows).scatter_(1, ids, ordered)
        return rows / rows.sum(-1, keepdim=True)


def law_of(model: Any, start: list[int], setting: Setting) -> dict[Path3, float]:
    """Exact probability of every sequence of LENGTH tokens that is not RARE."""
    found: dict[Path3, float] = {(): 1.0}
    for _ in range(LENGTH):
        ids = torch.tensor([[*start, *path] for path in found])
        with torch.inference_mode():
            logits = torch.cat([model(part).logits[:, -1] for part in ids.split(64)])
        rows = setting.rows(logits) * torch.tensor(list(found.values()))[:, None]
        paths = list(found)
        found = {(*paths[i], t): float(rows[i, t]) for i, t in (rows > RARE).nonzero().tolist()}
    return found


def load(folder: Path, prompt: str) -> tuple[Any, list[int]]:
    """A model and the ids of a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder).encode(prompt)


def counted(sequences: Iterable[Iterable[int]]) -> Counter:
    """Samples by their first LENGTH tokens."""
    return Counter(tuple(sequence)[:LENGTH] for sequence in sequences)


def p_value(found: Counter, law: Mapping[Path3, float]) -> float:
    """Pearson's chi-square against the law; rare sequences share a cell."""
    total = sum(found.values())
    common = [path for path, p in law.items() if p * total >= 8]
    cells = [(found[path], law[path] * total) for path in common]
    cells.append((total - sum(o for o, _ in cells), total - sum(e for _, e in cells)))
    statistic = sum((o - e) ** 2 / e for o, e in cells if e > 0.5)
    if any(o and e <= 0.5 for o, e in cells):  # where the law has next to nothing
        statistic += sum(o for o, e in cells if e <= 0.5) ** 2 / 0.5
    freedom = torch.tensor(max(1, len(cells) - 1) / 2)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def distance(found: Counter, law: Mapping[Path3, float]) -> tuple[float, float]:
    """Total variation from the law, and the bound for as many samples as there are."""
    total = sum(found.values())
    rest = 1 - sum(law.values())
    strays = sum(count for path, count in found.items() if path not in law) / total
    apart = sum(abs(found[path] / total - p) for path, p in law.items()) + abs(strays - rest)
    return apart / 2, 1.5 * 0.5 * (2 * len(law) / (3.1416 * total)) ** 0.5


def follows(found: Counter, law: Mapping[Path3, float]) -> bool:
    """Chi-square and total variation."""
    apart, bound = distance(found, law)
    return p_value(found, law) > 1e-4 and apart < bound
