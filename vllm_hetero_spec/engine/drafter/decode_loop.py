# SPDX-License-Identifier: Apache-2.0
"""The decode loop: one ragged catch-up forward, then single-token steps over the batch.

Nothing here waits for the device between steps: the next input is what the last step picked, all
lengths are known on the host, and drafted ids are read once, at the end.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from vllm_hetero_spec.draft.drawing import SampledMethod
from vllm_hetero_spec.draft.path import Path
from vllm_hetero_spec.draft.slrs import MergeSpan, Slrs
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.drafter.token_choice import (
    DraftRow,
    DraftSequence,
    Drawn,
    Picker,
    PickRules,
)

# Told of the rows that picked last, with their confidences, whether the round goes on.
Proceed = Callable[[Sequence[DraftRow]], bool]


class Drafter:
    """Greedy and sampled drafting over `DrafterModel`.

    Args:
        model: The drafter.
        banned: Ids that are never drafted.
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond are never drafted.
        sampling: What sampled drafts propose; None where all are greedy.
        seed: Of the drafter's own random stream.
        ends: Ids after which a draft ends.
        confidences: Whether rows are to come with confidences.

    Contexts may have ids beyond, which are the target's own where both tokenizers are the same: a
    prompt may name padding rows that only the target has. The drafter reads id 0 in their place.
    """

    def __init__(
        self,
        model: DrafterModel,
        banned: Collection[int],
        vocab_size: int,
        sampling: SampledMethod | None = None,
        seed: int = 0,
        ends: frozenset[int] = frozenset(),
        confidences: bool = False,
    ) -> None:
        self._ends = ends
        self.model = model
        self.max_length: int = model.config.model_config.max_model_len
        self._rules = PickRules(
            vocab_size=vocab_size,
            banned=torch.tensor(sorted(banned), dtype=torch.long, device=model.device),
            sampling=sampling,
            generator=torch.Generator(model.device).manual_seed(seed),
            confidences=confidences,
        )

    @torch.inference_mode()
    def run(self, rows: list[DraftRow], proceed: Proceed | None = None) -> None:
        """Feed every row's pending ids and draft its steps; fills `drafted` and `finite`.

        The sum of all pending ids is one forward: the caller keeps it within its token budget.
        Rows with a `choose` cost one wait for the device after the first step.

        Args:
            rows: The requests of the round.
            proceed: Asked after every step whether to go on, at the cost of a wait for the device.
        """
        rows = sorted(rows, key=lambda row: (self._rules.takes_paths(row), -row.steps))
        paths = sum(map(self._rules.takes_paths, rows))
        table = self._block_table(rows)
        others = rows[: len(rows) - paths]
        picker = Picker(others, self._rules, self.model.device)  # counts ids before they are fed
        logits = self._catch_up(rows, table)
        if paths:
            self._follow(rows[-paths:], table[-paths:], logits[-paths:])
        rows = others
        active = sum(row.steps > 0 for row in rows)
        if not active:
            return
        self._timed(picker.pick, logits[:active])
        for batch in self._decode_batches(rows[:active], table[:active]):
            if proceed is not None and not proceed(picker.so_far()):
                break
            ids = picker.newest[: len(batch.positions)]
            self._timed(picker.pick, self.model.forward(ids, batch))
        picker.collect()

    def merge_span(self, request: Drawn) -> MergeSpan:
        """How far SLRS-n looks ahead for a request; 1 token where it is drafted otherwise."""
        return self._rules.merge_span(request)

    @torch.inference_mode()
    def step(self, batch: int) -> None:
        """One step of decoding for so many requests, on the padding block, to be timed."""
        ids = torch.zeros(batch, dtype=torch.int64, device=self.model.device)
        nowhere = np.zeros((batch, 1), np.int32)
        self.model.forward(ids, self._single(nowhere, np.zeros(batch, np.int64))).argmax(-1)

    @torch.inference_mode()
    def read(self, tokens: int) -> None:
        """One forward over so many context tokens, on the padding block, to be timed."""
        pages = -(-tokens // self.model.block_size)
        row = DraftRow(DraftSequence(BlockTable()), [0] * tokens, steps=0)
        self._catch_up([row], np.zeros((1, pages), np.int32)).argmax(-1)

    def _follow(self, rows: list[DraftRow], table: np.ndarray, logits: torch.Tensor) -> None:
        """Draft rows by SLRS-n, each along a path of its own."""
        sampling = self._rules.sampling
        assert sampling is not None
        assert sampling.merging is not None
        draws = self._rules.draws(rows, draft_probs=False)
        base = np.array([len(row.sequence.kv_ids) for row in rows])
        paths = [Path(row.steps, row.wanted, len(row.scratch)) for row in rows]

        def drawn_from(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
            logits = logits[:, : self._rules.vocab_size]
            logits.index_fill_(1, self._rules.banned, float("-inf"))
            return draws.rows(logits, indices)

        def feed(
            indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
        ) -> torch.Tensor:
            done = base[indices] + [paths[index].written for index in indices]
            if not side_branches and max(map(len, ids)) == 1:
                fed = torch.tensor([token for (token,) in ids], device=self.model.device)
                batch = self._single(table[indices], done)
                return drawn_from(self.model.forward(fed, batch), indices)
            pending, lines = list(ids), table[indices]
            spare = [iter(row.scratch) for row in rows]
            for line in range(len(indices) - side_branches, len(indices)):
                index, block = indices[line], done[line] // self.model.block_size
                lines[line, block] = next(spare[index])
                start = done[line] = block * self.model.block_size
                before = rows[index].sequence.kv_ids[start:]
                drafted = paths[index].drafted[max(0, start - base[index]) : paths[index].fed]
                pending[line] = [*before, *drafted, *ids[line]]
            return drawn_from(self._read(lines, done, pending), indices)

        finite = logits.isfinite().any(-1).tolist()
        tokens, merging = sampling.tokens, sampling.merging
        slrs = Slrs(tokens, merging, self._ends, draws.noise, sampling.merge_span.tokens)
        draft_probs = slrs.draft(drawn_from(logits, list(range(len(rows)))), paths, feed)
        for row, path, sound in zip(rows, paths, finite, strict=True):
            row.finite, row.path, row.draft_probs = sound, path, draft_probs
            row.drafted = path.drafted
            row.sequence.kv_ids.extend(path.drafted[: path.fed])
        if self._rules.confidences:
            peaks = draft_probs.amax(-1).tolist() if len(draft_probs) else []
            for row, path in zip(rows, paths, strict=True):
                row.confidences = [peaks[index] if index >= 0 else 1.0 for index in path.row_of]

    def _single(self, table: np.ndarray, positions: np.ndarray) -> ForwardBatch:
        """One token for each line of the block table."""
        size = self.model.block_size
        blocks = np.take_along_axis(table, (positions // size)[:, None], axis=1)[:, 0]
        lengths_cpu = torch.from_numpy((positions + 1).astype(np.int32))
        starts_cpu = torch.arange(len(table) + 1, dtype=torch.int32)
        return ForwardBatch(
            positions=self._to_device(positions),
            slots=self._to_device(blocks * size + positions % size),
            starts=starts_cpu.to(self.model.device),
            starts_cpu=starts_cpu,
            lengths=lengths_cpu.to(self.model.device),
            lengths_cpu=lengths_cpu,
            block_table=self._to_device(table),
        )

    def _timed(self, pick: Callable[[torch.Tensor], None], logits: torch.Tensor) -> None:
        began = time.perf_counter()
        pick(logits)
        self.model.forward_seconds += time.perf_counter() - began

    def _catch_up(self, rows: list[DraftRow], table: np.ndarray) -> torch.Tensor:
        done = np.array([len(row.sequence.kv_ids) for row in rows])
        logits = self._read(table, done, [row.pending for row in rows])
        for row in rows:
            row.sequence.kv_ids.extend(row.pending)
        return logits

    def _read(
        self, table: np.ndarray, done: np.ndarray, pending: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Feed every line of a block table its ids, behind the tokens done; logits of the last."""
        size = self.model.block_size
        queries, done = np.array([len(ids) for ids in pending], np.int32), done.astype(np.int32)
        starts = np.zeros(len(pending) + 1, np.int32)
        np.cumsum(queries, out=starts[1:])
        ids = np.fromiter(chain.from_iterable(pending), np.int64, starts[-1])
        ids[ids >= self._rules.vocab_size] = 0
        positions = np.arange(len(ids)) + np.repeat(done - starts[:-1], queries)
        blocks = table[np.repeat(np.arange(len(pending)), queries), positions // size]
        lengths_cpu, starts_cpu = torch.from_numpy(done + queries), torch.from_numpy(starts)
        batch = ForwardBatch(
            positions=self._to_device(positions),
            slots=self._to_device(blocks * size + positions % size),
            starts=starts_cpu.to(self.model.device),
            starts_cpu=starts_cpu,
            lengths=lengths_cpu.to(self.model.device),
            lengths_cpu=lengths_cpu,
            block_table=self._to_device(table),
            max_query=int(queries.max()),
            last=self._to_device(starts[1:].astype(np.int64) - 1),
        )
        return self.model.forward(self._to_device(ids), batch)

    def _decode_batches(self, rows: list[DraftRow], table: np.ndarray) -> Iterator[ForwardBatch]:
        """One batch per further step: the rows that still draft, a token each.

        All positions are known beforehand, so they cross to the device once.
        """
        size = self.model.block_size
        steps = rows[0].steps - 1
        if not steps:
            return
        done = np.array([len(row.sequence.kv_ids) for row in rows])
        positions = done + np.arange(steps)[:, None]
        index = np.minimum(positions // size, table.shape[1] - 1)  # rows that end earlier
        blocks = np.take_along_axis(table, index.T, axis=1).T
        lengths_cpu = torch.from_numpy((positions + 1).astype(np.int32))
        starts_cpu = torch.arange(len(rows) + 1, dtype=torch.int32)
        device_positions = self._to_device(positions)
        slots = self._to_device(blocks * size + positions % size)
        lengths = lengths_cpu.to(self.model.device)
        starts = starts_cpu.to(self.model.device)
        block_table = self._to_device(table)
        active = len(rows)
        for step in range(steps):
            while rows[active - 1].steps <= step + 1:
                active -= 1
            yield ForwardBatch(
                positions=device_positions[step, :active],
                slots=slots[step, :active],
                starts=starts[: active + 1],
                starts_cpu=starts_cpu[: active + 1],
                lengths=lengths[step, :active],
                lengths_cpu=lengths_cpu[step, :active],
                block_table=block_table[:active],
            )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device)

    @staticmethod
    def _block_table(rows: list[DraftRow]) -> np.ndarray:
        width = max(len(row.sequence.table.blocks) for row in rows)
        table = np.zeros((len(rows), width), np.int32)
        for line, row in zip(table, rows, strict=True):
            count = len(row.sequence.table.blocks)
            line[:count] = row.sequence.table.row[:count]
        return table
