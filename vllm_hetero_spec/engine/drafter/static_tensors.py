# SPDX-License-Identifier: Apache-2.0
"""Allocate once the tensors that the drafter's CUDA graphs read and write."""

from collections.abc import Collection

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.drafter.round_plan import NOWHERE, RoundPlan, table_width
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig
from vllm_hetero_spec.staging import Mirror


class StaticTensors:
    """The static tensors of rounds of up to B requests.

    `ids`, `positions`, `slots` and `lengths` are as in `ForwardBatch`; `plan_lengths`,
    `plan_places`, `table` and `forks` as in `RoundPlan`.

    Attributes:
        fed: int64 [3, tokens], `BatchFeed.tokens` of the catch-up forward.
        step: int64 [1], number of the next step.
        logits: [B, V_D], logits after the last token of each request.
        last: [B, V_D], logits at the position of that token, for token healing.
        now: Picked tokens of one step, before they are copied to their row of `picked`.
    """

    def __init__(
        self,
        model: DrafterModel,
        rules: PickConfig,
        picked: PickBuffers,
        size: int,
        tokens: int,
        widths: Collection[int],
    ) -> None:
        device, steps = model.device, len(picked.packet)
        self._max_length = model.max_length
        # Inference tensors cannot be written outside of inference mode.
        with torch.inference_mode(mode=False):

            def filled(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
                return torch.full(shape, value, dtype=dtype, device=device)

            self.ids = filled(0, torch.int32, tokens)
            self.positions = filled(0, torch.int64, tokens)
            self.slots = filled(NOWHERE, torch.int64, tokens)
            self.lengths = filled(1, torch.int32, size)
            blocks = table_width(-(-model.max_length // model.block_size), model.block_size)
            self._mirror = Mirror(
                device,
                [
                    ((3, tokens), np.int64),
                    ((3, size), np.int64),
                    ((steps, 2, size), np.int64),
                    ((steps, size), np.int32),
                    ((size, blocks), np.int32),
                ],
            )
            there = self._mirror.there
            self.fed, self.forks, self.plan_places, self.plan_lengths, self.table = there
            self.step = filled(1, torch.int64, 1)
            self.now = PickBuffers(
                1, size, device, confidences=picked.confidences, beside=picked.beside
            )
            self._picked = picked
            self._starts_cpu = {
                width: torch.arange(0, size * width + 1, width, dtype=torch.int32)
                for width in widths
            }
            self._starts = {width: of.to(device) for width, of in self._starts_cpu.items()}
            self._longest = torch.full((size,), model.max_length, dtype=torch.int32)
            with torch.inference_mode():
                like = rules.only_real(model.forward(self.batch(size, 1)))
            self.logits = torch.zeros(like.shape, dtype=like.dtype, device=device)
            self.last = torch.zeros_like(self.logits) if rules.back else self.logits[:0]

    def batch(self, size: int, width: int, *, back: bool = False) -> ForwardBatch:
        """Return a forward of the first `size` requests; `back` as in `BatchFeed`."""
        tokens = size * width
        return ForwardBatch(
            ids=self.ids[:tokens],
            positions=self.positions[:tokens],
            slots=self.slots[:tokens],
            starts=self._starts[width][: size + 1],
            starts_cpu=self._starts_cpu[width][: size + 1],
            lengths=self.lengths[:size],
            lengths_cpu=self._longest[:size],
            table=self.table[:size],
            max_query=width,
            max_length=self._max_length,
            back=back,
        )

    def clear(self) -> None:
        """Set valid positions and lengths that write no KV. Graphs are recorded over them."""
        places = self.plan_places.unbind(1)
        for positions, slots in ((self.positions, self.slots), self.fed[1:], places):
            positions.zero_()
            slots.fill_(NOWHERE)
        for lengths in (self.lengths, self.plan_lengths):
            lengths.fill_(1)
        self.step.fill_(1)

    def put(self, plan: RoundPlan) -> None:
        """Send a round's plan in one packet; with the catch-up tokens if it is `uniform`."""
        fed, forks, places, lengths, table = self._mirror.write()
        size, blocks = plan.table.shape
        if plan.uniform:
            fed[:, : plan.feed.tokens.shape[1]] = plan.feed.tokens
        forks[:, : plan.forks.shape[1]] = plan.forks
        places[: plan.steps, :, :size] = plan.places
        lengths[: plan.steps, :size] = plan.lengths
        table[:size, :blocks] = plan.table
        self._mirror.send(size)

    def catch_up(self, size: int, width: int) -> None:
        """Copy the tokens of the catch-up forward to the input."""
        tokens = size * width
        for of, row in zip((self.ids, self.positions, self.slots), self.fed, strict=True):
            of[:tokens].copy_(row[:tokens])
        self.lengths[:size].copy_(self.plan_lengths[0, :size])

    def advance(self, size: int) -> None:
        """Copy the plan of the next step, and the tokens picked before, to the input."""
        before = self._picked.packet[:, 0].index_select(0, self.step - 1)
        places = self.plan_places.index_select(0, self.step)
        lengths = self.plan_lengths.index_select(0, self.step)
        self.ids[:size].copy_(before[0, :size])
        self.positions[:size].copy_(places[0, 0, :size])
        self.slots[:size].copy_(places[0, 1, :size])
        self.lengths[:size].copy_(lengths[0, :size])

    def pick(self, logits: torch.Tensor, *, first: bool, back: bool = False) -> None:
        """Keep the logits [n, V_D], and pick each row's likeliest token.

        If `back`, the logits are [2n, V_D], as from `DrafterModel.logits`.
        """
        count = len(logits) >> back
        kept = self.logits[:count]
        kept.copy_(logits[:count])
        if back:
            self.last[:count].copy_(logits[count:])
        if first:
            self._picked.best(kept, 0)
            self.step.fill_(1)
            return
        self.now.wide = self._picked.wide
        self.now.best(kept, 0)
        size = self.now.packet.shape[2]
        self._picked.kept[:, :, :size].index_copy_(0, self.step, self.now.kept)
        self.step.add_(1)
