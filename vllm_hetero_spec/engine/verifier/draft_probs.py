# SPDX-License-Identifier: Apache-2.0
"""Storage and broadcast of `draft_probs` between drafting and verification.

A draft is proposed in one step and verified in a later one, usually the next. Before that, the
scheduler may shorten it or skip its request for some steps. The `draft_probs` are therefore stored
by request. All ranks that verify together use those of the first rank, because they must agree on
every token.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import in_the_same_node_as

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K, DraftProbs, pack_rows, unpack_rows
from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.drafts import DraftBatch

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class PendingDraftProbs:
    """`DraftProbs` of drafts that are not verified yet. Requests without any have certain ones."""

    def __init__(self, send: Send = on_host) -> None:
        self._send = send
        self._pending: dict[str, DraftProbs] = {}

    def put(self, req_id: str, draft_probs: DraftProbs) -> None:
        """Store the `DraftProbs` of a request's newest draft."""
        self._pending[req_id] = draft_probs

    def keep(self, live: Collection[str], renewed: Collection[str]) -> None:
        """Delete the entries of requests that have ended, or that are in `renewed`."""
        for req_id in [of for of in self._pending if of not in live or of in renewed]:
            del self._pending[req_id]

    def batch(
        self,
        req_ids: Sequence[str],
        lengths: Sequence[int],
        tokens: torch.Tensor,
        seeds: Sequence[int] | np.ndarray | None,
        places: Sequence[int] | None,
        void: Collection[str] = (),
        first_rows: np.ndarray | None = None,
        room: int = 0,
    ) -> DraftBatch:
        """Return the drafts of a step with their draft_probs, and delete these here.

        Args:
            req_ids: [B]; empty while vLLM profiles with dummy requests, whose drafts are certain.
            lengths: [B], draft tokens. A draft may be cut at its end, or padded there with -1.
            tokens: int64 [N], draft tokens.
            seeds, places, first_rows, room: As in `DraftBatch.of`.
            void: Requests whose draft tokens are padding. Their draft_probs belong to no token.
        """
        # All requests of a round share one table, whose `id()` is the key. The values are the table
        # and its first row in the batch.
        rounds: dict[int, tuple[torch.Tensor, int]] = {}
        row_of: list[int] = []
        total = 0
        for req_id, length in zip(req_ids, lengths, strict=True) if req_ids else ():
            probs = self._pending.pop(req_id, None) if length else None
            if probs is None or req_id in void:
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
            first_rows=first_rows,
            room=room,
        )


def likeliest_between(group: "GroupCoordinator") -> int | None:
    """Return the number of likeliest drafter tokens to sample from; None for all. Collective.

    Within a node, ranks exchange whole rows. Between nodes these would be megabytes per request and
    step.
    """
    if group.world_size == 1 or all(in_the_same_node_as(group.cpu_group)):
        return None
    return SPARSE_TOP_K


def shared(
    draft_probs: Mapping[str, DraftProbs], group: "GroupCoordinator", likeliest: int | None = None
) -> dict[str, DraftProbs]:
    """Return the first rank's `DraftProbs` of a round on every rank. Collective.

    If the first rank fails, it first sends an empty result and then raises, because the other ranks
    would wait forever. `draft_probs` is read on the first rank only. `likeliest` is the maximum
    number of tokens with a probability in a row; None to send whole rows.
    """
    sent, failure = None, None
    if group.is_first_rank:
        try:
            sent = _message(draft_probs, likeliest)
        except Exception as error:  # usually out of memory
            sent, failure = _message({}, None), error
    received = group.broadcast_tensor_dict(sent, src=0)
    if failure is not None:
        raise failure
    tables: dict[str, torch.Tensor] = {}
    for name, width in received["widths"].items():
        tables[name] = received[name] if likeliest is None else unpack_rows(received[name], width)
    return {
        req_id: DraftProbs(tables[name], row_of)
        for req_id, (name, row_of) in received["of_request"].items()
    }


def _message(draft_probs: Mapping[str, DraftProbs], likeliest: int | None) -> dict[str, Any]:
    rounds = {id(probs.rows): probs.rows for probs in draft_probs.values()}
    number = {key: str(i) for i, key in enumerate(rounds)}
    sent: dict[str, Any] = {
        # A broadcast on CPU sends contiguous memory. Rows may be a slice of wider ones.
        number[key]: rows.contiguous() if likeliest is None else pack_rows(rows, likeliest)
        for key, rows in rounds.items()
    }
    sent["widths"] = {number[key]: rows.shape[1] for key, rows in rounds.items()}
    sent["of_request"] = {
        req_id: (number[id(probs.rows)], list(probs.row_of))
        for req_id, probs in draft_probs.items()
    }
    return sent
