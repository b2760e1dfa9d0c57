# SPDX-License-Identifier: Apache-2.0
"""Queued steps of Model Runner V2 that the host has not read yet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_hetero_spec.engine.seam.runner import StepTimes
from vllm_hetero_spec.staging import Fetched

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

# Steps without drafts that may still be running. vLLM queues two, or more with pipeline stages.
MOST_UNREAD = 6
# Buffers for counts. The newest step and the one before it are in addition to the unread ones.
ON_THEIR_WAY = MOST_UNREAD + 2


@dataclass(frozen=True, eq=False)
class SampledStep:
    """Step that is queued up to its sampling.

    Attributes:
        slots: int64 [B], slots of the requests in the runner.
        came: Newest NewRequestData of each request.
        counts: int32 [B + S], number of sampled tokens of each request, then of all tokens of each
            of the S slots.
        output: vLLM's SchedulerOutput of the step.
        verified: Number of draft tokens that the step verifies, by request.
        times: Returns device times once `counts` has arrived; None if the host times the step.
    """

    req_ids: Sequence[str]
    slots: np.ndarray
    came: Sequence["NewRequestData | None"]
    counts: Fetched
    output: "SchedulerOutput"
    verified: Mapping[str, int]
    times: Callable[[], StepTimes] | None

    def came_as(self, index: int, present: "Mapping[str, NewRequestData]") -> bool:
        """Return True if the request has not ended or been added again, so its slot is the same."""
        came = self.came[index]
        return came is not None and present.get(self.req_ids[index]) is came
