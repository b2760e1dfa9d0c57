# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a forward go: positions, slots and lengths of a table of KV blocks."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.model import ForwardBatch
from vllm_hetero_spec.engine.drafter.request_state import DraftSequence


class ForwardBatches:
    """Makes the batches of one drafter.

    Args:
        block_size: Tokens of a KV block.
        device: Where the drafter runs.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def table(self, sequences: Sequence[DraftSequence]) -> np.ndarray:
        """int32 [n, W], the KV blocks of each sequence, 0 behind the last."""
        width = max(len(sequence.table.blocks) for sequence in sequences)
        table = np.zeros((len(sequences), width), np.int32)
        for line, sequence in zip(table, sequences, strict=True):
            count = len(sequence.table.blocks)
            line[:count] = sequence.table.row[:count]
        return table

    def ragged(
        self, table: np.ndarray, cached: np.ndarray, pending: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, ForwardBatch]:
        """Every line's pending ids, behind the tokens that it has cached.

        Args:
            table: int32 [n, W].
            cached: int [n], tokens of each line whose KV is written.
            pending: Drafter ids to feed, at least one for each line.

        Returns:
            int64 [N] ids, and where they go.
        """
        queries, cached = np.array([len(ids) for ids in pending], np.int32), cached.astype(np.int32)
        starts = np.zeros(len(pending) + 1, np.int32)
        np.cumsum(queries, out=starts[1:])
        ids = np.fromiter(chain.from_iterable(pending), np.int64, starts[-1])
        positions = np.arange(len(ids)) + np.repeat(cached - starts[:-1], queries)
        lines = np.repeat(np.arange(len(pending)), queries)
        blocks = table[lines, positions // self._block_size]
        lengths_cpu, starts_cpu = torch.from_numpy(cached + queries), torch.from_numpy(starts)
        return ids, ForwardBatch(
            positions=self.to_device(positions),
            slots=self.to_device(self._slots(blocks, positions)),
            starts=starts_cpu.to(self._device),
            starts_cpu=starts_cpu,
            lengths=lengths_cpu.to(self._device),
            lengths_cpu=lengths_cpu,
            block_table=self.to_device(table),
            max_query=int(queries.max()),
            last=self.to_device(starts[1:].astype(np.int64) - 1),
        )

    def single(self, table: np.ndarray, positions: np.ndarray) -> ForwardBatch:
        """One token for each line of a table, at int64 positions [n]."""
        (batch,) = self.steps(table, positions, [1] * len(table))
        return batch

    def steps(
        self, table: np.ndarray, cached: np.ndarray, steps: Sequence[int]
    ) -> Iterator[ForwardBatch]:
        """One batch per step: the lines that still draft, a token each.

        All positions are known beforehand, so they cross to the device once.

        Args:
            table: int32 [n, W].
            cached: int64 [n], tokens of each line whose KV is written.
            steps: Of each line, not increasing.
        """
        if not steps[0]:
            return
        positions = cached + np.arange(steps[0])[:, None]
        index = np.minimum(positions // self._block_size, table.shape[1] - 1)  # lines that ended
        blocks = np.take_along_axis(table, index.T, axis=1).T
        lengths_cpu = torch.from_numpy((positions + 1).astype(np.int32))
        starts_cpu = torch.arange(len(table) + 1, dtype=torch.int32)
        device_positions = self.to_device(positions)
        slots = self.to_device(self._slots(blocks, positions))
        lengths = lengths_cpu.to(self._device)
        starts = starts_cpu.to(self._device)
        block_table = self.to_device(table)
        active = len(table)
        per_step = (of.unbind() for of in (device_positions, slots, lengths, lengths_cpu))
        for step, tensors in enumerate(zip(*per_step, strict=True)):
            if steps[active - 1] <= step:
                while steps[active - 1] <= step:
                    active -= 1
                starts, starts_cpu = starts[: active + 1], starts_cpu[: active + 1]
                block_table = block_table[:active]
            if active < len(table):
                tensors = tuple(tensor[:active] for tensor in tensors)
            positions_now, slots_now, lengths_now, lengths_cpu_now = tensors
            yield ForwardBatch(
                positions=positions_now,
                slots=slots_now,
                starts=starts,
                starts_cpu=starts_cpu,
                lengths=lengths_now,
                lengths_cpu=lengths_cpu_now,
                block_table=block_table,
            )

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """An array as a tensor on the device."""
        return torch.from_numpy(array).to(self._device)

    def _slots(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return blocks * self._block_size + positions % self._block_size
