# SPDX-License-Identifier: Apache-2.0
"""What was drawn for one request, as a draft in the target's tokens."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.tasks import DraftTask


class SampledDraft(NamedTuple):
    """The draws of one request.

    Attributes:
        ids: Drafter tokens.
        rows: The row of draft_probs that each was drawn from, -1 for one that was certain; there
            may be more of them.
        confidences: Of each, where asked for.
    """

    ids: Sequence[int]
    rows: Sequence[int]
    confidences: Sequence[float]

    def draft(
        self,
        task: DraftTask,
        sampling: SampledMethod,
        ends: Collection[int],
        probs: torch.Tensor,
        stand_ins: np.ndarray | None,
    ) -> Draft:
        """The first target token of each draw with its row, the rest certain.

        The draft ends by count or with a draw that says so itself, never by how likely it was.

        Args:
            task: The request.
            sampling: How it was drawn.
            ends: Ids after which a draft ends.
            probs: float32 [R, V_T], the draft_probs of the round.
            stand_ins: int64 [R], see `BatchSampler`.
        """
        proposal: list[int] = []
        row_of: list[int] = []
        peaks: list[float] = []
        for place, (drawn, row) in enumerate(zip(self.ids, self.rows, strict=False)):
            tokens = sampling.spell(drawn)
            ended = not len(tokens) or drawn in ends
            if not len(tokens) and stand_ins is not None:
                tokens = [int(stand_ins[row])]
            proposal += tokens
            row_of += [row, *[-1] * (len(tokens) - 1)][: len(tokens)]
            if self.confidences:
                peaks += [self.confidences[place], *[1.0] * (len(tokens) - 1)][: len(tokens)]
            if ended:
                break
        return Draft.chain(task.req_id, proposal, peaks, DraftProbs(probs, row_of)).first(
            task.lookahead
        )
