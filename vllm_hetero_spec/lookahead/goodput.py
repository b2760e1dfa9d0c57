# SPDX-License-Identifier: Apache-2.0
"""Controller that maximizes tokens per second, and disables speculation if the target is faster.

A renewal process that earns tokens and costs seconds is optimal if it does whatever earns more than
lambda tokens per second; lambda is the achieved rate (Dinkelbach). This gives three decisions: the
draft length (`plan`), whether one more drafter step is worth its time (`continue_drafting`), and
which proposed tokens are worth a row of the target (`trim`).
"""

import math
import time
from collections.abc import Callable, Sequence

from vllm_hetero_spec.lookahead.acceptance_stats import AcceptanceStats, Observation
from vllm_hetero_spec.lookahead.controllers import Controller, Gauges, LookaheadPlan, lookahead_of
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Chains, Forecast, Throughput, filled_up, forecast
from vllm_hetero_spec.lookahead.on_off import BEGIN, OnOff, ProbeBudget
from vllm_hetero_spec.lookahead.step_policy import StepPolicy
from vllm_hetero_spec.lookahead.warm_up import WarmUp

_GOOD_ENOUGH = 0.99  # share of the best rate at which a lookahead is kept: forecasts are no surer
_UNCERTAIN = 0.45  # share of a cost: lookaheads and batches less certain are approached in steps
_RANDOM_SHARES = 4  # loads are told apart by quarters of random requests: few, so that each is met
# Forecasts are made anew after probes, for another load, and else
_SETTLED = 0.06  # in each step while a cost in use is less certain than this, about a measurement;
_FORECAST_EVERY = 8  # later after so many steps, as each takes a share of a millisecond;
_FORECASTS_AT_ONCE = 4  # the first few, which change most, in each step, later ones less and less
# Probes.
_PROBED = 4  # requests at most in the beginning: enough drafts for news, few enough to be cheap
_FIRST_PROBE = 2  # tokens of each before anything is known: one for acceptance, one for its decline
_LONGEST_PROBE = 4  # tokens of each at most: deeper positions follow from these
_NEWS = 0.02  # one that raises the gain by this much is followed by others; of those whose drafts
_NEAR = 0.92  # were verified, also one behind which the gain is so near to worthwhile
_LEAST_LOSS = 0.1  # a probe is charged at least 10 % of its cost
_MEMORY = 10.0  # seconds off after which what is known of acceptance counts half
_LOOSE = 0.5  # share by which the drafter's steps may have changed by then
# Plain steps while drafting: they tell the cost of the target alone, made only in doubt.
_PLAIN_EVERY = 8  # steps: they lose an eighth of the gain at most
_PLAIN_EARLY = 2  # steps while that cost is
_UNKNOWN = 0.045  # less certain than this share: a single measurement or two
# A request's catch-up has to pay within
_HORIZON = 2.0  # seconds, divided by the batch, or for as long as the request was left alone,
_LEAST_GAIN = 0.02  # and may take this share of them where nothing is gained


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
        self._positions = known.acceptance.positions
        self._throughput, self._choice = Throughput(), choice or Chains(known)
        self._on_off, self.off, self.regime = OnOff(), True, "measuring"
        self._budget = ProbeBudget(clock())
        self._warm_up = WarmUp(known.acceptance)
        self._read = 0.0  # seconds of the present step: texts that the drafter had not read
        self._good = known._replace(acceptance=AcceptanceStats(self._positions))  # hoped for
        self._learnt_at = clock()
        # The present step: requests, the load it is (batch, quarters of random requests), lambda.
        self._batch, self._random, self._load = 1, [False], (1, 0)
        self._limits: Sequence[int] = ()
        self._buckets: Sequence[int] = ()
        self._lookahead, self._tokens_per_second, self._looks = 0, 0.0, False
        self._since_plain = 0  # steps
        # The last forecast, the load it is for, its age in steps, and how many that load has had.
        self._forecast: Forecast | None = None
        self._forecast_load, self._forecast_age, self._num_forecasts = (0, 0), 0, 0

    @property
    def learns_first(self) -> bool:
        return self.off or self._warm_up.lasts

    @property
    def is_idle(self) -> bool:
        return self.off and self._costs.knows_drafter and not self._warm_up.lasts

    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
        buckets: Sequence[int] = (),
    ) -> LookaheadPlan:
        now, self._buckets, self._read = self._clock(), buckets, 0.0
        limits = self._limits = [min(limit, self._positions) for limit in limits]
        self._random = list(random or [False] * len(limits))
        quarters = round(_RANDOM_SHARES * sum(self._random) / max(len(limits), 1))
        self._batch, self._load, self.policy, self._looks = batch, (batch, quarters), None, False
        probed = self._budget.end()
        nothing = LookaheadPlan((0,) * len(limits))
        if not any(limits) or not self._costs.knows_target:
            return nothing
        pending = pending or [0] * len(limits)
        # Requests that may be drafted for, those that the drafter knows best first.
        able = sorted((i for i, limit in enumerate(limits) if limit), key=lambda i: pending[i])
        if not self._costs.knows_drafter:
            return self._maybe_probe(now, able, limits, pending) or nothing
        found = self._refresh_forecast(now, limits, probed)
        gain = found.gain
        if gain <= BEGIN:  # above it, more makes no difference
            gain = max(gain, self._warm_up_gain(limits))
        self.off = self._on_off.update(gain, batch)
        self.regime = "target alone" if self.off else "drafting"
        if self.off:
            return self._maybe_probe(now, able, limits, pending) or nothing
        if self._plain_step_is_due(found.gain):
            self._since_plain = 0
            return nothing
        self._since_plain += 1
        self._lookahead = self._choose(found)
        share = max(found.gain - 1.0, _LEAST_GAIN)
        chosen = [i for i in able if self._catch_up_pays(share, pending[i])]
        chosen = chosen[: self._familiar()]
        lookahead = lookahead_of(chosen, self._lookahead, limits)
        trees, rate = self._choice.plan(now, len(chosen)), self._tokens_per_second
        self._looks = trees.looks
        beside = found.beside if trees.paths and not trees.looks else ()
        load = batch, batch + sum(lookahead), self._random
        self.policy = StepPolicy(
            self.known, rate, *load, beside, max(trees.paths, 1), filled_up=bool(buckets)
        )
        return LookaheadPlan(lookahead, trees=trees)

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        if self._budget.probing:
            self._budget.charge(self._costs.more_rows(batch, rows - batch))
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
        waited = steps if exposed is None else exposed
        if self._budget.probing:
            self._budget.charge(seconds * waited / steps + overhead)
        looks = wide and self._looks
        self._read = self._costs.reading(batch, steps, seconds, fed)
        self._costs.observe_drafting(batch, steps, seconds, overhead, fed, wide=wide, looks=looks)
        self.known.steps.observe(longest, waited)

    def observe_acceptance(
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float] = (),
        wanted: int = 0,
        random: bool = False,
    ) -> None:
        if self._budget.probing:
            self._budget.earn(verified, accepted * self._target_seconds_per_token())
        self._acceptance.observe(Observation(verified, accepted, confidences, wanted), random)

    def emitted(self, tokens: int, seconds: float) -> None:
        self._throughput.add(self._load, tokens, seconds)
        if not self.off and self._warm_up.lasts:
            plain = self._target_seconds_per_token()
            lost = seconds - self._read - tokens * plain
            self._warm_up.lose(lost, self._batch * plain)

    def refresh_forecast(self) -> None:
        found = self._forecast
        if found is None or self.learns_first or not any(self._limits):
            return
        due = self._forecast_age + 1 >= self._forecast_lasts(found)
        if due and self._forecast_load == self._load:
            self._refresh_forecast(self._clock(), self._limits, probed=False)
            self._forecast_age = -1  # new in the next step
        self._costs.prepare(self._batch, self._batch * (1 + self._lookahead))

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

    def _refresh_forecast(self, now: float, limits: Sequence[int], probed: bool) -> Forecast:
        """Return the present load's forecast; compute it if it is due or after a probe."""
        target_rate = foreseen = 1.0 / self._target_seconds_per_token()
        gain_before = self._forecast.gain if self._forecast else 0.0
        if self._forecast is not None and self._forecast_load == self._load:
            self._forecast_age += 1
            if not probed and self._forecast_age < self._forecast_lasts(self._forecast):
                return self._forecast
            foreseen = max(target_rate, *self._forecast.rates)
            self._num_forecasts += 1
        else:
            self._num_forecasts = min(self._num_forecasts + 1, _FORECASTS_AT_ONCE)
        self._forecast_load, self._forecast_age = self._load, 0
        keep = 0.5 ** ((now - self._learnt_at) / _MEMORY) if self.off else 1.0
        if self._acceptance.learn(keep):
            self._learnt_at = now
        random = [kind for kind, limit in zip(self._random, limits, strict=True) if limit]
        # A load that is new: the first forecast says what a second is worth to the second one.
        begins = self._acceptance.drafts > 0 and not self._throughput.knows(self._load)
        for _ in range(1 + begins):
            achieved = self._throughput.rate(self._load, foreseen)
            self._tokens_per_second = max(target_rate, achieved)
            rate = self._tokens_per_second
            load = self._batch, limits, random, rate, self._can_stop_early
            found = self._choice.forecast(*load, self._lookahead, self._buckets)
            foreseen = max(target_rate, *found.rates)
        self._forecast = found
        if probed:
            near = found.gain > _NEAR and self._budget.verified
            self._budget.finish_probe(now, news=near or found.gain > gain_before + _NEWS)
        return found

    def _forecast_lasts(self, found: Forecast) -> float:
        """Steps to the next forecast."""
        used = found.stddevs[: self._lookahead][-1:] or [0.0]
        if not self.off and used[0] > _SETTLED:
            return 1.0
        return min(self._num_forecasts / _FORECASTS_AT_ONCE, _FORECAST_EVERY)

    def _warm_up_gain(self, limits: Sequence[int]) -> float:
        """Return the gain if drafts were good during warm-up; otherwise 0."""
        if not self._warm_up.lasts:
            return 0.0
        prices = self._tokens_per_second, self._can_stop_early
        found = forecast(self._good, self._batch, limits, [False], *prices, buckets=self._buckets)
        return max(found.optimistic_rates) / found.alone

    def _choose(self, found: Forecast) -> int:
        """Return the best draft length.

        If the last one is about as good, keep it. If rounds can end early, return the largest that
        is about as good.
        """
        deeper = enumerate(found.stddevs[1:], 1)
        within = next((k for k, stddev in deeper if stddev > _UNCERTAIN), len(found.stddevs))
        last, rates = self._lookahead, found.optimistic_rates[:within]
        good = _GOOD_ENOUGH * max(rates)
        if self._can_stop_early:
            return max(k for k, rate in enumerate(rates, 1) if rate >= good)
        if 0 < last <= within and rates[last - 1] >= good:
            return last
        return rates.index(max(rates)) + 1

    def _plain_step_is_due(self, gain: float) -> bool:
        """Return True if a step without drafts could show that drafting does not pay."""
        stddev = self._costs.plain_stddev(self._batch, self._since_plain)
        apart = _PLAIN_EARLY if stddev > _UNKNOWN else _PLAIN_EVERY
        return self._since_plain >= apart and 2.0 * stddev > math.log(gain)

    def _catch_up_pays(self, share: float, pending: int) -> bool:
        """Return True if a request's catch-up pays at this gain over the target alone."""
        cost = self._costs.catch_up(pending)
        if not cost:  # as in most steps of most requests
            return True
        horizon = max(_HORIZON / self._batch, pending * self._target_seconds_per_token())
        return cost <= share * horizon

    def _familiar(self) -> int:
        """Return for how many requests the drafter's cost is known well enough."""
        count = self._batch
        while count > 1 and self._costs.drafter_stddev(count) > _UNCERTAIN:
            count //= 2
        return count

    def _maybe_probe(
        self, now: float, able: Sequence[int], limits: Sequence[int], pending: Sequence[int]
    ) -> LookaheadPlan | None:
        """Return drafts for a few requests if a probe is due and within its budget.

        The number of requests has the smallest loss per request; a single one if that is too much.
        """
        if self._budget.early(now):
            return None
        found = self._forecast
        length = min(self._choose(found), _LONGEST_PROBE) if found else _FIRST_PROBE
        sizes = {1, min(_PROBED, len(able))}
        if not self._warm_up.lasts:
            sizes.add(min(self._familiar(), len(able)))
        losses = {n: self._expected_loss(length, pending, able[:n]) for n in sizes}
        for count in (min(sizes, key=lambda n: losses[n] / n), 1):
            if self._budget.affords(losses[count], free=not self._acceptance.drafts):
                self._costs.loosen_drafter(_LOOSE * min(1.0, (now - self._learnt_at) / _MEMORY))
                self._budget.begin()
                lookahead = lookahead_of(able[:count], length, limits)
                return LookaheadPlan(lookahead, True, self._choice.plan(now, count))
        self._budget.defer(now, losses[1])
        return None

    def _expected_loss(self, length: int, pending: Sequence[int], chosen: Sequence[int]) -> float:
        """Seconds that a probe of these requests costs beyond what it is expected to earn."""
        count = len(chosen)
        rows = count * length
        if self._buckets:
            rows = self._batch * filled_up(length, self._buckets)
        cost = self._costs.more_rows(self._batch, rows)
        cost += sum(self._costs.catch_up(pending[i]) for i in chosen)
        if self._costs.knows_drafter:
            cost += self._costs.drafting(count, self.known.steps.expected(length))
        earned = 0.0
        if not self._warm_up.lasts:
            survival = self._acceptance.survival([self._random[i] for i in chosen])
            earned = count * float(survival[:, :length].sum(1).mean())
        return max(cost - earned * self._target_seconds_per_token(), _LEAST_LOSS * cost)

    def _target_seconds_per_token(self) -> float:
        """Seconds that the target alone takes for a token."""
        return self._costs.target(self._batch, self._batch) / self._batch
