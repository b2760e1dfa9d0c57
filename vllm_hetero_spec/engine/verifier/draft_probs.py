# SPDX-License-Identifier: Apache-2.0
"""The laws of drafts on their way from the drafter to the verifier.

A draft is proposed in one step and verified in a later one, usually the next: the scheduler may
shorten it, or leave its request out for some steps. Its laws wait here under the request's id.
Where several ranks verify together, all use those of the first: they have to agree on every token.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_hetero_spec.verify.drafts import DraftBatch


@dataclass(frozen=True)
class DraftLaw:
    """The law of one request's draft.

    Attributes:
        rows: float32 [R, V_T], shared by all requests of the round it was drafted in.
        row_of: Row of each draft token, -1 where the token was certain.
    """

    rows: torch.Tensor
    row_of: Sequence[int]


class DraftLaws:
    """Laws of outstanding drafts by request; a request without one has a one-hot draft."""

    def __init__(self) -> None:
        self._laws: dict[str, DraftLaw] = {}

    def put(self, req_id: str, law: DraftLaw | None) -> None:
        """Remember the law of a request's newest draft; None for a one-hot draft."""
        if law is None:
            self._laws.pop(req_id, None)
        else:
            self._laws[req_id] = law

    def keep(self, live: Collection[str]) -> None:
        """Forget the requests that are gone."""
        for req_id in self._laws.keys() - live:
            del self._laws[req_id]

    def batch(
        self, req_ids: Sequence[str], lengths: Sequence[int], tokens: torch.Tensor
    ) -> DraftBatch:
        """The drafts of a step with their laws, which are handed out once.

        Args:
            req_ids: Requests of the batch, [B]; none where vLLM profiles with made-up ones, whose
                drafts are certain.
            lengths: Tokens left of each request's draft; cut at the end, never elsewhere.
            tokens: int64 [N], the draft tokens.
        """
        if not req_ids:
            return DraftBatch(tokens, lengths)
        rounds: dict[int, tuple[torch.Tensor, int]] = {}  # rows and where they will start
        row_of: list[int] = []
        total = 0
        for req_id, length in zip(req_ids, lengths, strict=True):
            law = self._laws.pop(req_id, None) if length else None
            if law is None:
                row_of += [-1] * length
                continue
            if id(law.rows) not in rounds:
                rounds[id(law.rows)] = law.rows, total
                total += len(law.rows)
            start = rounds[id(law.rows)][1]
            row_of += [row + start if row >= 0 else -1 for row in law.row_of[:length]]
        if not rounds:
            return DraftBatch(tokens, lengths)
        every = [rows for rows, _ in rounds.values()]
        return DraftBatch(
            tokens=tokens,
            lengths=lengths,
            rows=every[0] if len(every) == 1 else torch.cat(every),
            row_of=torch.tensor(row_of).to(tokens.device),
        )


def shared(laws: Mapping[str, DraftLaw], group: Any) -> dict[str, DraftLaw]:
    """The first rank's laws of a round, on every rank. All ranks have to call it.

    Args:
        laws: By request; read on the first rank alone.
        group: vLLM's tensor parallel group.
    """
    # On a CPU the bytes are sent as they lie, and rows may be part of wider ones.
    rounds = {id(law.rows): law.rows.contiguous() for law in laws.values()}
    number = {key: str(i) for i, key in enumerate(rounds)}
    sent: dict[str, Any] = {number[key]: rows for key, rows in rounds.items()}
    sent["laws"] = {
        req_id: (number[id(law.rows)], list(law.row_of)) for req_id, law in laws.items()
    }
    received = group.broadcast_tensor_dict(sent if group.is_first_rank else None, src=0)
    return {
        req_id: DraftLaw(received[rows], row_of)
        for req_id, (rows, row_of) in received["laws"].items()
    }
