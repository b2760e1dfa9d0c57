# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner of one worker, as the rest of the engine may see it.

`runner_v1` and `runner_v2` stand behind it. How a runner makes a `StepView` and takes drafts is
between its own file and its hooks.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from vllm_hetero_spec.staging import Mark
from vllm_hetero_spec.trees.layout import TreeRows


class Runner(Protocol):
    """A model runner that drafts are made for."""

    @property
    def device(self) -> torch.device:
        """Where the target runs."""

    @property
    def max_num_tokens(self) -> int:
        """Most tokens that the target computes in a step."""

    def on_drafts_taken(self) -> None:
        """The step's drafts are out, and the target's next step begins."""

    def expect_trees(self, trees: Mapping[str, TreeRows]) -> None:
        """These drafts of the step, by request, are trees; all others of it are chains."""

    def check_trees(self) -> None:
        """Make all drafts chains if a rank does not support trees. Every rank has to call it."""

    def attach_to_output(self, output: object, lookahead: int) -> None:
        """Put on a step's output what a scheduler that is ahead has to know.

        Args:
            output: vLLM's ModelRunnerOutput.
            lookahead: Draft tokens that coming steps are to verify for each request.
        """

    def target_forward(self, rows: int) -> None:
        """One forward of the target over made-up tokens, with the logits of all of them."""


class StepTimes(NamedTuple):
    """Wall seconds up to a step's view: since drafts were handed out, and since the last view."""

    target: float | None
    step: float | None


class StepClock:
    """Wall time between the views of steps, and between drafts and the next view."""

    def __init__(self) -> None:
        self._viewed: float | None = None
        self._drafts_taken: float | None = None

    def viewed(self, now: float) -> StepTimes:
        """A view is made of a step that had sampled at `now`, by `time.perf_counter`."""
        target = None if self._drafts_taken is None else now - self._drafts_taken
        step = None if self._viewed is None else now - self._viewed
        self._viewed = now
        return StepTimes(target, step)

    def on_drafts_taken(self) -> None:
        """The last view's drafts are out."""
        self._drafts_taken = time.perf_counter()


class DeviceClock:
    """Device time of steps, without a wait of the host.

    A step lasts from the hand-out of its drafts, or from the start of its forward if it has none,
    to the end of its sampling.

    Args:
        device: Where the target runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Mark | None = None
        self._ended: Mark | None = None  # the step before

    def begins(self) -> None:
        """Mark the start of the step that is being queued, if it is not marked yet."""
        self._began = self._began or Mark(self._device)

    def ends(self) -> Callable[[], StepTimes]:
        """Mark the end of the step's sampling. The result returns its times once it has ended."""
        began, before, ended = self._began, self._ended, Mark(self._device)
        self._began, self._ended = None, ended

        def times() -> StepTimes:
            target, step = (None if m is None else ended.since(m) for m in (began, before))
            return StepTimes(target, step)

        return times

    def idle(self) -> None:
        """Drop both marks, because the device may have been idle since the last step."""
        self._began = self._ended = None
