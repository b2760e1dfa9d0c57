# SPDX-License-Identifier: Apache-2.0
"""Replace first tokens of drafts that do not continue their context.

A first token may not follow the target's last token, or a longer token may replace that last token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.steps import CaughtUp
from vllm_hetero_spec.engine.drafter.tasks import DraftRow
from vllm_hetero_spec.staging import Fetched, Receiver

# ids; candidates for the next token, and for the position of the last token. The second number is
# larger because most ids do not begin with the last token.
_NEXT, _LAST = 8, 32
# bytes per request: next ids, ids at the position of the last token, and logits of the latter.
CANDIDATE_BYTES = 4 * (_NEXT + 2 * _LAST)
# Estimated share of requests whose first token is replaced. It starts as 5 % of 20 requests, and
# averages about the last 200 requests.
_SHARE, _SEEN_FIRST, _SEEN_MOST = 0.05, 20, 200
# probability of a replaced token in a round; above this, the check runs before the steps.
_OFTEN = 0.3
# Below this share, only one round in 16 is checked: a lost draft per hundred requests costs less
# than the copy of all candidates to the host (estimated).
_SELDOM, _ROUNDS = 0.01, 16


class Candidates(NamedTuple):
    """Candidates for the first tokens of n requests, in transfer to the host.

    Attributes:
        fetched: int32 [n, c] next ids, best first. With `CaughtUp.last`, then the 32 best ids at
            the position of the last token, and the bits of their float32 logits.
        num_next: c.
    """

    fetched: Fetched
    num_next: int


class HealedStart(NamedTuple):
    """A first token that replaces the drafter's likeliest one; `known` as in `FirstToken`.

    If it replaces the last token, `confidence` is its probability among all candidates that fit.
    """

    id: int
    known: int
    confidence: float


class TokenHealing:
    """Checks the first tokens of drafts."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._share, self._seen = _SHARE, _SEEN_FIRST
        self._skipped = 0  # consecutive rounds without a check

    def due(self) -> bool:
        """Count a round. Return True if its first tokens are to be checked."""
        seldom = self._share < _SELDOM and self._skipped < _ROUNDS - 1
        self._skipped = self._skipped + 1 if seldom else 0
        return not seldom

    def heals_often(self, requests: int) -> bool:
        """Return True if a round of this many requests often has a replaced first token."""
        return 1 - (1 - self._share) ** requests > _OFTEN

    def fetch(self, behind: CaughtUp, requests: int) -> Candidates:
        """Start the copy of the first `requests` rows' candidates to the host."""
        size = behind.logits.shape[1]
        count = min(_NEXT, size)
        parts = [behind.logits[:requests].topk(count, -1).indices.int()]
        if behind.last is not None:
            best = behind.last[:requests].topk(min(_LAST, size), -1)
            parts += [best.indices.int(), best.values.float().view(torch.int32)]
        return Candidates(self._receiver.fetch(torch.cat(parts, 1)), count)

    def choose(
        self, rows: Sequence[DraftRow], candidates: Candidates, *, drawn: bool = False
    ) -> dict[int, HealedStart]:
        """Return the replaced first tokens by row. Waits for the copy of the candidates.

        If `drawn`, sampled drafts may replace the last token as well.
        """
        fetched = candidates.fetched.wait()
        start = candidates.num_next
        values = (fetched.shape[1] + start) // 2  # start of the logits
        found, judged = {}, 0
        for index, (row, ids) in enumerate(zip(rows, fetched[:, :values].tolist(), strict=False)):
            task, own = row.task, ids[:start]
            draws = task.draw is not None
            if row.choose is None or (draws and not drawn):
                continue
            judged += 1
            looked_back = not task.paths and len(row.sequence.kv_ids) > 1
            first = row.choose(own, ids[start:] if looked_back else ())
            if first.known:
                among = fetched[index, values:].view(np.float32)[first.among].tolist()
                share = 1 / sum([math.exp(value - among[0]) for value in among])
                found[index] = HealedStart(first.id, first.known, share)
            elif first.id != own[0] and not draws:
                found[index] = HealedStart(first.id, 0, 0.0)
        if judged:
            self._seen = min(self._seen + judged, _SEEN_MOST)
            self._share += (len(found) / judged - self._share) * min(1, judged / self._seen)
        return found
