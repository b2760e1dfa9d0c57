# SPDX-License-Identifier: Apache-2.0
"""The decode loop: one ragged catch-up forward, then single-token steps over the batch.

Steps do not wait for the device, unless a controller is to be asked between them: the next input is
what the last step picked, all lengths are known on the host, and drafted ids are read at the end.
"""

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from vllm_hetero_spec.draft.drawing import SampledMethod
from vllm_hetero_spec.draft.slrs import MergeSpan
from vllm_hetero_spec.engine.drafter.forward_batches import ForwardBatches
from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.drafter.span_drafting import SpanDrafting
from vllm_hetero_spec.engine.drafter.tasks import Control, DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.engine.drafter.token_choice import Picker, PickRules


class Drafter:
    """Greedy and sampled drafting over `DrafterModel`.

    Args:
        model: The drafter.
        banned: Ids that are never drafted.
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond are never drafted.
        sampling: What sampled drafts propose; None where all are greedy.
        seed: Of the drafter's own random stream.
        ends: Ids after which a draft ends.
        confidences: Whether drafts are to come with confidences.

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
        self.model = model
        self.max_length: int = model.config.model_config.max_model_len
        self._batches = ForwardBatches(model.block_size, model.device)
        self._rules = PickRules(
            vocab_size=vocab_size,
            banned=torch.tensor(sorted(banned), dtype=torch.long, device=model.device),
            ends=ends,
            sampling=sampling,
            generator=torch.Generator(model.device).manual_seed(seed),
            confidences=confidences,
        )

    @torch.inference_mode()
    def run(self, rows: Sequence[DraftRow], control: Control | None = None) -> list[DrafterTokens]:
        """Feed every row's pending ids and draft its steps.

        The sum of all pending ids is one forward: the caller keeps it within its token budget.
        Rows with a `choose` cost one wait for the device after the first step.

        Args:
            rows: The requests of the round.
            control: Asked after every step whether to go on, where it wants to be, at the cost of
                a wait for the device.

        Returns:
            What was drafted for each row, in their order.
        """
        spans = [False] * len(rows)
        if self.merges:
            spans = [row.steps > 0 and self.span(row.task).tokens > 1 for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (spans[i], -rows[i].steps))
        rows = [rows[i] for i in order]
        singles = len(rows) - sum(spans)
        table = self._batches.table([row.sequence for row in rows])
        picker = Picker(rows[:singles], self._rules, self.model.device)
        logits = self._catch_up(rows, table)
        drafted = [DrafterTokens([])] * len(rows)
        if singles < len(rows):
            drafted[singles:] = self._along_spans(rows[singles:], table[singles:], logits[singles:])
        active = sum(row.steps > 0 for row in rows[:singles])
        if active:
            drafted[:active] = self._step_by_step(
                picker, rows[:active], table[:active], logits[:active], control
            )
        restored = drafted.copy()
        for index, tokens in zip(order, drafted, strict=True):
            restored[index] = tokens
        return restored

    @property
    def merges(self) -> bool:
        """Whether drawn drafts look ahead, by SLRS-n."""
        return self._rules.sampling is not None and self._rules.sampling.merging is not None

    def span(self, task: DraftTask) -> MergeSpan:
        """How SLRS-n looks ahead for a request; one token where it is drafted otherwise."""
        return self._rules.span(task)

    @torch.inference_mode()
    def step(self, batch: int) -> None:
        """One step of decoding for so many requests, on the padding block, to be timed."""
        ids = np.zeros(batch, np.int64)
        nowhere = np.zeros((batch, 1), np.int32)
        self._forward(ids, self._batches.single(nowhere, ids)).argmax(-1)

    @torch.inference_mode()
    def read(self, tokens: int) -> None:
        """One forward over so many context tokens, on the padding block, to be timed."""
        nowhere = np.zeros((1, -(-tokens // self.model.block_size)), np.int32)
        ids, batch = self._batches.ragged(nowhere, np.zeros(1, np.int64), [[0] * tokens])
        self._forward(ids, batch).argmax(-1)

    def _catch_up(self, rows: Sequence[DraftRow], table: np.ndarray) -> torch.Tensor:
        """Feed what is pending; logits [n, V_D] behind each row's last id."""
        cached = np.array([len(row.sequence.kv_ids) for row in rows])
        ids, batch = self._batches.ragged(table, cached, [row.pending for row in rows])
        logits = self._forward(ids, batch)
        for row in rows:
            row.sequence.kv_ids.extend(row.pending)
        return logits

    def _step_by_step(
        self,
        picker: Picker,
        rows: Sequence[DraftRow],
        table: np.ndarray,
        logits: torch.Tensor,
        control: Control | None,
    ) -> list[DrafterTokens]:
        """Pick, feed what was picked, pick again."""
        self._timed(picker.pick, logits)
        asks = control is not None and control.can_stop_early
        cached = np.array([len(row.sequence.kv_ids) for row in rows])
        for batch in self._batches.steps(table, cached, [row.steps - 1 for row in rows]):
            if asks and control is not None and not control.continue_drafting(picker.so_far()):
                break
            ids = picker.newest[: len(batch.positions)]
            self._timed(picker.pick, self.model.forward(ids, batch))
        drafted = picker.collect()[: len(rows)]
        for row, tokens in zip(rows, drafted, strict=True):
            # The last drafted token has been picked but never fed: it has no KV.
            row.sequence.kv_ids.extend(tokens.tokens[:-1])
        return drafted

    def _along_spans(
        self, rows: Sequence[DraftRow], table: np.ndarray, logits: torch.Tensor
    ) -> list[DrafterTokens]:
        size = self.model.block_size
        spans = SpanDrafting(rows, table, self._rules, self._batches, self._forward, size)
        return spans.run(logits)

    def _forward(self, ids: np.ndarray, batch: ForwardBatch) -> torch.Tensor:
        ids[ids >= self._rules.vocab_size] = 0
        return self.model.forward(self._batches.to_device(ids), batch)

    def _timed(self, pick: Callable[[torch.Tensor], None], logits: torch.Tensor) -> None:
        began = time.perf_counter()
        pick(logits)
        self.model.forward_seconds += time.perf_counter() - began
