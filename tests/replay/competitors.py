# SPDX-License-Identifier: Apache-2.0
"""Controllers that the replay compares: by name or import path, and an oracle."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from machines import Machine
from recordings import LONGEST
from world import World

from vllm_hetero_spec.lookahead.controllers import Controller, Fixed, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput


@dataclass(frozen=True)
class Start:
    """Inputs from which an engine builds a controller.

    Attributes:
        machine: Has `calibration` and `stops_early`. The controller must not read its costs.
        clock: Monotonic clock in seconds.
        saved: `Estimates.to_dict()` of an earlier run; None for a cold start.
    """

    machine: Machine
    clock: Callable[[], float]
    saved: Mapping[str, Any] | None = None

    def estimates(self) -> Estimates:
        """Return what `known_of_pair` returns."""
        if self.saved is not None:
            return Estimates.from_dict(self.saved, LONGEST)
        return Estimates.of(CostModel(**self.machine.calibration), LONGEST)


def goodput(start: Start) -> Controller:
    """Build the controller as `DraftingRank` does."""
    return Goodput(start.estimates(), can_stop_early=start.machine.stops_early, clock=start.clock)


def factory(name: str) -> Callable[[Start], Controller]:
    """Return the function `goodput`, or the one that MODULE:FUNCTION names."""
    module, _, function = name.rpartition(":")
    if not module:
        return {"goodput": goodput}[name]
    found: Callable[[Start], Controller] = getattr(importlib.import_module(module), function)
    return found


class Oracle(Fixed):
    """Chooses the draft lengths that earn most, given how many tokens will be accepted.

    Args:
        world: Contains the requests.
        gains: By batch, the expected speed over the target alone: the price of a second. Where it
            is below 1, as prompts are expensive to read, the oracle does not draft.
        gain: That of other batches.
    """

    def __init__(self, world: World, gains: Mapping[int, float], gain: float) -> None:
        super().__init__(LONGEST)
        self._world, self._gains, self._gain = world, gains, gain

    def plan(self, batch: int, limits: Sequence[int], *_: Any) -> LookaheadPlan:
        machine, gain = self._world.machine, self._gains.get(batch, self._gain)
        if gain < 1.0:
            return LookaheadPlan((0,) * batch)
        accepted = [
            min(limit, request.text.accepted[request.at])
            for limit, request in zip(limits, self._world.requests, strict=True)
        ]
        price = gain * batch / machine.target(batch, batch)
        best, chosen = batch - gain * batch, [0] * batch  # the target alone
        for longest in range(1, max(accepted, default=0) + 1):
            lengths = [min(longest, count) for count in accepted]
            going = [sum(length > depth for length in lengths) for depth in range(longest)]
            seconds = machine.overhead(going[0]) + machine.steps[0] * machine.drafter(going[0])
            seconds += machine.steps[1] * sum(map(machine.drafter, going))
            seconds += machine.target(batch, machine.rows(lengths, longest))
            earned = batch + sum(lengths) - price * seconds
            if earned > best:
                best, chosen = earned, lengths
        return LookaheadPlan(tuple(chosen))
