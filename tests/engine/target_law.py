# SPDX-License-Identifier: Apache-2.0
"""The target's own law of its next tokens, computed without an engine."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
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
            assert (ordered[:, self.top_k - 1] > 1.00001 * ordered[:, self.top_k]).all(), "a tie"
            ordered[:, self.top_k :] = 0
        # A token is out once those before it have top_p among them.
        shares = ordered / ordered.sum(-1, keepdim=True)
        before = shares.cumsum(-1) - shares
        assert self.top_p == 1 or ((before - self.top_p).abs() > 1e-6).all(), "a tie"
        ordered[before >= self.top_p] = 0
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


def second_is_one_of(
    model: Any, start: list[int], setting: Setting, tokens: Collection[int]
) -> dict[bool, float]:
    """Exact law of whether the second token is one of some."""
    with torch.inference_mode():
        first = setting.rows(model(torch.tensor([start])).logits[:, -1])[0]
        likely = (first > 1e-9).nonzero()[:, 0]
        ids = torch.tensor([[*start, int(token)] for token in likely])
        second = setting.rows(model(ids).logits[:, -1])
    share = float(first[likely] @ second[:, list(tokens)].sum(-1))
    return {True: share, False: 1 - share}


def load(folder: Path, prompt: str) -> tuple[Any, list[int]]:
    """A model and the ids of a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder).encode(prompt)


def seconds(sequences: Iterable[Sequence[int]], tokens: Collection[int]) -> Counter:
    """Whether the second tokens of samples are of some."""
    return Counter(sequence[1] in tokens for sequence in sequences)


def counted(sequences: Iterable[Iterable[int]]) -> Counter:
    """Samples by their first LENGTH tokens."""
    return Counter(tuple(sequence)[:LENGTH] for sequence in sequences)
