# SPDX-License-Identifier: Apache-2.0
"""What drafts were drawn from, on its way from the drafter to the verifier.

A draft is proposed in one step and verified in a later one, usually the next: the scheduler may
shorten it, or leave its request out for some steps. What it was drawn from waits here by request.
Where several ranks verify together, all use those of the first: they have to agree on every token.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import DraftProbs
from vllm_hetero_spec.draft.sparse_rows import pack, unpack
from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.drafts import DraftBatch

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class PendingDraftProbs:
    """`DraftProbs` of outstanding drafts; a request that has none has a certain draft.

    Args:
        send: Brings arrays to the device, once for each batch (`staging.Sender`).
    """

    def __init__(self, send: Send = on_host) -> None:
        self._send = send
        self._pending: dict[str, DraftProbs] = {}

    def put(self, req_id: str, draft_probs: DraftProbs) -> None:
        """Remember what a request's newest draft was drawn from."""
        self._pending[req_id] = draft_probs

    def keep(self, live: Collection[str], renewed: Collection[str]) -> None:
        """Forget the requests that are gone, and those of which there are newer drafts."""
        for req_id in [of for of in self._pending if of not in live or of in renewed]:
            del self._pending[req_id]

    def batch(
        self,
        req_ids: Sequence[str],
        lengths: Sequence[int],
        tokens: torch.Tensor,
        seeds: Sequence[int] | np.ndarray | None,
        places: Sequence[int] | torch.Tensor | None,
    ) -> DraftBatch:
        """The drafts of a step with their draft_probs, which are handed out once.

        Args:
            req_ids: The B requests; empty where vLLM profiles with made-up ones, whose drafts are
                certain.
            lengths: Tokens of each request's draft; cut at the end, never elsewhere, or filled up
                there with -1.
            tokens: int64 [N], the draft tokens.
            seeds: See `DraftBatch`, as `places`.
            places: [B].
        """
        # A round of drafting is known by its table, which all its requests share: rows by round,
        # and where they will start.
        rounds: dict[int, tuple[torch.Tensor, int]] = {}
        row_of: list[int] = []
        total = 0
        for req_id, length in zip(req_ids, lengths, strict=True) if req_ids else ():
            probs = self._pending.pop(req_id, None) if length else None
            if probs is None:
                row_of += [-1] * length
                continue
            if id(probs.rows) not in rounds:
                rounds[id(probs.rows)] = probs.rows, total
                total += len(probs.rows)
            start = rounds[id(probs.rows)][1]
            own = [row + start if row >= 0 else -1 for row in probs.row_of[:length]]
            row_of += own + [-1] * (length - len(own))
        return DraftBatch.of(
            tokens,
            lengths,
            seeds,
            places,
            draft_probs=[rows for rows, _ in rounds.values()],
            row_of=row_of,
            req_ids=req_ids,
            send=self._send,
        )


def shared(
    draft_probs: Mapping[str, DraftProbs], group: "GroupCoordinator", likeliest: int | None = None
) -> dict[str, DraftProbs]:
    """What the first rank's drafts of a round were drawn from, on every rank.

    All ranks have to call it. What the first cannot send it raises, when the others have heard that
    there is nothing: they would wait for ever.

    Args:
        draft_probs: By request; read on the first rank alone.
        group: vLLM's tensor parallel group.
        likeliest: How many tokens at most have a probability in a row: no others travel. None for
            all, whose rows travel whole.
    """
    sent, failure = None, None
    if group.is_first_rank:
        try:
            sent = _message(draft_probs, likeliest)
        except Exception as error:  # out of memory, as a rule
            sent, failure = _message({}, None), error
    received = group.broadcast_tensor_dict(sent, src=0)
    if failure is not None:
        raise failure
    tables = {name: _unpacked(name, received) for name, _ in received["of_request"].values()}
    return {
        req_id: DraftProbs(tables[name], row_of)
        for req_id, (name, row_of) in received["of_request"].items()
    }


def _message(draft_probs: Mapping[str, DraftProbs], likeliest: int | None) -> dict[str, Any]:
    rounds = {id(probs.rows): probs.rows for probs in draft_probs.values()}
    number = {key: str(i) for i, key in enumerate(rounds)}
    sent: dict[str, Any] = {}
    for key, rows in rounds.items():
        sent |= _packed(number[key], rows, likeliest)
    sent["of_request"] = {
        req_id: (number[id(probs.rows)], list(probs.row_of))
        for req_id, probs in draft_probs.items()
    }
    return sent


def _packed(name: str, rows: torch.Tensor, likeliest: int | None) -> dict[str, Any]:
    """Rows [R, V_T] as they travel."""
    if likeliest is None:
        # On a CPU the bytes are sent as they lie, and rows may be part of wider ones.
        return {name: rows.contiguous()}
    return {name: pack(rows, likeliest), f"{name} width": rows.shape[1]}


def _unpacked(name: str, received: Mapping[str, Any]) -> torch.Tensor:
    rows: torch.Tensor = received[name]
    width = received.get(f"{name} width")
    return rows if width is None else unpack(rows, width)
