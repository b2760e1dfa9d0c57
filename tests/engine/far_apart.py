# SPDX-License-Identifier: Apache-2.0
"""Workers that treat every other rank as a rank of another node.

Between nodes, sampled drafts come from a row of the likeliest tokens. Here a row has two tokens.
"""

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hetero_spec.draft.sampling import BatchSampler
from vllm_hetero_spec.engine.verifier import draft_probs

draft_probs.in_the_same_node_as = lambda group: [rank == 0 for rank in range(group.size())]
draft_probs.SPARSE_TOP_K = 2


class FarApart(CPUWorker):
    """A worker whose rank is the only one on its node."""


def forget_to_renormalise(worker: Any) -> None:
    """Inject a fault: rows keep one token, with its probability before the others were removed."""
    rows_of = BatchSampler._rows

    def _rows(self: Any, logits: torch.Tensor, index: Any) -> torch.Tensor:
        self._likeliest = 1
        few = rows_of(self, logits.clone(), index)
        self._likeliest = None
        return torch.where(few > 0, rows_of(self, logits, index), 0.0)

    BatchSampler._rows = _rows
