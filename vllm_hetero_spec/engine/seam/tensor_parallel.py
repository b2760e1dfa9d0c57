# SPDX-License-Identifier: Apache-2.0
"""Running the drafter whole on one rank of a tensor parallel target.

vLLM's layers read their shard from the process-wide tensor parallel group. While the drafter is
built or run, that group is exchanged for a copy of world size 1. The scheduler hands the drafts to
all ranks; what sampled ones were drawn from is broadcast (`verifier.draft_probs`).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed import parallel_state


def solo_group() -> parallel_state.GroupCoordinator:
    """A copy of the tensor parallel group in which this rank is alone."""
    group = copy.copy(parallel_state.get_tp_group())
    group.world_size = 1
    group.rank_in_group = 0
    group.ranks = [group.rank]
    group.device_communicator = None
    group.mq_broadcaster = None
    return group


@contextmanager
def tensor_parallel(group: parallel_state.GroupCoordinator | None) -> Iterator[None]:
    """Exchange the tensor parallel group; None leaves it as it is."""
    if group is None:
        yield
        return
    held, parallel_state._TP = parallel_state._TP, group
    try:
        yield
    finally:
        parallel_state._TP = held
