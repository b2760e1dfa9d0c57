# SPDX-License-Identifier: Apache-2.0
"""Workers of which only rank 1 does not support draft trees."""

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hetero_spec.engine.trees.branches import BranchSequences

_why_not = BranchSequences._why_not


def _wrong(branches: BranchSequences) -> str:
    return "this is the second rank" if get_tp_group().rank_in_group else _why_not(branches)


BranchSequences._why_not = _wrong  # type: ignore[method-assign]


class OneRankWrong(CPUWorker):
    """A worker class that the engine imports, so that the patch above runs in each worker."""
