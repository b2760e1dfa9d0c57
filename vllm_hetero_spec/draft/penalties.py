# SPDX-License-Identifier: Apache-2.0
"""Sampling penalties of a request, applied to the drafter's logits.

A penalized target rejects drafts that repeat tokens. With equal tokenizers the drafter's penalties
equal the target's; otherwise they approximate them. They only affect the acceptance rate.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.staging import Send


@dataclass(frozen=True)
class Penalty:
    """A request's penalties: presence and frequency as in OpenAI's API, repetition as in CTRL."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0


class TokenCounts:
    """Number of occurrences of each drafter token in one request, updated as it grows.

    Args:
        vocab_size: Size of the drafter's vocabulary; a larger context id counts as id 0.
        num_prompt: Number of prompt ids. Repetition counts them; presence and frequency do not.

    Attributes:
        everywhere: float32 [V_D], in prompt and output, as of the last `flush`.
        output: float32 [V_D], in the output only.
    """

    def __init__(self, vocab_size: int, num_prompt: int, device: torch.device) -> None:
        self._num_prompt = num_prompt
        self._ids: list[int] = []
        self._changes: list[tuple[int, int, float]] = []  # id, its index, +1 or -1
        self.everywhere = torch.zeros(vocab_size, device=device)
        self.output = torch.zeros(vocab_size, device=device)

    def update(self, ids: Sequence[int], unchanged: int) -> None:
        """Replace the ids after the first `unchanged` ones; `flush` updates the counts."""
        self._changes += [(i, at, -1.0) for at, i in enumerate(self._ids[unchanged:], unchanged)]
        del self._ids[unchanged:]
        size = len(self.everywhere)
        news = [i if i < size else 0 for i in ids[unchanged:]]
        self._changes += [(i, at, 1.0) for at, i in enumerate(news, unchanged)]
        self._ids += news

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return and clear the changes since the last call, as arguments of `flush`.

        Returns:
            int64 ids [n], and their float32 weights [n] for `everywhere` and for `output`.
        """
        noted = np.array(self._changes, np.float64).reshape(-1, 3)
        self._changes.clear()
        weights = noted[:, 2].astype(np.float32)
        behind = np.where(noted[:, 1] >= self._num_prompt, weights, np.float32(0))
        return noted[:, 0].astype(np.int64), weights, behind

    def flush(self, ids: torch.Tensor, weights: torch.Tensor, behind: torch.Tensor) -> None:
        """Add the result of `take_changes`, which is now on the device, to the counts."""
        self.everywhere.index_add_(0, ids, weights)
        self.output.index_add_(0, ids, behind)


class PenalizedRow(NamedTuple):
    """One penalized row of a batch; `row` is its index there."""

    row: int
    penalty: Penalty
    counts: TokenCounts


class Penalties:
    """Token counts of the penalized rows of a batch, in order, for one drafting round."""

    def __init__(self, rows: Sequence[PenalizedRow], send: Send) -> None:
        self._rows = [row.row for row in rows]
        every = [
            (row.penalty.presence, row.penalty.frequency, row.penalty.repetition) for row in rows
        ]
        news = [array for row in rows for array in row.counts.take_changes()]
        self._index, penalties, *sent = send(
            np.array(self._rows, np.int64), np.array(every, np.float32), *news
        )
        for place, row in enumerate(rows):
            row.counts.flush(*sent[3 * place : 3 * place + 3])
        self._presence, self._frequency, self._repetition = penalties.split(1, 1)
        self._counts = torch.stack([row.counts.output for row in rows])
        self._seen = torch.stack([row.counts.everywhere for row in rows]) > 0

    def first(self, count: int) -> torch.Tensor:
        """Return the int64 indices of the penalized rows among the first `count` of the batch."""
        return self._index[: bisect_left(self._rows, count)]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalize logits [B, V] of the first rows in place; return the penalized rows."""
        index = self.first(len(logits))
        count = len(index)
        rows, seen, times = logits[index].float(), self._seen[:count], self._counts[:count]
        repetition = self._repetition[:count]
        scaled = torch.where(rows > 0, rows / repetition, rows * repetition)
        rows = torch.where(seen, scaled, rows)
        rows -= self._frequency[:count] * times + self._presence[:count] * (times > 0)
        logits[index] = rows.to(logits.dtype)
        return rows

    def add(self, ids: torch.Tensor) -> None:
        """Count the ids [B] just drafted for the first B rows of the batch."""
        index = self.first(len(ids))
        if not len(index):
            return
        drafted, count = ids[index].long().unsqueeze(1), len(index)
        self._counts[:count].scatter_add_(1, drafted, torch.ones_like(drafted, dtype=torch.float))
        self._seen[:count].scatter_(1, drafted, True)
