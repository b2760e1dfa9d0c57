# SPDX-License-Identifier: Apache-2.0
"""Controller that maximizes tokens per second, and disables speculation if the target is faster.

A renewal process that earns tokens and costs seconds is optimal if it does whatever earns more than
lambda tokens per second; lambda is the achieved rate (Dinkelbach). This gives three decisions: the
draft length (`plan`), whether one more drafter step is worth its time (`continue_drafting`), and
which proposed tokens are worth a row of the target (`trim`).
"""

import time
from collections.abc import Callable, Sequence

from vllm_hetero_spec.lookahead.acceptance import Observation
from vllm_hetero_spec.lookahead.controllers import Controller, Gauges, LookaheadPlan, lookahead_of
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import GOOD_ENOUGH, Chains, Forecast, Load, filled_up
from vllm_hetero_spec.lookahead.prober import Prober
from vllm_hetero_spec.lookahead.step_policy import StepPolicy

_BEGIN = 1.02  # gain at which drafting begins: above 1 by about what a forecast may be off
_END = 0.99  # gain at which it ends: below 1, or the two would take turns on the edge
_RANDOM_SHARES = 4  # loads are distinguished by quarters of sampled requests
_FORECAST_EVERY = 8  # steps between forecasts, which take a share of a millisecond each
_PROBED = 4  # requests of a probe at most: enough drafts for news, few enough to be cheap
_PROBE = 4  # tokens of each at most: deeper positions follow from these
_NEWS = 0.01  # growth of the gain at which a probe is followed by others
_WARM_UP = 48  # drafts until which any probe is followed by others
_FIRST = 0.04  # seconds that experiments with an unknown pair may lose, and two plain steps
_NEAR = 0.92  # gain at which any probe is followed by others
_HORIZON = 2.0  # seconds, divided by the batch, in which a request's catch-up has to pay
_LEAST_GAIN = 0.02  # share of that time that a catch-up may take if nothing is gained


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
        self._prober, self._probing, self._loss = Prober(clock()), False, 0.0
        self._unknown = not known.acceptance.drafts  # no earlier run has drafted
        if self._unknown:
            self._prober.budget = _FIRST
        self.off, self.regime = True, "measuring"
        # The present step.
        self._batch, self._random, self._limits = 1, [False], [0]
        self._buckets: Sequence[int] = ()
        self._lookahead, self._tokens_per_second, self._looks = 0, 0.0, False
        # The last forecast, what it is for (requests, quarters of sampled ones), its age in steps.
        self._forecast: Forecast | None = None
        self._load, self._age = (0, 0), 0

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
    ) -> LookaheadPlan:
        now, self._batch, self._buckets = self._clock(), batch, buckets
        limits = self._limits = [min(limit, self._acceptance.positions) for limit in limits]
        self._random = list(random or [False] * len(limits))
        self.policy, self._looks = None, False
        probed, self._probing = self._probing, False
        nothing = LookaheadPlan((0,) * len(limits))
        if not any(limits) or not self._costs.knows_target:
            return nothing
        pending = pending or [0] * len(limits)
        # Requests that may be drafted for, those with the shortest catch-up first.
        able = sorted((i for i, limit in enumerate(limits) if limit), key=lambda i: pending[i])
        if not self._costs.knows_drafter:
            return self._probe(now, able, pending, _PROBE // 2) or nothing
        before = self._forecast.gain if self._forecast else 0.0
        found = self._refreshed(at_once=probed)
        learns = self._warms_up
        if learns and not before:
            self._prober.budget += 2.0 * batch / found.alone
        if probed and (learns or found.gain > _NEAR or found.gain > before + _NEWS):
            self._prober.hurry(now)
        self.off = found.gain < (_BEGIN if self.off else _END)
        self.regime = "target alone" if self.off else "drafting"
        if self.off:
            return self._probe(now, able, pending, min(found.shortest, _PROBE)) or nothing
        # Steps without drafts measure the cost of the target alone.
        if self._prober.due(now, (found.gain**2 - 1.0) * batch / found.alone, batch):
            return nothing
        length = self._lookahead = self._choose(found)
        share = max(found.gain - 1.0, _LEAST_GAIN)
        chosen = [i for i in able if self._catch_up_pays(share, pending[i])]
        lookahead = lookahead_of(chosen, length, limits)
        trees = self._choice.plan(now, len(chosen))
        self._looks = trees.looks
        self.policy = StepPolicy(
            self.known,
            self._tokens_per_second,
            batch,
            batch + sum(lookahead),
            self._random,
            found.beside if trees.paths and not trees.looks else (),
            max(trees.paths, 1),
            filled_up=bool(buckets),
        )
        return LookaheadPlan(lookahead, trees=trees)

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        self._costs.observe_target(batch, rows, seconds, again)

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
        looks = wide and self._looks
        self._costs.observe_drafting(batch, steps, seconds, overhead, fed, wide=wide, looks=looks)
        self.known.steps.observe(longest, steps if exposed is None else exposed)

    def observe_acceptance(
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float] = (),
        wanted: int = 0,
        random: bool = False,
    ) -> None:
        self._acceptance.observe(Observation(verified, accepted, confidences, wanted), random)

    def emitted(self, tokens: int, seconds: float) -> None:
        if self._probing:
            lost = seconds - tokens * self._seconds_per_token()
            self._prober.charge(lost - self._loss)
            self._loss = 0.0

    def refresh_forecast(self) -> None:
        if self._forecast and not self.off and any(self._limits) and self._age + 1 >= self._lasts:
            self._refreshed()
            self._age = -1  # new in the next step

    def gauges(self) -> Gauges:
        batch, costs = self._batch, self._costs
        return Gauges(
            lookahead=0 if self.off else self._lookahead,
            tokens_per_second=self._tokens_per_second,
            gain=self._forecast.gain if self._forecast else 0.0,
            drafter_seconds=costs.drafter(batch) if costs.knows_drafter else 0.0,
            target_seconds=costs.target(batch, batch) if costs.knows_target else 0.0,
            acceptance=tuple(self._acceptance.rates(2 * sum(self._random) > len(self._random))),
        )

    @property
    def _warms_up(self) -> bool:
        """True if there are too few drafts of an unknown pair to rely on."""
        return self._unknown and self._acceptance.drafts < _WARM_UP

    @property
    def _lasts(self) -> int:
        """Steps from one forecast to the next: few while little is known."""
        return min(_FORECAST_EVERY, self._acceptance.drafts // _FORECAST_EVERY)

    def _refreshed(self, *, at_once: bool = False) -> Forecast:
        """Return the present load's forecast; compute it if it is due."""
        quarters = round(_RANDOM_SHARES * sum(self._random) / len(self._random))
        same = self._forecast is not None and self._load == (self._batch, quarters)
        self._age += 1
        if self._forecast is not None and same and not at_once and self._age < self._lasts:
            return self._forecast
        self._load, self._age = (self._batch, quarters), 0
        self._acceptance.learn()
        random = [kind for kind, limit in zip(self._random, self._limits, strict=True) if limit]
        if not same:
            self._tokens_per_second = 1.0 / self._seconds_per_token()
        # The first forecast of a load gives the price of a second for the second one.
        for _ in range(1 if same else 2):
            price = self._tokens_per_second, self._can_stop_early, self._buckets
            load = Load(self._batch, self._limits, random, *price)
            found = self._choice.forecast(load, self._lookahead)
            self._tokens_per_second = max(found.alone, *found.rates)
        self._forecast = found
        return found

    def _choose(self, found: Forecast) -> int:
        """Return the best draft length.

        If the last one is about as good, keep it. If rounds can end early, return the largest that
        is about as good.
        """
        last, rates = self._lookahead, found.hoped
        good = GOOD_ENOUGH * max(rates)
        if self._can_stop_early:
            return max(k for k, rate in enumerate(rates, 1) if rate >= good)
        if 0 < last <= len(rates) and rates[last - 1] >= good:
            return last
        return found.shortest

    def _catch_up_pays(self, share: float, pending: int) -> bool:
        """Return True if a request's catch-up pays at this gain over the target alone."""
        horizon = max(_HORIZON / self._batch, pending * self._seconds_per_token())
        return self._costs.catch_up(pending) <= share * horizon

    def _probe(
        self, now: float, able: Sequence[int], pending: Sequence[int], length: int
    ) -> LookaheadPlan | None:
        """Return drafts for some requests if a probe is due and affordable.

        Their number has the smallest loss per request; it is 1 if that is too much.
        """
        sizes = {1, min(_PROBED, len(able))}
        if self._acceptance.drafts:
            sizes.add(len(able))
        losses = {n: self._expected_loss(length, pending, able[:n]) for n in sizes}
        count = min(sizes, key=lambda n: losses[n] / n)
        if losses[count] > self._prober.budget:
            count = 1
        if not self._prober.due(now, losses[count], self._batch):
            return None
        self._probing, self._loss = True, losses[count]
        lookahead = lookahead_of(able[:count], length, self._limits)
        return LookaheadPlan(lookahead, True, self._choice.plan(now, count))

    def _expected_loss(self, length: int, pending: Sequence[int], chosen: Sequence[int]) -> float:
        """Return the seconds that a probe of these requests costs beyond what it earns."""
        count, rows = len(chosen), self._batch + len(chosen) * length
        if self._buckets:
            rows = self._batch * (1 + filled_up(length, self._buckets))
        cost = self._costs.verifying(self._batch, rows)
        cost += sum(self._costs.catch_up(pending[i]) for i in chosen)
        if self._costs.knows_drafter:
            cost += self._costs.drafting(count, self.known.steps.expected(length))
        survival = self._acceptance.survival([self._random[i] for i in chosen])
        earned = count * float(survival[:, :length].sum(1).mean())
        return max(cost - earned * self._seconds_per_token(), 0.0)

    def _seconds_per_token(self) -> float:
        """Return the seconds of the target alone for a token."""
        return self._costs.target(self._batch, self._batch) / self._batch
