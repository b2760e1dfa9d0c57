# SPDX-License-Identifier: Apache-2.0
"""Compute the distribution of the target's next tokens without an engine."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_hetero_spec.verify.race import race

# Tokens of a sequence. The third token is the first draft token.
LENGTH = 4
# Probability below which a sequence is left out of the distribution.
RARE = 2e-4
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """Sampling parameters of a request."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    def rows(self, logits: torch.Tensor, texts: torch.Tensor, prompt: int) -> torch.Tensor:
        """Return the distributions [n, V] of the next token, by the parameters' definitions.

        Args:
            logits: float [n, V], the model's own.
            texts: int64 [n, length], the tokens before; each row begins with the prompt.
            prompt: Number of prompt tokens.
        """
        logits, written = logits.double(), texts[:, prompt:]
        counts = torch.zeros_like(logits).scatter_add_(
            1, written, torch.ones(written.shape, dtype=logits.dtype)
        )
        seen = counts.scatter(1, texts[:, :prompt], 1.0) > 0
        repeated = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = torch.where(seen, repeated, logits)
        logits = logits - self.frequency * counts - self.presence * (counts > 0)
        for token, more in self.bias:
            logits[:, token] += more
        rows = (logits / self.temperature).softmax(-1)
        if self.min_p:
            least = self.min_p * rows.amax(-1, keepdim=True)
            assert ((rows / least - 1).abs() > 1e-5).all(), "a tie"
            rows = torch.where(rows < least, 0.0, rows)
            rows /= rows.sum(-1, keepdim=True)
        ordered, ids = rows.sort(-1, descending=True)
        if self.top_k:
            assert (ordered[:, self.top_k - 1] > 1.00001 * ordered[:, self.top_k]).all(), "a tie"
            ordered[:, self.top_k :] = 0
        # A token is removed if the likelier ones already have a total of top_p.
        shares = ordered / ordered.sum(-1, keepdim=True)
        before = shares.cumsum(-1) - shares
        assert self.top_p == 1 or ((before - self.top_p).abs() > 1e-6).all(), "a tie"
        ordered[before >= self.top_p] = 0
        rows = torch.zeros_like(rows).scatter_(1, ids, ordered)
        return rows / rows.sum(-1, keepdim=True)


def law_of(
    model: Any, start: list[int], setting: Setting, length: int = LENGTH, *, rare: float = RARE
) -> dict[Ids, float]:
    """Return the exact probability of each sequence of `length` tokens that is above `rare`."""
    found: dict[Ids, float] = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([[*start, *path] for path in found])
        with torch.inference_mode():
            logits = torch.cat([model(part).logits[:, -1] for part in ids.split(64)])
        shares = torch.tensor(list(found.values()))[:, None]
        rows = setting.rows(logits, ids, len(start)) * shares
        paths = list(found)
        found = {(*paths[i], t): float(rows[i, t]) for i, t in (rows > rare).nonzero().tolist()}
    return found


def third_is_one_of(
    model: Any, start: list[int], setting: Setting, tokens: Collection[int]
) -> dict[bool, float]:
    """Distribution of the event that the third token is in `tokens`, from `law_of_third`."""
    share = float(law_of_third(model, start, setting)[list(tokens)].sum())
    return {True: share, False: 1 - share}


def law_of_third(model: Any, start: list[int], setting: Setting) -> torch.Tensor:
    """Distribution of the third token, float64 [V]; only prefixes below 1e-7 are left out."""
    found, mass = torch.tensor([start]), torch.ones(1, dtype=torch.float64)
    with torch.inference_mode():
        for _ in range(2):
            rows = torch.cat([model(part).logits[:, -1] for part in found.split(1024)])
            joint = setting.rows(rows, found, len(start)) * mass[:, None]
            index, token = (joint > 1e-7).nonzero().T
            found, mass = torch.cat([found[index], token[:, None]], 1), joint[index, token]
        rows = torch.cat([model(part).logits[:, -1] for part in found.split(1024)])
    assert mass.sum() > 0.999
    return mass @ setting.rows(rows, found, len(start)) / mass.sum()


def load(folder: Path, prompt: str) -> tuple[Any, list[int]]:
    """Load a model, and encode a prompt with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder).encode(prompt)


def thirds(sequences: Iterable[Sequence[int]], tokens: Collection[int]) -> Counter:
    """Count samples by whether their third token is in `tokens`."""
    return Counter(sequence[2] in tokens for sequence in sequences)


def counted(sequences: Iterable[Iterable[int]]) -> Counter:
    """Count samples by their first `LENGTH` tokens."""
    return Counter(tuple(sequence)[:LENGTH] for sequence in sequences)


def raced(
    model: Any, start: list[int], setting: Setting, seeds: list[int], length: int
) -> list[list[int]]:
    """Return the tokens of requests with these seeds under `race`, computed without an engine."""
    texts = torch.tensor([start] * len(seeds))
    for place in range(length):
        with torch.inference_mode():
            rows = setting.rows(model(texts).logits[:, -1], texts, len(start)).float()
        winners = race(rows, torch.tensor(seeds), torch.full((len(seeds),), place))
        texts = torch.cat([texts, winners[:, None]], 1)
    return texts[:, len(start) :].tolist()
