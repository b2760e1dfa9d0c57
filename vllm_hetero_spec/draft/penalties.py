# SPDX-License-Identifier: Apache-2.0
"""The target's penalties, applied to the drafter's rows over the drafter's own tokens.

A target that is told not to repeat itself rejects a draft that does. With equal tokenizers the
penalised drafter ranks tokens exactly as the penalised target; otherwise nearly so. Only acceptance
depends on it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Penalty:
    """A request's penalties, as in OpenAI's (presence, frequency) and CTRL's (repetition) sense."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0


class TokenCounts:
    """How often one request's text has each drafter token, kept up to date as it grows.

    Args:
        vocab_size: Ids of the drafter's tokenizer; a context id beyond counts as id 0.
        num_prompt: Leading ids that are the prompt: repetition counts them, presence and frequency
            do not.
        device: Where the logits are.

    Attributes:
        everywhere: float32 [V_D], in the whole text.
        output: float32 [V_D], behind the prompt.
    """

    def __init__(self, vocab_size: int, num_prompt: int, device: torch.device) -> None:
        self._num_prompt = num_prompt
        self._ids: list[int] = []
        self.everywhere = torch.zeros(vocab_size, device=device)
        self.output = torch.zeros(vocab_size, device=device)

    def update(self, ids: Sequence[int], unchanged: int) -> None:
        """Count a text of which all but the first `unchanged` ids may be others than before."""
        self._add(self._ids[unchanged:], unchanged, -1.0)
        del self._ids[unchanged:]
        size = len(self.everywhere)
        news = [i if i < size else 0 for i in ids[unchanged:]]
        self._add(news, unchanged, 1.0)
        self._ids += news

    def _add(self, ids: Sequence[int], start: int, times: float) -> None:
        if not ids:
            return
        added = torch.tensor(ids, dtype=torch.long, device=self.everywhere.device)
        weights = torch.full(added.shape, times, device=added.device)
        self.everywhere.index_add_(0, added, weights)
        behind = max(0, self._num_prompt - start)
        self.output.index_add_(0, added[behind:], weights[behind:])


class PenalisedRow(NamedTuple):
    """One row of a batch that is penalised.

    Attributes:
        row: Its index in the batch.
        penalty: What applies.
        counts: Of its text so far.
    """

    row: int
    penalty: Penalty
    counts: TokenCounts


class Penalties:
    """Counts for the penalised rows of a batch, kept up to date while it drafts.

    Args:
        rows: In order of their index.
        device: Where the logits are.
    """

    def __init__(self, rows: Sequence[PenalisedRow], device: torch.device) -> None:
        self._rows = [row.row for row in rows]
        self._index = torch.tensor(self._rows, dtype=torch.long, device=device)
        self._counts = torch.stack([row.counts.output for row in rows])
        self._seen = torch.stack([row.counts.everywhere for row in rows]) > 0
        self._presence, self._frequency, self._repetition = (
            torch.tensor([[getattr(row.penalty, name)] for row in rows], device=device)
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
