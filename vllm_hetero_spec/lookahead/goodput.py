# SPDX-License-Identifier: Apache-2.0
"""Controller that maximizes tokens per second, and disables speculation if the target is faster.

A renewal process that earns tokens and costs seconds is optimal if it does whatever earns more than
lambda tokens per second; lambda is the achieved rate (Dinkelbach). This gives three decisions: the
draft length (`plan`), whether one more drafter step is worth its time (`continue_drafting`), and
which proposed tokens are worth a row of the target (`trim`).
"""

import time
from collections.abc import Callable, Sequence

from vllm_hetero_spec.lookahead.acceptance import Acceptance, Observation
from vllm_hetero_spec.lookahead.controllers import Controller, Gauges, LookaheadPlan, lookahead_of
from vllm_hetero_spec.lookahead.estimates import USUAL, Estimates
from vllm_hetero_spec.lookahead.forecast import (
    Chains,
    Forecast,
    Load,
    filled_up,
    forecast,
)
from vllm_hetero_spec.lookahead.prober import Prober, other_batch
from vllm_hetero_spec.lookahead.step_policy import StepPolicy

_BEGIN = 1.02  # gain at which drafting begins: above 1 by about what a forecast may be off
_SUNK = 0.05  # seconds that drafting is expected to have lost when it ends: forecasts vary by 5 %
_RANDOM_SHARES = 4  # loads are distinguished by quarters of sampled requests
_FORECAST_EVERY = 0.05  # seconds between forecasts, which take a share of a millisecond each
# Steps of a probe. The first draft may begin at any token. The later ones begin behind a rejected
# token, so more of their tokens are accepted.
_BURST = 4
_LEAST_BURST = 2  # steps of a probe if they use up its budget: the first teaches costs only
_WARM_UP = 80  # drafts from which on a pair is known
# Seconds, and plain steps, that an unknown pair may lose. As many seconds of gain offset losses.
_FIRST = 0.05, 2.0
_NEAR = 0.92  # gain from which on a probe is followed by others


