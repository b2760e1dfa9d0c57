# SPDX-License-Identifier: Apache-2.0
"""A step of Model Runner V2 between its launch and the moment at which the host reads it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_hetero_spec.engine.seam.media import media_of
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.runner import StepTimes
from vllm_hetero_spec.engine.seam.step_view import RequestView
from vllm_hetero_spec.staging import Fetched

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

# Steps whose counts may be on their way at a time: the newest, and steps without drafts before it,
# which the host reads later.
ON_THEIR_WAY = 8


@dataclass(frozen=True, eq=False)
class SampledStep:
    """A step that has been queued as far as its sampling.

    Attributes:
        req_ids: Its requests, in the batch's order.
        slots: int64 [B], their places in the runner.
        came: As they came last.
        counts: int32 [2, B], tokens that each has sampled, and of its text, on their way.
        output: What the step is made of.
        verified: Tokens of each draft that the step verifies.
        times: What it took, by the device's clock, once it has ended; None where that is not used.
    """

    req_ids: Sequence[str]
    slots: np.ndarray
    came: Sequence["NewRequestData | None"]
    counts: Fetched
    output: "SchedulerOutput"
    verified: Mapping[str, int]
    times: Callable[[], StepTimes] | None

    def came_as(self, index: int, present: "Mapping[str, NewRequestData]") -> bool:
        """Whether a request came as the present one of its name: it has the same place then."""
        came = self.came[index]
        return came is not None and present.get(self.req_ids[index]) is came

    def request(
        self,
        index: int,
        text: np.ndarray,
        sampled: int,
        num_prompt: int,
        new: "NewRequestData",
        params: RequestParams,
    ) -> RequestView:
        """The view of a request.

        Args:
            index: Its place in the batch.
            text: int32 [n], its target ids.
            sampled: How many of them the step has sampled.
            num_prompt: How many of them are its prompt.
            new: As it came last.
            params: What it asks for.
        """
        req_id = self.req_ids[index]
        verified = self.verified.get(req_id, 0)
        scheduled = self.output.scheduled_spec_decode_tokens.get(req_id, ())
        return RequestView(
            req_id=req_id,
            params=params,
            token_ids=text,
            num_prompt_tokens=num_prompt,
            new_tokens=text[len(text) - sampled :].tolist(),
            num_drafted=verified,
            num_padding=len(scheduled) - verified,
            has_text=new.prompt_embeds is None,
            media=media_of(new.mm_features),
        )
