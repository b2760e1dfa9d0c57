# SPDX-License-Identifier: Apache-2.0
"""The decode loop: one ragged catch-up forward, then single-token steps over the batch.

Nothing here waits for the device between steps: the next input is the last step's argmax, all
lengths are known on the host, and drafted ids are read once, at the end.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from vllm_hetero_spec.draft.penalties import PenalisedRow, Penalties, Penalty
from vllm_hetero_spec.engine.drafter_model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.kv_pool import BlockTable

# How many of the drafter's best ids the first token is chosen from.
_CANDIDATES = 8


@dataclass
class DraftSequence:
    """What the drafter holds of one request.

    Attributes:
        table: Its KV blocks.
        kv_ids: Drafter ids whose KV is written, context first, then drafted ones.
    """

    table: BlockTable
    kv_ids: list[int] = field(default_factory=list)


@dataclass
class DraftRow:
    """One request in one call of `Drafter.run`.

    Attributes:
        sequence: Its KV; the table must have room for `pending` and `steps` tokens.
        pending: Ids to feed first, at least one.
        steps: Tokens to draft; 0 only writes the KV of `pending`.
        penalty: The request's penalties, if any.
        prompt_length: Leading ids of the context that are its prompt.
        choose: Picks the first token among the drafter's best candidates; its best where None.
        drafted: Filled by `run`: the drafted ids, cut at the first that is not finite.
        finite: False where the drafter's logits were NaN or infinite.
    """

    sequence: DraftSequence
    pending: Sequence[int]
    steps: int
    penalty: Penalty | None = None
    prompt_length: int = 0
    choose: Callable[[list[int]], int] | None = None
    drafted: list[int] = field(default_factory=list)
    finite: bool = True


class Drafter:
    """Greedy drafting over `DrafterModel`.

    Args:
        model: The drafter.
        banned: Ids that are never proposed: control tokens other than EOS.
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond are never drafted.

    Contexts may have ids beyond, which are the target's own where both tokenizers are the same: a
    prompt may name padding rows that only the target has. The drafter reads id 0 in their place.
    """

    def __init__(self, model: DrafterModel, banned: Collection[int], vocab_size: int) -> None:
        self.model = model
        self.max_length: int = model.config.model_config.max_model_len
        self._vocab_size = vocab_size
        self._banned = torch.tensor(sorted(banned), dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def run(self, rows: list[DraftRow]) -> None:
        """Feed every row's pending ids and draft its steps; fills `drafted` and `finite`.

        The sum of all pending ids is one forward: the caller keeps it within its token budget.
        Rows with a `choose` cost one wait for the device after the first step.
        """
        rows = sorted(rows, key=lambda row: -row.steps)
        table = self._block_table(rows)
        penalties = self._penalties(rows)
        logits = self._catch_up(rows, table)
        active = sum(row.steps > 0 for row in rows)
        if not active:
            return
        scores, ids = self._pick(logits[:active], penalties, rows)
        drafted, confidence = [ids], [scores]
        batches = self._decode_batches(rows[:active], table[:active])
        for batch in batches:
            ids = ids[: len(batch.positions)]
            scores, ids = self._pick(self.model.forward(ids, batch), penalties)
            drafted.append(ids)
            confidence.append(scores)
        self._collect(rows, drafted, confidence)

    def _catch_up(self, rows: list[DraftRow], table: np.ndarray) -> torch.Tensor:
        size = self.model.block_size
        queries = np.array([len(row.pending) for row in rows], np.int32)
        done = np.array([len(row.sequence.kv_ids) for row in rows], np.int32)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(queries, out=starts[1:])
        ids = np.fromiter(chain.from_iterable(row.pending for row in rows), np.int64, starts[-1])
        ids[ids >= self._vocab_size] = 0
        positions = np.arange(len(ids)) + np.repeat(done - starts[:-1], queries)
        blocks = table[np.repeat(np.arange(len(rows)), queries), positions // size]
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
        logits = self.model.forward(self._to_device(ids), batch)
        for row in rows:
            row.sequence.kv_ids.extend(row.pending)
        return logits

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

    def _penalties(self, rows: list[DraftRow]) -> Penalties | None:
        penalised = []
        for index, row in enumerate(rows):
            if row.penalty is not None and row.steps:
                context = chain(row.sequence.kv_ids, row.pending)
                ids = [i if i < self._vocab_size else 0 for i in context]
                prompt, output = ids[: row.prompt_length], ids[row.prompt_length :]
                penalised.append(PenalisedRow(index, row.penalty, prompt, output))
        if not penalised:
            return None
        return Penalties(penalised, self._vocab_size, self.model.device)

    def _pick(
        self,
        logits: torch.Tensor,
        penalties: Penalties | None,
        choosers: Sequence[DraftRow] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        began = time.perf_counter()
        logits = logits[:, : self._vocab_size]
        if penalties is not None:
            penalties.apply(logits)
        logits.index_fill_(1, self._banned, float("-inf"))
        if any(row.choose for row in choosers):
            scores, ids = self._choose(logits, choosers)
        else:
            scores, ids = logits.max(dim=-1)
        if penalties is not None:
            penalties.add(ids)
        self.model.forward_seconds += time.perf_counter() - began
        return scores, ids

    def _choose(
        self, logits: torch.Tensor, rows: Sequence[DraftRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first step of rows that have a say in it; its score tells whether it is finite."""
        best = logits.topk(min(_CANDIDATES, logits.shape[-1]), dim=-1)
        ids = [
            row.choose(candidates) if row.choose else candidates[0]
            for row, candidates in zip(rows, best.indices.tolist(), strict=False)
        ]
        return best.values[:, 0], torch.tensor(ids, device=logits.device)

    def _collect(
        self, rows: list[DraftRow], drafted: list[torch.Tensor], scores: list[torch.Tensor]
    ) -> None:
        chosen = torch.where(torch.isfinite(torch.cat(scores)), torch.cat(drafted), -1)
        tokens = iter(chosen.tolist())  # the one wait for the device
        for ids in drafted:
            for row, token in zip(rows[: len(ids)], tokens, strict=False):
                row.finite &= token >= 0
                if row.finite:
                    row.drafted.append(token)
        for row in rows:
            # The last drafted token has been chosen but never fed: it has no KV.
            row.sequence.kv_ids.extend(row.drafted[:-1])
