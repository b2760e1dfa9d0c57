# SPDX-License-Identifier: Apache-2.0
"""The drafter beside a target that works with others, and by kernels of its own.

vLLM's layers find other ranks, stages and instances in globals of the process, and the drafter's
layers bear the names of the target's. While the drafter is built or run, no KV connector is there,
which would store its KV as the target's; the pipeline has this stage alone; and where it runs whole
on one rank, the tensor parallel group, from which layers read their shard, is a copy of world
size 1. Its experts are spread over that group, if at all: beside a target without experts there is
none of theirs. The scheduler hands the drafts to all ranks; what sampled ones were drawn from is
broadcast (`verifier.draft_probs`).

Which kernels run an operation is another such global, and the drafter's may be others: it is seldom
compiled.
"""

import copy
import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state


class Groups(NamedTuple):
    """What the drafter's layers ask for their place among ranks.

    Attributes:
        tensor: From which they read their shard, of experts too.
        pipeline: From which they read their stage, which is all of the drafter.
    """

    tensor: parallel_state.GroupCoordinator
    pipeline: parallel_state.GroupCoordinator

    @classmethod
    def of_drafter(cls, *, solo: bool) -> "Groups":
        """The groups of a drafter on this rank.

        Args:
            solo: It runs whole on this rank, whatever the target's tensor parallelism.
        """
        tensor = parallel_state.get_tp_group()
        return cls(_solo(tensor) if solo else tensor, _solo(parallel_state.get_pp_group()))


def _solo(group: parallel_state.GroupCoordinator) -> parallel_state.GroupCoordinator:
    """A copy in which this rank is alone."""
    group = copy.copy(group)
    group.world_size = 1
    group.rank_in_group = 0
    group.ranks = [group.rank]
    group.device_communicator = None
    group.mq_broadcaster = None
    return group


def _groups() -> tuple[parallel_state.GroupCoordinator | None, ...]:
    return parallel_state._TP, parallel_state._PP, parallel_state._EP


class IsolatedParallelState:
    """While it is entered, hides the KV connector, and exchanges groups and kernels.

    Not to be nested.

    Args:
        groups: Of the drafter.
        target: The worker's configuration.
        drafter: The drafter's.
    """

    def __init__(self, groups: Groups, target: VllmConfig, drafter: VllmConfig) -> None:
        self._groups = groups
        theirs, ours = (config.kernel_config.ir_op_priority for config in (target, drafter))
        same = dataclasses.asdict(theirs) == dataclasses.asdict(ours)
        self._exchange = nullcontext if same else ours.set_priority
        self._kernels: AbstractContextManager[None] = nullcontext()
        self._held = _groups()
        self._agent = kv_transfer_state._KV_CONNECTOR_AGENT

    def __enter__(self) -> None:
        self._kernels = self._exchange()
        self._kernels.__enter__()
        self._held = _groups()
        self._agent = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        parallel_state._TP, parallel_state._PP = self._groups
        parallel_state._EP = self._groups.tensor

    def __exit__(self, *error: object) -> None:
        parallel_state._TP, parallel_state._PP, parallel_state._EP = self._held
        kv_transfer_state._KV_CONNECTOR_AGENT = self._agent
        self._kernels.__exit__(None, None, None)
