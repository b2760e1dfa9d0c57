# SPDX-License-Identifier: Apache-2.0
"""The decode loop: one ragged catch-up forward, then single-token steps over the batch.

Nothing here waits for the device between steps: the next input is the last step's argmax, all
lengths are known on the host, and drafted ids are read once, at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter_model import DrafterModel
from vllm_hetero_spec.engine.kv_pool import BlockTable


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
        drafted: Filled by `run`: the drafted ids, cut at the first that is not finite.
        finite: False where the drafter's logits were NaN or infinite.
    """

    sequence: DraftSequence
    pending: Sequence[int]
    steps: int
    drafted: list[int] = field(default_factory=list)
    finite: bool = True


class Drafter:
    """Greedy drafting over `DrafterModel`.

    Args:
        model: The drafter.
        banned: Ids that are never proposed: control tokens other than EOS.
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond do not exist.
    """

    def __init__(self, model: DrafterModel, banned: Sequence[int], vocab_size: int) -> None:
        self.model = model
        self.max_length: int = model.config.model_config.max_model_len
        self._vocab_size = vocab_size
        self._banned = torch.tensor(sorted(banned), dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def run(self, rows: list[DraftRow]) -> None:
        """Feed every row's pending ids and draft its steps; fills `drafted` and `finite`.

        The sum of all pending ids is one forward: the caller keeps it within its token budget.
        """
        rows = sorted(rows, key=lambda row: -row.steps)
        logits = self._catch_up(rows)
        active = sum(row.steps > 0 for row in rows)
        if not active:
            return
        scores, ids = self._pick(logits[:active])
        drafted, confidence = [ids], [scores]
        device = self.model.device
        lengths = np.array([len(row.sequence.kv_ids) for row in rows[:active]], np.int32)
        table = self._block_table(rows[:active])
        positions = torch.from_numpy(lengths.astype(np.int64)).to(device)
        device_lengths = torch.from_numpy(lengths).to(device)
        starts_cpu = torch.arange(active + 1, dtype=torch.int32)
        starts = starts_cpu.to(device)
        for step in range(1, rows[0].steps):
            while rows[active - 1].steps <= step:
                active -= 1
            device_lengths = device_lengths[:active] + 1
            lengths = lengths[:active] + 1
            logits = self.model.forward(
                ids=ids[:active],
                positions=positions[:active],
                starts=starts[: active + 1],
                starts_cpu=starts_cpu[: active + 1],
                lengths=device_lengths,
                lengths_cpu=torch.from_numpy(lengths),
                block_table=table[:active],
                max_query=1,
                max_length=int(lengths.max()),
            )
            scores, ids = self._pick(logits)
            drafted.append(ids)
            confidence.append(scores)
            positions = positions[:active] + 1
        self._collect(rows, drafted, confidence)

    def _catch_up(self, rows: list[DraftRow]) -> torch.Tensor:
        queries = np.array([len(row.pending) for row in rows], np.int32)
        done = np.array([len(row.sequence.kv_ids) for row in rows], np.int32)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(queries, out=starts[1:])
        ids = np.fromiter((i for row in rows for i in row.pending), np.int64, int(starts[-1]))
        positions = np.arange(len(ids)) + np.repeat(done - starts[:-1], queries)
        lengths = done + queries
        device = self.model.device
        starts_cpu, lengths_cpu = torch.from_numpy(starts), torch.from_numpy(lengths)
        logits = self.model.forward(
            ids=torch.from_numpy(ids).to(device),
            positions=torch.from_numpy(positions.astype(np.int64)).to(device),
            starts=starts_cpu.to(device),
            starts_cpu=starts_cpu,
            lengths=lengths_cpu.to(device),
            lengths_cpu=lengths_cpu,
            block_table=self._block_table(rows),
            max_query=int(queries.max()),
            max_length=int(lengths.max()),
        )
        for row in rows:
            row.sequence.kv_ids.extend(row.pending)
        return logits

    def _block_table(self, rows: list[DraftRow]) -> torch.Tensor:
        width = max(len(row.sequence.table.blocks) for row in rows)
        table = np.zeros((len(rows), width), np.int32)
        for line, row in zip(table, rows, strict=True):
            blocks = row.sequence.table
            line[: len(blocks.blocks)] = blocks.row[: len(blocks.blocks)]
        return torch.from_numpy(table).to(self.model.device)

    def _pick(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits[:, : self._vocab_size]
        logits.index_fill_(1, self._banned, float("-inf"))
        scores, ids = logits.max(dim=-1)
        return scores, ids

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