class Goodput(Controller):
    """Controller that maximizes tokens per second.

    Args:
        known: Estimates for the pair; updated in place.
        can_stop_early: True if the drafter calls `continue_drafting` between its steps.
        choice: Chooses the kind of drafts; None if all are chains.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        known: Estimates,
        *,
        can_stop_early: bool = False,
        choice: Chains | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.known, self._clock, self._can_stop_early = known, clock, can_stop_early
        self._costs, self._acceptance = known.costs, known.acceptance
        self._choice = choice or Chains(known)
        self._prober = Prober(clock())
        # The present probe: steps that are left, requests, seconds that were charged for it.
        self._burst, self._probed, self._loss, self._probing = 0, 0, 0.0, False
        self._warms_up = not known.acceptance.drafts  # no earlier run has drafted
        self._hoped = known._replace(acceptance=Acceptance(known.acceptance.positions))
        self._lost = 0.0  # seconds, while warming up
        self.off, self.regime = True, "measuring"
        # The present step.
        self._batch, self._random, self._limits = 1, [False], [0]
        self._buckets: Sequence[int] = ()
        self._lookahead, self.tokens_per_second = known.acceptance.positions, 0.0
        # The last forecast, what it is for, and its time.
        self._forecast: Forecast | None = None
        self._load, self._kind, self._foreseen = Load(0, (), (), 0.0), (0, 0), clock()
        self._able, self._sunk, self._decided = 0, 0.0, (0, 0)

    @property
    def learns_first(self) -> bool:
        return self.off or self._warms_up

    @property
    def is_idle(self) -> bool:
        return self.off and self._costs.knows_drafter and self._clock() < self._prober.next

    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
        buckets: Sequence[int] = (),
        lengths: Sequence[float] | None = None,
    ) -> LookaheadPlan:
        # With asynchronous scheduling, all requests of a step may have ended.
        now, self._batch, self._buckets = self._clock(), batch or 1, buckets
        limits = self._limits = [min(limit, self._acceptance.positions) for limit in limits]
        self._random = list(random or [False] * len(limits))
        self.policy = None
        probing, self._probing = self._probing, False
        nothing = LookaheadPlan((0,) * len(limits))
        if not any(limits) or not self._costs.knows_target:
            return nothing
        pending = pending or [0] * len(limits)
        lengths = lengths or [USUAL] * len(limits)
        # Requests that may be drafted for, those with the shortest catch-up first.
        able = sorted((i for i, limit in enumerate(limits) if limit), key=lambda i: pending[i])
        if not self._costs.knows_drafter:
            return self._probe(now, able, pending, 1) or nothing
        probed = probing and not self._burst
        # While drafting, `refresh_forecast` replaces old forecasts, so that no round waits for one.
        found = self._refreshed(at_once=probed or (self.off and self._is_late(now)))
        most_lost = _FIRST[0] + _FIRST[1] * batch / found.alone
        if self._warms_up and self._lost > most_lost:
            self._sunk = _SUNK
        self._warms_up &= self._lost < most_lost and self._acceptance.drafts < _WARM_UP
        gain = found.gain
        if self._warms_up and gain < _BEGIN:
            gain = forecast(self._hoped, self._load).gain
        if probed and found.gain > _NEAR:
            self._prober.hurry(now)
        self._decide(gain, len(able))
        if self.off:
            return self._probe(now, able, pending, found.good[0]) or nothing
        # A catch-up pays if drafts save more than its time while the target writes the output.
        saved = (1.0 - 1.0 / max(found.gain, _BEGIN)) * self._seconds_per_token()
        chosen = [i for i in able if self._costs.catch_up(pending[i]) <= saved * lengths[i]]
        if not chosen:
            return self._probe(now, able, pending, found.good[0]) or nothing
        self._burst = 0
        # Steps without drafts measure the cost of the target alone.
        if self._prober.due(now, (found.gain**2 - 1.0) * batch / found.alone, batch):
            return nothing._replace(probe=True)
        length = self._lookahead = self._choose(found)
        lookahead = lookahead_of(chosen, length, limits)
        trees = self._choice.plan(now, len(chosen))
        self.policy = StepPolicy(
            self.known,
            self.tokens_per_second,
            batch,
            batch + sum(lookahead),
            self._random,
            found.beside if trees.paths and not trees.looks else (),
            max(trees.paths, 1),
            filled_up=bool(buckets),
        )
        return LookaheadPlan(lookahead, trees=trees)

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        seconds = self._choice.chain_step(batch, rows, seconds, again)
        self._costs.observe_target(batch, rows, seconds)

    def observe_draft(
        self,
        batch: float,
        steps: float,
        seconds: float,
        *,
        overhead: float = 0.0,
        fed: int = 0,
        longest: int = 0,
        exposed: float | None = None,
        wide: bool = False,
    ) -> None:
        seconds = self._choice.chain_round(batch, steps, seconds, wide)
        self._costs.observe_drafting(batch, steps, seconds, overhead, fed)
        self.known.steps.observe(longest, steps if exposed is None else exposed)

    def observe_acceptance(
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float] = (),
        wanted: int = 0,
        random: bool = False,
    ) -> None:
        if self._burst < _BURST - 1:
            self._acceptance.observe(Observation(verified, accepted, confidences, wanted), random)

    def emitted(self, tokens: int, seconds: float | None) -> None:
        if not self._costs.knows_target:
            return
        alone = self._seconds_per_token()
        if self._forecast and not self.off:
            decoding = self._batch * alone if seconds is None else seconds
            self._sunk = max(self._sunk + (1.0 - self._forecast.gain) * decoding, 0.0)
        if seconds is None:
            return
        lost = seconds - tokens * alone
        if self._probing:
            self._prober.charge(lost - self._loss)
            self._loss = 0.0
        elif self._warms_up and not self.off:
            self._lost = max(self._lost + lost, -_FIRST[0])

    def refresh_forecast(self) -> None:
        if self._forecast and not self.off and any(self._limits) and self._is_late(self._clock()):
            self._refreshed(at_once=True)

    def gauges(self) -> Gauges:
        batch, costs = self._batch, self._costs
        return Gauges(
            lookahead=0 if self.off else self._lookahead,
            tokens_per_second=self.tokens_per_second,
            gain=self._forecast.gain if self._forecast else 0.0,
            drafter_seconds=costs.drafter(batch) if costs.knows_drafter else 0.0,
            target_seconds=costs.target(batch, batch) if costs.knows_target else 0.0,
            acceptance=tuple(self._acceptance.rates(2 * sum(self._random) > len(self._random))),
        )

    def _is_late(self, now: float) -> bool:
        """Return True if the last forecast is old."""
        return now - self._foreseen >= _FORECAST_EVERY

    def _refreshed(self, *, at_once: bool) -> Forecast:
        """Return the present load's forecast; compute it if the load has changed, or `at_once`."""
        quarters = round(_RANDOM_SHARES * sum(self._random) / len(self._random))
        kind, able = (self._batch, quarters), sum(limit > 0 for limit in self._limits)
        # Another request or two change little, and `plan` would have to wait for the forecast.
        same = abs(quarters - self._kind[1]) <= 1 and not other_batch(able, self._able)
        same = same and not other_batch(self._batch, self._kind[0])
        if self._forecast is not None and same and not at_once:
            return self._forecast
        self._kind, self._able, self._foreseen = kind, able, self._clock()
        self._acceptance.learn()
        random = [kind for kind, limit in zip(self._random, self._limits, strict=True) if limit]
        if not same:
            self.tokens_per_second = 1.0 / self._seconds_per_token()
        # The first forecast gives the price of a second for the second one.
        for _ in range(2):
            price = self.tokens_per_second, self._can_stop_early, self._buckets
            self._load = Load(self._batch, self._limits, random, *price)
            found = self._choice.forecast(self._load, self._lookahead)
            self.tokens_per_second = max(found.alone, *found.rates)
        self._forecast = found
        return found

    def _decide(self, gain: float, able: int) -> None:
        """Decide whether to draft.

        Forecasts vary, so drafting ends after an expected loss, and at once with another load. A
        step that reads many prompts drafts for few requests, and does not count.
        """
        if not other_batch(able, self._batch):
            batch, quarters = self._decided
            if other_batch(self._kind[0], batch) or abs(self._kind[1] - quarters) > 1:
                self._sunk = _SUNK
            self._decided = self._kind
        self.off = gain < (_BEGIN if self.off else 1.0) and (self.off or self._sunk >= _SUNK)
        if self.off:
            self._sunk = 0.0
        self.regime = "target alone" if self.off else "drafting"

    def _choose(self, found: Forecast) -> int:
        """Return the good draft length that is nearest to the last one.

        Initially, and if rounds can end early, return the largest: it teaches most.
        """
        good = found.good
        if self._can_stop_early:
            return good[-1]
        return min(good, key=lambda length: abs(length - self._lookahead))

    def _probe(
        self, now: float, able: Sequence[int], pending: Sequence[int], length: int
    ) -> LookaheadPlan | None:
        """Return drafts during a probe, and if one is due and affordable.

        It drafts for all requests if that loses less per request than a draft for one of them.
        """
        if self._burst <= _BURST - _LEAST_BURST and self._prober.budget < 0:
            self._burst = 0
        if not self._burst:
            count, loss = 1, self._expected_loss(length, pending, able[:1])
            if self._acceptance.drafts and self._costs.knows_catch_up:
                of_all = self._expected_loss(length, pending, able)
                if of_all < loss * len(able) and of_all <= self._prober.budget:
                    count, loss = len(able), of_all
            if not self._prober.due(now, loss, self._batch):
                return None
            self._burst, self._probed, self._loss = _BURST, count, loss
            self._costs.doubt_drafter()
        self._burst, self._probing = self._burst - 1, True
        chosen = able[: self._probed]
        lookahead = lookahead_of(chosen, length, self._limits)
        return LookaheadPlan(lookahead, True, self._choice.plan(now, len(chosen)))

    def _expected_loss(self, length: int, pending: Sequence[int], chosen: Sequence[int]) -> float:
        """Return the seconds that a probe of these requests costs beyond what it earns."""
        count, rows = len(chosen), self._batch + len(chosen) * length
        if self._buckets:
            rows = self._batch * (1 + filled_up(length, self._buckets))
        cost = self._costs.target(self._batch, rows) - self._costs.target(self._batch, self._batch)
        if self._costs.knows_drafter:
            cost += self._costs.drafting(count, self.known.steps.expected(length))
        survival, _ = self._acceptance.replayed([self._random[i] for i in chosen])
        earned = count * float(survival[..., :length].sum(-1).mean())
        reading = sum(self._costs.catch_up(pending[i]) for i in chosen)
        return reading + _LEAST_BURST * max(cost - earned * self._seconds_per_token(), 0.0)

    def _seconds_per_token(self) -> float:
        """Return the seconds of the target alone for a token."""
        return self._costs.target(self._batch, self._batch) / self._batch
