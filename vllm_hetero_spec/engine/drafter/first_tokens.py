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
# Share of rounds with another first token above which steps wait for the judge, and the weight of
# the newest round in it: the more requests, the likelier that one of them has another.
_OFTEN, _FADE = 0.3, 0.1


class Candidates(NamedTuple):
    """For the first tokens of n requests, on their way to the host.

    Attributes:
        fetched: int32 [n, c] ids, best first; behind them, where they were asked for, 32 in the
            place of each text's last token, and the bits of their float32 logits.
        num_next: c.
    """

    fetched: Fetched
    num_next: int


class Beginning(NamedTuple):
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


class FirstTokens:
    """Judges first tokens.

    Args:
        receiver: Brings the candidates to the host.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self._overruling = receiver, 0.0

    @property
    def often_others(self) -> bool:
        """Whether so many rounds had others of late that steps in vain cost more than a wait."""
        return self._overruling > _OFTEN

    def fetch(self, behind: CaughtUp, requests: int) -> Candidates:
        """Begin to bring the candidates of the first so many requests to the host."""
        size = behind.logits.shape[1]
        count = min(_NEXT, size)
        parts = [behind.logits[:requests].topk(count, -1).indices.int()]
        if behind.last is not None:
            best = behind.last[:requests].topk(min(_LAST, size), -1)
            parts += [best.indices.int(), best.values.float().view(torch.int32)]
        return Candidates(self._receiver.fetch(torch.cat(parts, 1)), count)

    def judge(
        self, rows: Sequence[DraftRow], candidates: Candidates, *, drawn: bool = False
    ) -> dict[int, Beginning]:
        """Of the rows whose draft does not begin with the drafter's best, what it begins with.

        Args:
            rows: The requests.
            candidates: From `fetch`, for the first n of them; waited for.
            drawn: Drafts that were to be drawn may begin in the place of the text's last token.
        """
        fetched = candidates.fetched.wait()
        start = candidates.num_next
        values = (fetched.shape[1] + start) // 2  # where they begin, behind the ids in the place
        found = {}
        for index, (row, ids) in enumerate(zip(rows, fetched[:, :values].tolist(), strict=False)):
            task, own = row.task, ids[:start]
            draws = task.draw is not None
            if row.choose is None or (draws and not drawn):
                continue
            looked_back = not task.paths and len(row.sequence.kv_ids) > 1
            first = row.choose(own, ids[start:] if looked_back else ())
            if first.known:
                among = fetched[index, values:].view(np.float32)[first.among].tolist()
                share = 1 / sum([math.exp(value - among[0]) for value in among])
                found[index] = Beginning(first.id, first.known, share)
            elif first.id != own[0] and not draws:
                found[index] = Beginning(first.id, 0, 0.0)
        self._overruling += _FADE * (bool(found) - self._overruling)
        return found
