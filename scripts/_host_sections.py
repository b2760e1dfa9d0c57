# SPDX-License-Identifier: Apache-2.0
"""Sections of a drafting round by their methods, and wrappers that time them from outside."""

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# By section, "module:Class.method" below `vllm_hetero_spec.engine`, in the order of a round.
# Methods that call methods of another section count without them. On a CPU "model" is the
# drafter's forwards and the choice of tokens, which a GPU does beside the host.
SECTIONS: dict[str, tuple[str, ...]] = {
    "view": ("seam.runner_v1:RunnerV1.view", "seam.runner_v2:RunnerV2.view"),
    "observe": (
        "lookahead_control:LookaheadControl.observe",
        "lookahead_control:LookaheadControl.learn",
    ),
    "plan": (
        "lookahead_control:LookaheadControl.plan",
        "drafter.request_state:Requests.num_unread",
        "drafter.request_state:Requests.forget",
    ),
    "read": ("drafter.request_state:Requests.read",),
    "admit": ("drafter.draft_batch:DraftBatchRunner.begin",),
    "places": ("drafter.round_plan:Planner.plan",),
    "queue": ("drafter.decode_loop:Drafter.begin",),
    "model": (
        "drafter.steps:EagerSteps.begin",
        "drafter.steps:EagerSteps.step",
        "drafter.recorded_steps:RecordedSteps.begin",
        "drafter.recorded_steps:RecordedSteps.step",
        "drafter.first_tokens:FirstTokens.fetch",
    ),
    "judge": ("drafter.first_tokens:FirstTokens.judge",),
    "collect": ("drafter.draft_batch:DraftBatchRunner.finish",),
    "translate": ("drafter.draft_batch:DraftBatchRunner._translate",),
    "trim": ("lookahead_control:LookaheadControl.trim",),
    "fill": ("seam.draft_inputs_v2:DraftInputs.filling", "seam.draft_inputs_v2:DraftInputs.put"),
    "rest": (
        "proposer:HeteroProposer.after_step",
        "proposer:HeteroProposer.finish",
        "proposer:HeteroProposer.look_back",
        "proposer:HeteroProposer.passes_by",
    ),
}


def wrap_sections(around: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Run each method of a section inside the context that `around` returns for its name."""
    for section, methods in SECTIONS.items():
        for method in methods:
            module, _, name = method.partition(":")
            owner, _, attribute = name.partition(".")
            cls = getattr(importlib.import_module(f"vllm_hetero_spec.engine.{module}"), owner)
            setattr(cls, attribute, _wrapped(section, getattr(cls, attribute), around))


def _wrapped(
    section: str, method: Callable[..., Any], around: Callable[[str], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around(section):
            return method(*args, **kwargs)

    return inside


class OwnTime:
    """Add up the time of nested sections, each without the sections inside it.

    Args:
        clock: Returns seconds.

    Attributes:
        seconds: Sum of each section.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._open, self._since = clock, list[str](), 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, section: str) -> "_Section":
        """Return the context that times a section."""
        return _Section(self, section)

    def turn(self, section: str | None) -> None:
        """Start a section, or end the innermost one if it is None."""
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        if section is None:
            self._open.pop()
        else:
            self._open.append(section)
        self._since = self._clock()


class _Section:
    def __init__(self, time: OwnTime, section: str) -> None:
        self._time, self._section = time, section

    def __enter__(self) -> None:
        self._time.turn(self._section)

    def __exit__(self, *error: object) -> None:
        self._time.turn(None)
