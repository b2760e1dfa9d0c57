# SPDX-License-Identifier: Apache-2.0
"""Sections of a drafting round: wrappers that time them, and the device's use in a profile."""

import functools
import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

# "module:Class.method" below `vllm_hetero_spec.engine` by section, in the order of a round.
# The time of a section excludes other sections that it calls. "model" is the drafter's forwards and
# the choice of tokens; on a GPU they run in parallel with the host.
SECTIONS: dict[str, tuple[str, ...]] = {
    "view": ("seam.runner_v1:RunnerV1.view", "seam.runner_v2:RunnerV2.view"),
    "observe": (
        "lookahead_control:LookaheadControl.observe",
        "lookahead_control:LookaheadControl.learn",
    ),
    "plan": (
        "lookahead_control:LookaheadControl.plan",
        "drafter.requests:Requests.num_unread",
        "drafter.requests:Requests.forget",
    ),
    "read": ("drafter.requests:Requests.read",),
    "admit": ("drafter.draft_batch:DraftBatchRunner.begin",),
    "places": ("drafter.round_plan:Planner.plan",),
    "queue": ("drafter.decode_loop:Drafter.begin",),
    "model": (
        "drafter.steps:Steps.begin",
        "drafter.steps:Steps.step",
        "drafter.recorded_steps:RecordedSteps.begin",
        "drafter.recorded_steps:RecordedSteps.step",
        "drafter.token_healing:TokenHealing.fetch",
    ),
    "choose": ("drafter.token_healing:TokenHealing.choose",),
    "collect": ("drafter.draft_batch:DraftBatchRunner.finish",),
    "translate": ("drafter.draft_batch:DraftBatchRunner._translate",),
    "trim": ("lookahead_control:LookaheadControl.trim",),
    "fill": ("seam.draft_inputs_v2:DraftInputs.filling", "seam.draft_inputs_v2:DraftInputs.put"),
    "rest": (
        "proposer:HeteroProposer.after_step",
        "proposer:HeteroProposer.finish",
        "proposer:HeteroProposer.look_back",
        "proposer:HeteroProposer.skip_step",
    ),
}

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories in a trace


def wrap_sections(around: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Wrap the methods of all sections with the context that `around` returns for a name."""
    for section, methods in SECTIONS.items():
        for owner, attribute, method in map(found, methods):
            setattr(owner, attribute, wrapped(section, method, around))


def found(method: str) -> tuple[Any, str, Callable[..., Any]]:
    """Resolve "module:Class.method" to the class, the name and the function."""
    module, _, name = method.partition(":")
    owner, _, attribute = name.partition(".")
    cls = getattr(importlib.import_module(f"vllm_hetero_spec.engine.{module}"), owner)
    return cls, attribute, getattr(cls, attribute)


def wrapped(
    section: str, method: Callable[..., Any], around: Callable[[str], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Wrap a method with the context that `around` returns for the section."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around(section):
            return method(*args, **kwargs)

    return inside


class OwnTime:
    """Sums the time of nested sections; the time of a section excludes those inside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._open, self._since = clock, list[str](), 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, section: str) -> "_Section":
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


def device_use(events: Sequence[Mapping[str, Any]], rounds: int) -> dict[str, Any]:
    """Return the device's use per round, from a Chrome trace whose times are in microseconds.

    Returns:
        Milliseconds in which the device is busy, and in which it is idle, by section of the host
        (a "user_annotation", including those inside it). Counts of kernels, copies and waits.
    """
    device = [event for event in events if event.get("cat") in _DEVICE]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in device)
    starts, ends = np.array(spans or [(0.0, 0.0)]).T
    ends = np.maximum.accumulate(ends)
    starts = np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))  # overlaps count once
    busy = np.cumsum(ends - starts)
    times, known = np.stack([starts, ends], 1).ravel(), np.stack([busy - ends + starts, busy], 1)
    idle, counts = defaultdict[str, float](float), Counter[str]()
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind == "user_annotation":
            edges = np.interp([event["ts"], event["ts"] + event["dur"]], times, known.ravel())
            idle[name] += (event["dur"] - edges[1] + edges[0]) / 1e3
        elif kind in _DEVICE:
            counts["kernels" if kind == "kernel" else name] += 1
        elif kind == "cuda_runtime" and "Synchronize" in name:
            counts["waits"] += 1
    return {
        "busy_ms": round(float(busy[-1]) / 1e3 / rounds, 3),
        "idle_ms": {name: round(float(ms) / rounds, 3) for name, ms in idle.items()},
        "counts": {name: round(count / rounds, 2) for name, count in counts.items()},
    }
