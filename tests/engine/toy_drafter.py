# SPDX-License-Identifier: Apache-2.0
"""A small random drafter with paged attention in tensor operations; it replaces a real model."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding  # unlike indexing, it refuses position -1

from vllm_hetero_spec import staging
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.model import ForwardBatch
from vllm_hetero_spec.engine.drafter.token_picking import PickConfig

SIZE, BLOCKS, VOCAB, WIDTH, LAYERS = 4, 256, 31, 16, 2


class ToyDrafterModel:
    """Stands in for `DrafterModel`. The logits of a text do not depend on the rest of the batch.

    Attributes:
        cache: float64 [layers, 2, slots + 1, width]; tokens of slot -1 go to the last slot.
        fed: Number of tokens of all forwards whose metadata was built on the host.
    """

    def __init__(self, max_length: int = 128) -> None:
        random = torch.Generator().manual_seed(5)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64) / WIDTH**0.5

        self.device = torch.device("cpu")
        self.block_size, self.num_blocks, self.max_length = SIZE, BLOCKS, max_length
        self.cache = torch.zeros(LAYERS, 2, BLOCKS * SIZE + 1, WIDTH, dtype=torch.float64)
        self.max_lines = BLOCKS
        self.embedding, self.places = weight(VOCAB, WIDTH) * 4, weight(max_length, WIDTH) * 2
        self.layers = [[weight(WIDTH, WIDTH) for _ in range(4)] for _ in range(LAYERS)]
        self.head = weight(WIDTH, VOCAB) * 4
        self.fed = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.metadata(batch)
        return self.logits(batch)

    def metadata(self, batch: ForwardBatch, *, to_capture: bool = False) -> Any:
        self.fed += len(batch.ids)
        return {}

    def update(self, metadata: Any) -> None:
        pass

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self.cache[:, :, :-1].unflatten(2, (BLOCKS, SIZE))
        for source, copy in copies:
            blocks[:, :, copy] = blocks[:, :, source]

    @contextlib.contextmanager
    def context(self, metadata: Any, batch: ForwardBatch) -> Iterator[None]:
        yield

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        count = len(batch.ids)
        request_of = torch.searchsorted(batch.starts[1:], torch.arange(count), right=True)
        places = torch.arange(batch.table.shape[1] * SIZE)
        slots = batch.table[request_of][:, places // SIZE].long() * SIZE + places % SIZE
        seen = places[None] <= batch.positions[:, None]
        written = torch.where(batch.slots < 0, BLOCKS * SIZE, batch.slots)
        hidden = self.embedding[batch.ids.long()] + embedding(batch.positions, self.places)
        for layer, (q, k, v, out) in enumerate(self.layers):
            keys, values = self.cache[layer]
            keys.index_copy_(0, written, hidden @ k)
            values.index_copy_(0, written, hidden @ v)
            scores = (keys[slots] @ (hidden @ q)[:, :, None])[:, :, 0]
            share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            hidden = (hidden + ((share[:, None] @ values[slots])[:, 0] @ out)).tanh()
        if batch.rows is not None:
            hidden = hidden[batch.rows]
        elif batch.max_query > 1:
            lines = hidden.view(-1, batch.max_query, WIDTH)
            hidden = torch.cat([lines[:, -1], lines[:, -2]]) if batch.back else lines[:, -1]
        return hidden @ self.head


def drafter_of(
    model: Any,
    lookahead: int,
    requests: int,
    *,
    vocab_size: int = VOCAB,
    banned: Collection[int] = (0,),
    **rules: Any,
) -> Drafter:
    """Return a decode loop on a model; `rules` are arguments of `PickConfig`."""
    ids = torch.tensor(sorted(banned), dtype=torch.long)
    return Drafter(model, PickConfig(vocab_size, ids, **rules), lookahead, requests)


def transfers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[torch.Size]]:
    """Return lists that get the size of each packet sent, and the shape of each tensor fetched."""
    sent, fetched = list[int](), list[torch.Size]()
    send, fetch = staging._Buffer.send, staging.Receiver.fetch
    monkeypatch.setattr(
        staging._Buffer, "send", lambda self, size: sent.append(size) or send(self, size)
    )
    monkeypatch.setattr(
        staging.Receiver, "fetch", lambda self, of: fetched.append(of.shape) or fetch(self, of)
    )
    return sent, fetched
