# SPDX-License-Identifier: Apache-2.0
"""The drafter beside a target that works with others: other ranks, other instances.

vLLM's layers find both in globals of the process, and the drafter's layers bear the names of the
target's. While the drafter is built or run, no KV connector is there, which would store its KV as
the target's; and where it runs whole on one rank, the tensor parallel group, from which layers read
their shard, is a copy of world size 1. The scheduler hands the drafts to all ranks; what sampled
ones were drawn from is broadcast (`verifier.draft_probs`).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state


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
def alone(group: parallel_state.GroupCoordinator | None) -> Iterator[None]:
    """Hide the KV connector, and exchange the tensor parallel group.

    Args:
        group: From `solo_group`; None leaves the group as it is.
    """
    agent, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    held, parallel_state._TP = parallel_state._TP, group or parallel_state._TP
    try:
        yield
    finally:
        parallel_state._TP = held
        kv_transfer_state._KV_CONNECTOR_AGENT = agent
