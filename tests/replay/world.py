# SPDX-License-Identifier: Apache-2.0
"""Serves a load of recorded texts on a machine, and calls a controller as an engine does.

The order of calls is that of `LookaheadControl`, and of `UnreadSteps` if speculation is disabled.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from machines import Machine
from recordings import LONGEST, Text

from vllm_hetero_spec.lookahead.controllers import Controller, LookaheadPlan
from vllm_hetero_spec.lookahead.estimates import OutputLengths

_READ_BESIDE = 128  # context tokens; longer contexts are read only for a draft of their request
_ROOM = 4096  # output tokens that a request may emit
_PATIENCE = 4  # output tokens; until then, a long context waits if others wait for first tokens
_OUTPUT = 64, 192  # tokens of such a request, at least and at most
# Steps without drafts that are read: the first two, and two of 64.
_FIRST_LOOKS, _APART, _UNSEEN = 2, 64, 1.0


class Phase(NamedTuple):
    """A part of a load.

    Attributes:
        share: Share of the duration.
        batch: Requests at a time.
        texts: One for each request in turn.
        arrivals: True if requests end and others arrive; otherwise all are endless.
        prompt: Context tokens of a request that arrives. The target has them in its cache.
    """

    share: float
    batch: int
    texts: Sequence[Text]
    arrivals: bool = False
    prompt: int = 150


@dataclass
class Request:
    """A request in the batch. `left`, `unread` and `emitted` count tokens."""

    text: Text
    at: int
    left: float = math.inf
    unread: int = 0
    emitted: int = 0

    @property
    def limit(self) -> int:
        return int(min(LONGEST, self.left - 1))

    def emit(self, tokens: int) -> None:
        self.at = (self.at + tokens) % len(self.text)
        self.left -= tokens
        self.emitted += tokens


@dataclass
class Outcome:
    """Sums over steps, in tokens and seconds without noise.

    Attributes:
        alone: Seconds that the target alone would take for the tokens at the same batch.
        of_batch: By batch, `alone` and `seconds`.
        probing: Seconds that probes lost.
        off: Steps while speculation was disabled; `read` of them were planned.
    """

    tokens: int = 0
    seconds: float = 0.0
    alone: float = 0.0
    probing: float = 0.0
    off: int = 0
    read: int = 0
    of_batch: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, batch: int, tokens: int, seconds: float, plain: float) -> None:
        """Add a step of `batch` requests; `plain` is what it takes without drafts."""
        alone = tokens * plain / batch
        self.tokens += tokens
        self.seconds += seconds
        self.alone += alone
        before = self.of_batch.get(batch, (0.0, 0.0))
        self.of_batch[batch] = before[0] + alone, before[1] + seconds

    @property
    def speed(self) -> float:
        """Speed relative to the target alone."""
        return self.alone / self.seconds


class World:
    """Simulated server.

    Args:
        machine: Costs of steps.
        phases: The load.
        seconds: Duration, in seconds without noise.
        seed: Seed of texts, arrivals and noise.

    Attributes:
        now: Seconds with noise.
    """

    def __init__(
        self, machine: Machine, phases: Sequence[Phase], seconds: float, seed: int = 0
    ) -> None:
        self.machine, self.now = machine, 0.0
        self.requests: list[Request] = []
        self._phases, self._duration = list(phases), seconds
        self._generator, self._arrived = random.Random(seed), 0
        self._seed, self._steps = seed, 0
        self._noise_at = [self._generator.randrange(len(noise)) for noise in machine.noise]
        self._outputs = OutputLengths()
        self._notes: list[Callable[[], None]] = []
        self._without, self._looks_batch, self._looked = 0, 0, 0.0
        self._drafted = False  # the last plan had drafts
        self._last: Callable[[], None] | None = None  # observes the last step, if it was planned

    def clock(self) -> float:
        """Return the time as a controller measures it."""
        return self.now

    def run(self, controller: Controller, warm_up: float = 2.0) -> tuple[Outcome, Outcome]:
        """Serve the load. Return the outcome of the whole, and that after the first seconds."""
        self._controller = controller
        whole, late = Outcome(), Outcome()
        ends, number = 0.0, -1
        while whole.seconds < self._duration:
            if whole.seconds >= ends:
                number += 1
                ends += self._phases[number].share * self._duration
            began = self._begin_step(self._phases[number])
            outcomes = (whole, late) if whole.seconds >= warm_up else (whole,)
            self._step(began, outcomes)
        return whole, late

    # ------------------------------------------------------------------------------ the load

    def _begin_step(self, phase: Phase) -> bool:
        """Let requests end and arrive. Return True if the target's next step has a prefill."""
        self.requests = [request for request in self.requests if request.left > 1]
        del self.requests[phase.batch :]
        texts = phase.texts
        for index, request in enumerate(self.requests):
            if request.text not in texts:
                self.requests[index] = self._request(phase)
        arrived = phase.arrivals and len(self.requests) < phase.batch
        while len(self.requests) < phase.batch:
            self.requests.append(self._request(phase))
        return arrived

    def _request(self, phase: Phase) -> Request:
        text = phase.texts[self._arrived % len(phase.texts)]
        # Every run has the same requests in the same order.
        generator = random.Random(self._seed * 100_003 + self._arrived)
        self._arrived += 1
        request = Request(text, generator.choice(text.starts))
        if phase.arrivals:
            request.left = generator.randint(*_OUTPUT)
            request.unread = phase.prompt
        return request

    # ------------------------------------------------------------------------------ a step

    def _step(self, began: bool, outcomes: Sequence[Outcome]) -> None:
        controller, requests, machine = self._controller, self.requests, self.machine
        batch = len(requests)
        plain = machine.target(batch, batch)
        if self._passes(batch) and not began:
            self._last = None
            self._spend(plain, 0)
            for request in requests:
                request.emit(1)
                request.unread += 1
            for outcome in outcomes:
                outcome.add(batch, batch, plain, plain)
                outcome.off += 1
            return
        if self._last is not None:
            self._last()
        self._looked = started = self.now
        waits = [began and r.emitted < _PATIENCE and r.unread > _READ_BESIDE for r in requests]
        limits = [0 if each else r.limit for r, each in zip(requests, waits, strict=True)]
        kinds = [request.text.random for request in requests]
        unread = [request.unread for request in requests]
        emitted = [request.emitted for request in requests]
        lengths = self._outputs.expected(emitted, [_ROOM] * batch)
        plan = controller.plan(batch, limits, unread, kinds, machine.buckets, lengths)
        lookahead = [
            min(wanted, limit) for wanted, limit in zip(plan.lookahead, limits, strict=True)
        ]
        self._drafted = any(lookahead)
        drafts, timing, stopped, spent = self._draft(plan, lookahead, limits)
        self._learn()
        lengths = [0] * batch
        if timing is not None:
            self._notes.append(timing)
            lengths = controller.trim(drafts)
        rows = machine.rows(lengths, max(lookahead))
        usual = machine.target(batch, rows)
        seconds = self._spend(usual, 0)
        emitted, found = batch, []
        for index, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            accepted = min(length, request.text.accepted[request.at])
            if drafts[index]:
                wanted = 0 if stopped else lookahead[index]
                found.append((length, accepted, drafts[index], wanted, kinds[index]))
            emitted += accepted
            request.emit(1 + accepted)
            request.unread += 1
        times = None if began else (seconds, self.now - started)
        self._last = partial(self._observe, batch, rows, emitted, found, times)
        for outcome in outcomes:
            outcome.add(batch, emitted, spent + usual, plain)
            outcome.off += controller.off
            outcome.read += controller.off
            if plan.probe:
                outcome.probing += spent + usual - emitted * plain / batch

    def _passes(self, batch: int) -> bool:
        """Return True if this step is neither read nor planned."""
        low, high = sorted((batch, self._looks_batch))
        rests = not self._drafted and self._controller.is_idle
        rests = rests and high <= 1.25 * low and self.now - self._looked < _UNSEEN
        self._without = self._without + 1 if rests else 0
        if not rests:
            self._looks_batch = batch
        return self._without > _FIRST_LOOKS and self._without % _APART > 1

    def _draft(
        self, plan: LookaheadPlan, lookahead: Sequence[int], limits: Sequence[int]
    ) -> tuple[list[list[float]], Callable[[], None] | None, bool, float]:
        """Run a round.

        Returns:
            The confidences of each draft, what observes the timing, True if the controller ended
            the round, and seconds without noise.
        """
        machine, requests = self.machine, self.requests
        drafts: list[list[float]] = [[] for _ in requests]
        if not any(lookahead):
            return drafts, None, False, 0.0
        reads = [
            wanted > 0 or (not plan.probe and limit > 0 and request.unread <= _READ_BESIDE)
            for wanted, limit, request in zip(lookahead, limits, requests, strict=True)
        ]
        fed = 0
        for request, read in zip(requests, reads, strict=True):
            if read:
                fed, request.unread = fed + request.unread, 0
        longest, tokens, stopped = max(lookahead), 0, False
        steps = max(1, int(machine.drafter_steps(longest) + self._generator.random()))
        active, forwards, picked = sum(reads), 0, 0
        usual = machine.catch_up * max(0, fed - active)
        while forwards < steps:
            usual += machine.drafter(active)
            forwards, picked = forwards + 1, picked + active
            tokens = longest
            if forwards < steps:  # the last target token may be cut, as at the end of a round
                tokens = min(longest, max(1, round(forwards / machine.steps[1])))
            for draft, request, wanted in zip(drafts, requests, lookahead, strict=True):
                draft[:] = request.text.drafts[request.at][: min(tokens, wanted)]
            going = [wanted > tokens for wanted in lookahead]
            if machine.stops_early and forwards < steps and tokens and any(going):
                shown = [draft if goes else [] for draft, goes in zip(drafts, going, strict=True)]
                worth = self._controller.continue_drafting(shown)
                stopped = not any(map(min, worth, going))
                if stopped:
                    break
            active = max(1, sum(going))
        overhead = machine.overhead(sum(reads))
        observe = partial(
            self._controller.observe_draft,
            picked / forwards,
            forwards,
            self._spend(usual, 1),
            overhead=self._spend(overhead, 1),
            fed=fed,
            longest=max(map(len, drafts)),
        )
        return drafts, observe, stopped, usual + overhead

    def _observe(
        self,
        batch: int,
        rows: int,
        emitted: int,
        found: Sequence[tuple[int, int, list[float], int, bool]],
        times: tuple[float, float] | None,
    ) -> None:
        """Observe a step. `times` of the target and of the step are unknown with a prefill."""
        controller = self._controller
        self._notes += [partial(controller.observe_acceptance, *each) for each in found]
        if times is not None:
            self._notes.append(partial(controller.observe_step, batch, rows, times[0]))
        if controller.learns_first:
            self._learn()
        if times is not None:
            controller.emitted(emitted, times[1])

    def _learn(self) -> None:
        notes, self._notes = self._notes, []
        for note in notes:
            note()
        self._controller.refresh_forecast()

    def _spend(self, seconds: float, kind: int) -> float:
        """Advance the clock by `seconds` with noise. Return the measured seconds."""
        noise, at = self.machine.noise[kind], self._noise_at[kind]
        self._noise_at[kind] = (at + 1) % len(noise)
        seconds *= math.exp(noise[at])
        self.now += seconds
        return seconds
