# SPDX-License-Identifier: Apache-2.0
"""The target's penalties, applied to the drafter's rows over the drafter's own tokens.

A target that is told not to repeat itself rejects a draft that does. With equal tokenizers the
penalised drafter ranks tokens exactly as the penalised target; otherwise nearly so. Only acceptance
depends on it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalty:
    """A request's penalties, as in OpenAI's (presence, frequency) and CTRL's (repetition) sense."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0


@dataclass(frozen=True)
class PenalisedRow:
    """One row of a batch that is penalised.

    Attributes:
        row: Its index in the batch.
        penalty: What applies.
        prompt: Drafter ids of the prompt; repetition counts them, presence and frequency do not.
        output: Drafter ids generated so far.
    """

    row: int
    penalty: Penalty
    prompt: Sequence[int]
    output: Sequence[int]


class Penalties:
    """Counts for the penalised rows of a batch, kept up to date while it drafts.

    Args:
        rows: In order of their index.
        vocab_size: Width of the logits.
        device: Where the logits are.
    """

    def __init__(self, rows: list[PenalisedRow], vocab_size: int, device: torch.device) -> None:
        self._rows = [row.row for row in rows]
        self._index = torch.tensor(self._rows, dtype=torch.long, device=device)
        self._counts = torch.zeros(len(rows), vocab_size, device=device)
        self._seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        for line, row in enumerate(rows):
            output = torch.tensor(row.output, dtype=torch.long, device=device)
            prompt = torch.tensor(row.prompt, dtype=torch.long, device=device)
            self._counts[line].index_add_(0, output, torch.ones_like(output, dtype=torch.float))
            self._seen[line, prompt] = True
            self._seen[line, output] = True
        self._presence, self._frequency, self._repetition = (
            torch.tensor([[getattr(r.penalty, name)] for r in rows], device=device)
            for name in ("presence", "frequency", "repetition")
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise the first rows of the batch, [B, V] logits, in place."""
        count = bisect_left(self._rows, len(logits))
        if not count:
            return
        index = self._index[:count]
        rows, seen, times = logits[index].float(), self._seen[:count], self._counts[:count]
        repetition = self._repetition[:count]
        scaled = torch.where(rows > 0, rows / repetition, rows * repetition)
        rows = torch.where(seen, scaled, rows)
        rows -= self._frequency[:count] * times + self._presence[:count] * (times > 0)
        logits[index] = rows.to(logits.dtype)

    def add(self, ids: torch.Tensor) -> None:
        """Count the ids [B] just drafted for the first rows of the batch."""
        count = bisect_left(self._rows, len(ids))
        if not count:
            return
        drafted = ids[self._index[:count]].unsqueeze(1)
        self._counts[:count].scatter_add_(1, drafted, torch.ones_like(drafted, dtype=torch.float))
        self._seen[:count].scatter_(1, drafted, True)
