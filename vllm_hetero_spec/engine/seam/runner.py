# SPDX-License-Identifier: Apache-2.0
"""Interface of a worker's model runner to the rest of the engine, and clocks of its steps.

`runner_v1` and `runner_v2` complete it. Each also has functions for its own hooks, which build a
`StepView` and take drafts.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.metrics.transport import leave_out
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.tree_adapter import TreeAdapter
from vllm_hetero_spec.staging import Mark

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


class Runner(ABC):
    """Model runner for which drafts are made.

    Attributes:
        trees: Draft trees; None if drafts are chains.
    """

    def __init__(self, runner: Any, trees: TreeAdapter | None) -> None:
        self._runner = runner
        self.trees = trees
        self._clock = StepClock()
        self._longest = int(runner.speculative_config.hetero.num_speculative_tokens)

    @property
    def device(self) -> torch.device:
        return torch.device(self._runner.device)

    @property
    def max_num_tokens(self) -> int:
        """Maximum number of tokens that the target computes in a step."""
        return int(self._runner.max_num_tokens)

    @abstractmethod
    def on_drafts_taken(self) -> None:
        """Note that vLLM has the step's drafts and that the target's next step begins."""

    def attach_to_output(self, output: object, lookahead: int) -> None:
        """Attach to a step's output the rows that trees compute twice.

        With asynchronous scheduling also `lookahead`, the draft length of the next scheduled steps.
        """
        if self.trees is not None:
            leave_out(output, self.trees.again)

    @abstractmethod
    def _params_of(self, req_id: str) -> RequestParams:
        """Return the parameters of a live request."""

    def untimed(self) -> None:
        """Discard the start times, because the present step has no view or follows a pause."""
        self._clock = StepClock()

    def expect_trees(self, drafts: Sequence[Draft]) -> None:
        """Note the draft trees among a step's drafts. Every rank has to call this."""
        if self.trees is not None:
            self.trees.expect(drafts, lambda req_id: bool(self._params_of(req_id).keeps_chain))

    def check_trees(self) -> None:
        """Disable draft trees if a rank does not support them. Every rank has to call this."""
        if self.trees is not None and not self.trees.agree():
            self.trees = None

    def replace_rejection_sampler(
        self, make: "Callable[[Any, SpeculativeConfig, torch.device], Any]"
    ) -> None:
        """Replace the rejection sampler by `make(sampler, speculative_config, device)`."""
        runner = self._runner
        runner.rejection_sampler = make(runner.sampler, runner.speculative_config, runner.device)

    @torch.inference_mode()
    def target_forward(self, rows: int) -> None:
        """Run the target and its head once over `rows` dummy tokens."""
        hidden, _ = self._runner._dummy_run(rows)
        self._runner.model.compute_logits(hidden[:rows])


class StepTimes(NamedTuple):
    """Durations of a step in seconds, on the host's or the device's clock; None if unknown.

    Attributes:
        target: From the hand-out of the drafts to the end of sampling.
        step: From the end of the previous step's sampling to the end of sampling.
    """

    target: float | None
    step: float | None


class StepClock:
    """Host clock: wall time between views, and from the hand-out of drafts to the next view."""

    def __init__(self) -> None:
        self._viewed: float | None = None
        self._drafts_taken: float | None = None

    def viewed(self) -> StepTimes:
        """Return the times of the step that ends now."""
        now = time.perf_counter()
        target = None if self._drafts_taken is None else now - self._drafts_taken
        step = None if self._viewed is None else now - self._viewed
        self._viewed = now
        return StepTimes(target, step)

    def on_drafts_taken(self) -> None:
        """Start to measure the next step, because vLLM has the drafts."""
        self._drafts_taken = time.perf_counter()


class DeviceClock:
    """Device clock of steps, without a wait on the host.

    A step begins with the hand-out of its drafts, or with its forward if it has none. It ends with
    its sampling.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Mark | None = None
        self._ended: Mark | None = None  # end of the previous step

    def start(self) -> None:
        """Mark the start of the step that is being queued, unless it is marked already."""
        self._began = self._began or Mark(self._device)

    def ends(self) -> Callable[[], StepTimes]:
        """Mark the end of sampling. The result returns the step's times once it has ended."""
        began, before, ended = self._began, self._ended, Mark(self._device)
        self._began, self._ended = None, ended

        def times() -> StepTimes:
            target, step = (None if m is None else ended.since(m) for m in (began, before))
            return StepTimes(target, step)

        return times

    def idle(self) -> None:
        """Drop both marks, because the device may have been idle since the last step."""
        self._began = self._ended = None
