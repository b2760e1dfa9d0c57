# SPDX-License-Identifier: Apache-2.0
"""Where Model Runner V2's next step reads drafts: from its requests' states, or from its inputs.

From the states it copies them when it prepares a step's inputs, which takes the host a millisecond
or more, with nothing on the device to hide it. Nothing but ids depends on what was drafted: where
steps are scheduled ahead, all else is prepared while the drafter drafts, and the ids follow.
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
    """Puts drafts where a runner reads them. Places without a draft hold id 0, which exists.

    Args:
        runner: vLLM's, with its model loaded.
    """

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._runner = runner
        self._send = Sender(runner.device).send
        shape = runner.max_num_reqs, runner.num_speculative_steps
        self._nothing = torch.zeros(shape, dtype=torch.int64, device=runner.device)

    @property
    def may_follow(self) -> bool:
        """Whether nothing reads a step's ids before its forward, but for what makes them."""
        runner = self._runner
        readers = runner.uses_inputs_embeds, runner.pcp_manager, runner.adaptive_verification
        return not any(readers)

    def before_forwards(self, call: "Callable[[InputBatch], None]") -> None:
        """Have each step's batch shown when all of its inputs are prepared."""
        state = self._runner.model_state
        prepare = state.prepare_inputs

        def prepare_inputs(batch: "InputBatch", *args: object) -> dict[str, object]:
            call(batch)
            found: dict[str, object] = prepare(batch, *args)
            return found

        state.prepare_inputs = prepare_inputs

    def nothing(self, batch: "InputBatch") -> torch.Tensor:
        """int64 [B, K], in place of drafts that vLLM wants at once; it may be written to."""
        return self._nothing[: batch.num_reqs]

    def of(self, batch: "InputBatch") -> torch.Tensor:
        """int64 [B, K], a step's drafts and what fills them up, where they were put."""
        rows: torch.Tensor = self._runner.req_states.draft_tokens[batch.idx_mapping]
        return rows

    @torch.inference_mode()
    def put(self, batch: "InputBatch", drafts: Sequence[Sequence[int]]) -> None:
        """Into the states of a step's requests, before the next step is prepared.

        Args:
            batch: The step's.
            drafts: Target ids for each of its requests.
        """
        states = self._runner.req_states
        rows = np.zeros((len(drafts), self._nothing.shape[1]), np.int64)
        for row, tokens in zip(rows, drafts, strict=True):
            row[: len(tokens)] = tokens
        states.draft_tokens[batch.idx_mapping] = self._send(rows)[0]

    def filling(self, batch: "InputBatch") -> Callable[[Mapping[str, Sequence[int]]], None]:
        """What puts drafts into the inputs of a step that is prepared, when they are there.

        It takes target ids by request, of those that have any.

        Args:
            batch: The step's.
        """
        counts = batch.num_draft_tokens_per_req
        if counts is None:
            return lambda drafts: None
        behind = np.cumsum(counts)  # a request's draft is the end of its ids
        ends = batch.query_start_loc_np[1 : batch.num_reqs + 1]
        (places,) = self._send(np.arange(behind[-1]) + np.repeat(ends - behind, counts))
        lines = list(zip(batch.req_ids, behind.tolist(), counts.tolist(), strict=True))

        def fill(drafts: Mapping[str, Sequence[int]]) -> None:
            ids = np.zeros(len(places), np.int32)
            for req_id, end, count in lines:
                tokens = drafts.get(req_id, ())[:count]
                ids[end - count : end - count + len(tokens)] = tokens
            batch.input_ids.index_copy_(0, places, *self._send(ids))

        return fill
