# SPDX-License-Identifier: Apache-2.0
"""What drafts begin with, where the text that they continue has a say in it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.steps import CaughtUp
from vllm_hetero_spec.engine.drafter.tasks import DraftRow
from vllm_hetero_spec.staging import Fetched, Receiver

# How many of the drafter's best ids the first token is chosen from, and how many in the place of
# the text's last token, most of which do not begin as that does.
_NEXT, _LAST = 8, 32
# Bytes on their way for each request: ids, ids in the place of the last token, and their logits.
CANDIDATE_BYTES = 4 * (_NEXT + 2 * _LAST)
# The share of requests whose first token is replaced begins as if it were 5 % of 20 requests, and
# follows about the last 200 of them.
_SHARE, _SEEN_FIRST, _SEEN_MOST = 0.05, 20, 200
_OFTEN = 0.3  # probability of a replaced token in a round, above which its steps wait for the judge
# Below this share one round in 16 is judged: a lost draft for each hundredth request costs less
# than the copy of all candidates to the host (estimated).
_SELDOM, _ROUNDS = 0.01, 16


class Candidates(NamedTuple):
    """For the first tokens of n requests, on their way to the host.

    Attributes:
        fetched: int32 [n, c] ids, best first; behind them, where they were asked for, 32 in the
            place of each text's last token, and the bits of their float32 logits.
        num_next: c.
    """

    fetched: Fetched
    num_next: int


class HealedStart(NamedTuple):
    """What a draft begins with in place of the drafter's best.

    Attributes:
        id: A drafter id.
        known: See `text.drafts.FirstToken`.
        confidence: Of one in the place of the text's last token: its probability among all that
            would have done.
    """

    id: int
    known: int
    confidence: float


class TokenHealing:
    """Judges first tokens.

    Args:
        receiver: Brings the candidates to the host.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._share, self._seen = _SHARE, _SEEN_FIRST
        self._skipped = 0  # consecutive rounds that were not judged

    def due(self) -> bool:
        """Count a round. Return True if it judges its first tokens."""
        seldom = self._share < _SELDOM and self._skipped < _ROUNDS - 1
        self._skipped = self._skipped + 1 if seldom else 0
        return not seldom

    def heals_often(self, requests: int) -> bool:
        """Return True if a round of so many requests often has a replaced first token."""
        return 1 - (1 - self._share) ** requests > _OFTEN

    def fetch(self, behind: CaughtUp, requests: int) -> Candidates:
        """Begin to bring the candidates of the first so many requests to the host."""
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
        """Of the rows whose draft does not begin with the drafter's best, what it begins with.

        Args:
            rows: The requests.
            candidates: From `fetch`, for the first n of them; waited for.
            drawn: Drafts that were to be drawn may begin in the place of the text's last token.
        """
        fetched = candidates.fetched.wait()
        start = candidates.num_next
        values = (fetched.shape[1] + start) // 2  # where they begin, behind the ids in the place
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
