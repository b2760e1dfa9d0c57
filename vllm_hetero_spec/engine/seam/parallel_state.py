# SPDX-License-Identifier: Apache-2.0
"""Isolation of the drafter from vLLM's process-wide groups, KV connector and kernel priorities.

vLLM's layers read these from globals, and the drafter's layers have the same names as the target's.
While the drafter is built or run, the globals are exchanged:

* No KV connector, because it would store the drafter's KV as the target's.
* A pipeline group of this rank only.
* A tensor parallel group of world size 1 if the whole drafter runs on one rank. Experts use the
  same group, because a target without experts has no expert parallel group.
* The drafter's kernel priorities, which differ if only the target is compiled.

All ranks get the drafts from the scheduler, and the `draft_probs` by a broadcast
(`verifier.draft_probs`).
"""

import copy
import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state


def _solo(group: parallel_state.GroupCoordinator) -> parallel_state.GroupCoordinator:
    group = copy.copy(group)
    group.world_size = 1
    group.rank_in_group = 0
    group.ranks = [group.rank]
    group.device_communicator = None
    group.mq_broadcaster = None
    return group


class IsolatedParallelState:
    """Context manager that exchanges the globals while the drafter runs; do not nest.

    With `solo`, this rank runs the whole drafter.
    """

    def __init__(self, target: VllmConfig, drafter: VllmConfig, *, solo: bool) -> None:
        tensor = parallel_state.get_tp_group()
        self._tensor = _solo(tensor) if solo else tensor
        self._pipeline = _solo(parallel_state.get_pp_group())
        theirs, ours = (config.kernel_config.ir_op_priority for config in (target, drafter))
        same = dataclasses.asdict(theirs) == dataclasses.asdict(ours)
        self._exchange = nullcontext if same else ours.set_priority
        self._kernels: AbstractContextManager[None] = nullcontext()
        self._held: Any = None  # groups and connector of the target, while the drafter runs

    def __enter__(self) -> None:
        self._kernels = self._exchange()
        self._kernels.__enter__()
        groups = parallel_state._TP, parallel_state._PP, parallel_state._EP
        self._held = groups, kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        parallel_state._TP, parallel_state._PP = self._tensor, self._pipeline
        parallel_state._EP = self._tensor

    def __exit__(self, *error: object) -> None:
        groups, kv_transfer_state._KV_CONNECTOR_AGENT = self._held
        parallel_state._TP, parallel_state._PP, parallel_state._EP = groups
        self._kernels.__exit__(None, None, None)
