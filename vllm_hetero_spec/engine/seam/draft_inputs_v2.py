# SPDX-License-Identifier: Apache-2.0
"""Transfer of drafts to the inputs of the next step on Model Runner V2.

vLLM copies drafts from the request states when it prepares a step's inputs. Preparation takes a
millisecond or more on the host, while the device is idle. Only the token ids depend on the drafts.
With asynchronous scheduling, all other inputs are prepared while the drafter drafts, and the ids
are filled in last.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_hetero_spec.staging import Sender

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class DraftInputs:
    """Writes drafts to the memory from which a runner reads them. Padding has the valid id 0."""

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._runner = runner
        self._send = Sender(runner.device).send
        shape = runner.max_num_reqs, runner.num_speculative_steps
        self._nothing = torch.zeros(shape, dtype=torch.int64, device=runner.device)
        self._padded: dict[int, torch.Tensor] = {}  # the same by draft length

    @property
    def may_follow(self) -> bool:
        """True if vLLM does not read a step's token ids before the forward."""
        runner = self._runner
        readers = runner.uses_inputs_embeds, runner.pcp_manager, runner.adaptive_verification
        return not any(readers)

    def before_forwards(self, call: "Callable[[InputBatch], None]") -> None:
        """Call a function with each step's batch when the step's other inputs are prepared."""
        state = self._runner.model_state
        prepare = state.prepare_inputs

        def prepare_inputs(batch: "InputBatch", *args: object) -> dict[str, object]:
            call(batch)
            found: dict[str, object] = prepare(batch, *args)
            return found

        state.prepare_inputs = prepare_inputs

    def nothing(self, batch: "InputBatch", length: int | None = None) -> torch.Tensor:
        """Return zeros int64 [B, K], as a substitute for drafts that are not ready.

        vLLM writes -1 into it, behind the step's draft length, and nothing else. For a known
        `length` no operation is queued, because the same columns are always overwritten.
        """
        if length is None:
            return self._nothing[: batch.num_reqs].zero_()
        if length not in self._padded:
            self._padded[length] = torch.zeros_like(self._nothing)
        return self._padded[length][: batch.num_reqs]

    def of(self, batch: "InputBatch") -> torch.Tensor:
        """Return a step's padded drafts, int64 [B, K], from the request states."""
        rows: torch.Tensor = self._runner.req_states.draft_tokens[batch.idx_mapping]
        return rows

    @torch.inference_mode()
    def put(self, batch: "InputBatch", drafts: Sequence[Sequence[int]]) -> None:
        """Write a step's drafts to the request states, before the next step is prepared."""
        states = self._runner.req_states
        rows = np.zeros((len(drafts), self._nothing.shape[1]), np.int64)
        for row, tokens in zip(rows, drafts, strict=True):
            row[: len(tokens)] = tokens
        states.draft_tokens[batch.idx_mapping] = self._send(rows)[0]

    def filling(self, batch: "InputBatch") -> Callable[[Mapping[str, Sequence[int]]], None]:
        """Return a function that writes drafts by request to the inputs of a prepared step."""
        counts = batch.num_draft_tokens_per_req
        if counts is None:
            return lambda drafts: None
        behind = np.cumsum(counts)  # a draft is the end of its request's ids
        borders = batch.query_start_loc_np[: batch.num_reqs + 1]
        write = self._writing(batch.input_ids, borders, counts)
        lines = list(zip(batch.req_ids, behind.tolist(), counts.tolist(), strict=True))

        def fill(drafts: Mapping[str, Sequence[int]]) -> None:
            ids = np.zeros(behind[-1], np.int32)
            for req_id, end, count in lines:
                tokens = drafts.get(req_id, ())[:count]
                ids[end - count : end - count + len(tokens)] = tokens
            write(*self._send(ids))

        return fill

    def _writing(
        self, input_ids: torch.Tensor, borders: np.ndarray, counts: np.ndarray
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that writes drafts int32 [N] to the ends of their requests' ids.

        Args:
            borders: int [B + 1], first id of each request, then the number of ids.
            counts: int [B], length of each draft.
        """
        if (counts == counts[0]).all() and (np.diff(borders) == counts + 1).all():  # only decoding
            table = input_ids[: borders[-1]].view(len(counts), -1)[:, 1:]
            return lambda ids: table.copy_(ids.view_as(table))
        behind = np.cumsum(counts)
        (places,) = self._send(np.arange(behind[-1]) + np.repeat(borders[1:] - behind, counts))
        return lambda ids: input_ids.index_copy_(0, places, ids)
