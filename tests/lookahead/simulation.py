# SPDX-License-Identifier: Apache-2.0
"""Simulated machines and a simulated clock, on which a controller serves a load.

A `Machine` contains the costs of steps. `run` serves a load of a `Text` on it. It uses the
controller through the same interface as an engine.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from simulated_drafts import DraftStream, SimulatedDrafts, Text

from vllm_hetero_spec.lookahead.controllers import Controller, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel

Seconds = Callable[[int], float]  # by number of rows or requests


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Machine:
    """Costs of steps, in seconds."""

    target: Seconds  # of a target step, by rows
    drafter: Seconds  # of a drafter step, by requests
    overhead: Seconds = lambda batch: 0.0  # of a round of drafting beside its steps, by requests
    catch_up: float = 0.0  # cost of a context token that the drafter must read
    noise: float = 0.0  # standard deviation of the logarithm of every measurement
    wander: float = 0.0  # the same of the machine's speed, which is common to all steps
    calm: float = 0.2  # time constant of the changes of speed, in seconds
    buckets: tuple[int, ...] = ()  # lengths to which all drafts of a step are padded, if any

    def rows(self, lengths: Sequence[int], longest: int) -> int:
        """Return the rows of a target step for drafts of these lengths, planned with `longest`."""
        if not self.buckets:
            return len(lengths) + sum(lengths)
        return len(lengths) * (1 + next(bucket for bucket in self.buckets if bucket >= longest))


def calibration(on: Machine, catch_up: float | None = None) -> CostModel:
    """Return costs as start-up timing measures them: at powers of two."""
    return CostModel(
        target=[(2**i, on.target(2**i)) for i in range(9)],
        drafter=[(batch, on.drafter(batch)) for batch in (1, 4, 16, 64)],
        catch_up=catch_up,
    )


@dataclass
class Outcome:
    """Result of a run."""

    tokens: float = 0.0  # expected number of emitted tokens, less noisy than the sampled number
    seconds: float = 0.0  # simulated, at the machine's usual speed
    probing: float = 0.0  # seconds lost by probes, compared with steps without drafts
    probes: int = 0
    steps: int = 0  # of the target
    alone: float = 0.0  # seconds of the target alone for as many tokens at the same batch
    switches: list[tuple[float, str]] = field(default_factory=list)  # times, and new regimes
    # Number of steps by longest planned lookahead. Probes count as 0.
    lookaheads: dict[int, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def speedup(self) -> float:
        """Speed relative to the target alone."""
        return self.alone / self.seconds


@dataclass(frozen=True)
class Phase:
    """A part of a load: `batch` requests of one kind at a time, for `seconds` seconds."""

    batch: int
    seconds: float
    text: Text
    machine: Machine
    random: bool = False
    prompt: int = 0  # tokens that the drafter must read of each request that begins in this phase


def run(
    controller: Controller,
    clock: Clock,
    phases: Iterable[Phase],
    *,
    limit: int,
    seed: int = 0,
    can_stop_early: bool = False,
) -> Outcome:
    """Serve the phases one after the other, with drafts of at most `limit` tokens.

    The costs of the steps advance `clock`, which the controller must read if it needs the time.
    With `can_stop_early`, `continue_drafting` is called between drafter steps.
    """
    generator = np.random.default_rng([seed, 0])
    outcome = Outcome()
    pending: list[int] = []
    for number, phase in enumerate(phases):
        drafts = DraftStream(phase.text, limit, seed + number)
        server = _Server(controller, clock, phase, drafts, limit, generator, can_stop_early)
        ends = clock.now + phase.seconds
        pending = (pending + [phase.prompt] * phase.batch)[: phase.batch]
        while clock.now < ends:
            server.step(pending, outcome)
            if not outcome.switches or outcome.switches[-1][1] != controller.regime:
                outcome.switches.append((clock.now, controller.regime))
    return outcome


class _Server:
    """Runs the steps of one phase."""

    def __init__(
        self,
        controller: Controller,
        clock: Clock,
        phase: Phase,
        drafts: DraftStream,
        limit: int,
        generator: np.random.Generator,
        can_stop_early: bool,
    ) -> None:
        self._controller, self._clock, self._phase = controller, clock, phase
        self._drafts, self._limit = drafts, limit
        self._generator, self._can_stop_early = generator, can_stop_early
        self._slowness = 0.0  # logarithm
        self._usual = 0.0  # seconds since the step began, at the machine's usual speed
        self._notes: list[Callable[[], None]] = []  # observed after a plan, as in an engine

    def _learn(self) -> None:
        notes, self._notes = self._notes, []
        for note in notes:
            note()
        self._controller.refresh_forecast()

    def step(self, pending: list[int], outcome: Outcome) -> None:
        """Run one step. `pending`: tokens of each request that the drafter has not read."""
        batch, began, self._usual = self._phase.batch, self._clock.now, 0.0
        random = self._phase.random
        buckets = self._phase.machine.buckets
        plan = self._controller.plan(
            batch, [self._limit] * batch, pending, [random] * batch, buckets
        )
        self._learn()
        simulated = self._drafts.take(batch)
        drafts = self._draft(plan, simulated, pending)
        lengths = self._controller.trim(drafts)
        drafting = self._clock.now - began
        rows = self._phase.machine.rows(lengths, max(plan.lookahead))
        seconds = self._spend(self._phase.machine.target(rows))
        self._notes.append(partial(self._controller.observe_step, batch, rows, seconds))
        emitted = 0
        for i, (draft, length) in enumerate(zip(drafts, lengths, strict=True)):
            lost = self._generator.random(length) >= simulated.accepted[i, :length]
            accepted = int(lost.argmax()) if lost.any() else length
            if draft:
                wanted = 0 if self._can_stop_early else plan.lookahead[i]
                found = length, accepted, draft, wanted, random
                self._notes.append(partial(self._controller.observe_acceptance, *found))
            emitted += accepted + 1
            pending[i] += 1  # the drafter has already read its own tokens
            tokens = 1 + float(np.cumprod(simulated.accepted[i, :length]).sum())
            outcome.tokens += tokens
            outcome.alone += tokens * self._phase.machine.target(batch) / batch
        took = self._clock.now - began
        if self._controller.learns_first:
            self._learn()
        self._controller.emitted(emitted, took)
        outcome.seconds += self._usual
        outcome.steps += 1
        if plan.probe and any(plan.lookahead):
            outcome.probes += 1
            outcome.probing += drafting + seconds - self._phase.machine.target(batch)
            outcome.probing -= (emitted - batch) * self._phase.machine.target(batch) / batch
        planned = 0 if plan.probe else max(plan.lookahead)
        outcome.lookaheads[planned] = outcome.lookaheads.get(planned, 0) + 1

    def _draft(
        self, plan: LookaheadPlan, simulated: SimulatedDrafts, pending: list[int]
    ) -> list[list[float]]:
        """Run a round of drafting. Return the confidences of each request's draft tokens."""
        machine = self._phase.machine
        active = [i for i, wanted in enumerate(plan.lookahead) if wanted]
        drafts: list[list[float]] = [[] for _ in plan.lookahead]
        if not active:
            return drafts
        fed = sum(pending[i] for i in active)
        forwards = machine.catch_up * max(0, fed - len(active))
        for i in active:
            pending[i] = 0
        overhead = self._spend(machine.overhead(len(active)))
        steps = drafted = 0
        while active:
            forwards += machine.drafter(len(active))
            steps, drafted = steps + 1, drafted + len(active)
            for i in active:
                drafts[i].append(float(simulated.confidence[i, len(drafts[i])]))
            active = [i for i in active if len(drafts[i]) < plan.lookahead[i]]
            if self._can_stop_early and active:
                going = self._controller.continue_drafting(drafts)
                active = [i for i in active if going[i]]
        observe = partial(
            self._controller.observe_draft,
            drafted / steps,
            steps,
            self._spend(forwards),
            overhead=overhead,
            fed=fed,
            longest=max(map(len, drafts)),
        )
        self._notes.append(observe)
        return drafts

    def _spend(self, seconds: float) -> float:
        """Advance the clock by `seconds` with noise. Return the measured seconds."""
        machine, generator = self._phase.machine, self._generator
        if machine.noise:
            seconds *= math.exp(machine.noise * generator.standard_normal())
        self._usual += seconds
        if machine.wander:
            seconds *= math.exp(self._slowness)
            kept = math.exp(-seconds / machine.calm)
            fresh = machine.wander * math.sqrt(1.0 - kept**2)
            self._slowness = kept * self._slowness + fresh * generator.standard_normal()
        self._clock.now += seconds
        return seconds


# ------------------------------------------------------------------------------- exact rates


def static_rate(text: Text, machine: Machine, batch: int, lookahead: int) -> float:
    """Return the tokens per second of a fixed lookahead. 0 is the target alone."""
    rate = text.share * text.easy + (1 - text.share) * text.hard
    tokens = batch * sum(rate**j for j in range(lookahead + 1))
    seconds = machine.target(machine.rows([lookahead] * batch, lookahead))
    if lookahead:
        seconds += machine.overhead(batch) + lookahead * machine.drafter(batch)
    return tokens / seconds


def stopped_rate(simulated: SimulatedDrafts, machine: Machine, goes_on: np.ndarray) -> float:
    """Return the tokens per second of one request with a stopping rule, one draft per round.

    A target step costs as much as one row, whatever it verifies. `goes_on` [drafts, depth] is True
    if another token is drafted after this one.
    """
    drafted = np.cumprod(np.hstack([np.ones((len(goes_on), 1)), goes_on[:, :-1]]), axis=1)
    tokens = 1 + (np.cumprod(simulated.accepted, axis=1) * drafted).sum(1)
    seconds = machine.target(1) + machine.drafter(1) * drafted.sum(1)
    return float(tokens.sum() / seconds.sum())
