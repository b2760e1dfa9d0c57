# SPDX-License-Identifier: Apache-2.0
"""Convert the sampled drafter tokens of one request to a draft in target tokens."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.tasks import DraftTask


class SampledDraft(NamedTuple):
    """The sampled drafter tokens of one request.

    `rows` has the row of `draft_probs` that each token was sampled from; -1 if it was certain. It
    may be longer than `ids`.
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
        """Return the draft in target tokens.

        Each sampled drafter token spells one sampled target token, and then certain ones. The draft
        ends at the lookahead, or at a sampled token that ends a draft. It never ends because of the
        probability of a token. `probs` is float32 [R, V_T], and `stand_ins` is int64 [R].
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
