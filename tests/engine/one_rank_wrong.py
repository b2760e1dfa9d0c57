# SPDX-License-Identifier: Apache-2.0
"""Workers of which the second alone finds that its rows of draft trees are wrong."""

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hetero_spec.engine.seam import tree_check

_difference = tree_check._difference


def _wrong(trial: tree_check.Trial) -> float:
    return _difference(trial) + get_tp_group().rank_in_group


tree_check._difference = _wrong


class OneRankWrong(CPUWorker):
    """A rank, right or wrong."""
