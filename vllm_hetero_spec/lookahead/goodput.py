# SPDX-License-Identifier: Apache-2.0
"""Drafts as far as it raises tokens per second, and not at all where the target alone is faster.

A renewal process that earns tokens and costs seconds is run best by doing whatever earns more than
lambda tokens for each second it takes, lambda being the rate achieved (Dinkelbach). Three decisions
follow: how far to draft and whether at all (`plan`), whether one more drafter step is worth its
time (`continue_drafting`), and which proposed tokens are worth a row of the target (`trim`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_hetero_spec.lookahead.acceptance import StepsOfDraft
from vllm_hetero_spec.lookahead.controllers import Controller, Gauges, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.experience import Experience
from vllm_hetero_spec.lookahead.outlook import Outlook, Replay
from vllm_hetero_spec.lookahead.probes import ProbeBudget
from vllm_hetero_spec.lookahead.round import Round
from vllm_hetero_spec.lookahead.switch import Switch, Trial
from vllm_hetero_spec.lookahead.throughput import Throughput

# A lookahead is kept while it is this near to the best.
_GOOD_ENOUGH = 0.99
# Probes: requests, tokens of each at first and at most; more follow where one raises the gain so
# much, or where it is this near to worthwhile.
_PROBED, _FIRST_PROBE, _LONGEST_PROBE, _NEWS, _NEAR = 4, 2, 4, 0.02, 0.92
_LEAST_LOSS = 0.1  # of what a probe takes, whatever it is thought to earn
# A lookahead or a number of requests whose costs are less certain than this share has to be
# approached step by step.
_UNCERTAIN = 0.45
# While off, what is known of acceptance counts half after so many seconds, and the drafter's steps
# may have changed by this share.
_MEMORY, _LOOSE = 10.0, 0.5
# While on, a plain step now and then keeps the cost of the alternative known: after so many steps
# where it could change the decision, sooner where next to nothing is known.
_CONTROL, _EARLY_CONTROL, _UNKNOWN = 8, 2, 0.045
# Steps after which all lookaheads are foreseen anew; at once after a probe, a few times in the
# beginning and where the load is another, and while the cost of the one in use is less certain than
# this share.
_LOOK_EVERY, _LOOKS_AT_ONCE, _SETTLED = 8, 4, 0.06
# Seconds over which a request's catch-up must pay, or as long as it has been left alone; and the
# share of the time that it is granted where nothing is gained.
_HORIZON, _LEAST_SHARE = 2.0, 0.02
# Loads are told apart by their share of random requests: none, a quarter, a half and so on.
_SHARES = 4


@dataclass
class _Probe:
    """A probe under way: what was foreseen before it, and the seconds it has lost so far."""

    gain: float
    seconds: float = 0.0


class _Load(NamedTuple):
    """What steps are alike: requests of the batch, and how many quarters of them are random."""

    batch: int
    random: int


class Goodput(Controller):
    """The controller that maximises tokens per second.

    Args:
        costs: Calibrated where possible; corrected by what is observed.
        positions: Longest draft, in target tokens.
        stops: The drafter asks `continue_drafting` between its steps.
        clock: Seconds that never run back.
    """

    def __init__(
        self,
        costs: CostModel,
        positions: int,
        *,
        stops: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs, self._positions, self._stops, self._clock = costs, positions, stops, clock
        self._experience = Experience(positions)
        self._steps = StepsOfDraft()
        self._throughput = Throughput()
        self._budget = ProbeBudget(clock())
        self._probe: _Probe | None = None
        self._learnt = clock()
        self._outlook: Outlook | None = None
        self._switch, self._trial = Switch(), Trial()
        self._plain_ago = 0
        self._load, self._random = _Load(1, 0), [False]
        self._lookahead, self._worth = 0, 0.0
        self._round: Round | None = None  # as drafts go on; none in a probe, which goes all the way
        self._looks, self._looked_ago = 0, 0
        self._looked_at = _Load(0, 0)

    @property
    def regime(self) -> str:
        """What it does at present: measuring, drafting or target alone."""
        if self._outlook is None:
            return "measuring"
        return "target alone" if self._switch.off else "drafting"

    @property
    def off(self) -> bool:
        """Whether the target works alone, but for probes."""
        return self._switch.off

    # ------------------------------------------------------------------------------- decisions

    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
    ) -> LookaheadPlan:
        """How far to draft; see `Controller`."""
        now = self._clock()
        limits = [min(limit, self._positions) for limit in limits]
        self._random = list(random or [False] * len(limits))
        self._load = _Load(batch, round(_SHARES * sum(self._random) / max(len(limits), 1)))
        ended, self._probe, self._round = self._probe, None, None
        if ended is not None:
            self._budget.spend(ended.seconds)
        nothing = LookaheadPlan((0,) * len(limits))
        if not any(limits) or not self._costs.knows_target:
            return nothing
        pending = pending or [0] * len(limits)
        if not self._costs.knows_drafter:
            return self._maybe_probe(now, limits, pending) or nothing
        outlook = self._look(now, limits, ended)
        self._switch.turn(max(outlook.gain, self._promise(limits)), batch)
        if self._switch.off:
            return self._maybe_probe(now, limits, pending) or nothing
        if self._control_is_due(outlook.gain):
            self._plain_ago = 0
            return nothing
        self._plain_ago += 1
        self._lookahead = self._choose(outlook)
        share = max(outlook.gain - 1.0, _LEAST_SHARE)
        chosen = [i for i in self._able(limits, pending) if self._pays(share, pending[i])]
        return self._draft_for(chosen[: self._familiar()], self._lookahead, limits)

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Which requests draft on; see `Controller`."""
        return self._round.proceed(confidences) if self._round else [True] * len(confidences)

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many proposed tokens to verify; see `Controller`."""
        return self._round.trim(confidences) if self._round else [len(c) for c in confidences]

    # ------------------------------------------------------------------------------- observations

    def observe_step(self, batch: int, rows: int, seconds: float) -> None:
        """A target step took so long; see `Controller`."""
        if self._probe is not None:
            self._probe.seconds += self._costs.more_rows(batch, rows - batch)
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
    ) -> None:
        """A round of drafting took so long; see `Controller`."""
        if self._probe is not None:
            self._probe.seconds += seconds + overhead
        self._costs.observe_drafting(batch, steps, seconds, overhead, fed)
        self._steps.observe(longest, steps)

    def observe_acceptance(
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float] = (),
        wanted: int = 0,
        random: bool = False,
    ) -> None:
        """One request's draft was verified; see `Controller`."""
        if self._probe is not None:
            self._probe.seconds -= accepted * self._alone()
        self._experience.hear(verified, accepted, confidences, wanted, random)

    def emitted(self, tokens: int, seconds: float) -> None:
        """The step gave so many tokens; see `Controller`."""
        self._throughput.add(self._load, tokens, seconds)
        if not self._switch.off and not self._trial.over(self._experience.drafts):
            self._trial.charge(seconds - tokens * self._alone())

    def gauges(self) -> Gauges:
        """The present, for metrics."""
        batch, lookahead = self._load.batch, 0 if self._switch.off else self._lookahead
        known = self._costs.knows_target
        return Gauges(
            lookahead=lookahead,
            tokens_per_second=self._worth,
            gain=self._outlook.gain if self._outlook else 0.0,
            drafter_seconds=self._costs.drafter(batch) if self._costs.knows_drafter else 0.0,
            target_seconds=self._costs.target(batch, batch) if known else 0.0,
            acceptance=tuple(self._experience.rates(2 * sum(self._random) > len(self._random))),
        )

    # ------------------------------------------------------------------------------- inside

    def _look(self, now: float, limits: Sequence[int], probe: _Probe | None) -> Outlook:
        """Foresee all lookaheads at the present batch, where that is due: after a probe always."""
        load, random = self._load, [r for r, k in zip(self._random, limits, strict=True) if k]
        alone = 1.0 / self._alone()
        foreseen = alone
        if self._outlook is not None and self._looked_at == load:
            self._looked_ago += 1
            if probe is None and self._looked_ago < self._patience(self._outlook):
                return self._outlook
            foreseen = max(alone, *self._outlook.rates)
            self._looks += 1
        else:
            self._looks = min(self._looks + 1, _LOOKS_AT_ONCE)
        self._looked_at, self._looked_ago = load, 0
        if self._experience.learn(0.5 ** (self._idle(now) / _MEMORY) if self._switch.off else 1.0):
            self._learnt = now
        self._worth = max(alone, self._throughput.rate(load, foreseen))
        replay = Replay(self._costs, self._steps, self._experience, self._stops, random)
        self._outlook = replay.outlook(load.batch, limits, self._worth)
        if probe is not None:
            gain = self._outlook.gain
            self._budget.settle(now, news=gain > min(probe.gain + _NEWS, _NEAR))
        return self._outlook

    def _patience(self, outlook: Outlook) -> float:
        """Steps to the next look."""
        used = outlook.doubts[: self._lookahead][-1:] or [0.0]
        if not self._switch.off and used[0] > _SETTLED:
            return 1.0
        return min(self._looks / _LOOKS_AT_ONCE, _LOOK_EVERY)

    def _promise(self, limits: Sequence[int]) -> float:
        """The gain if drafts were good, for the time of the trial; 0 after it."""
        if self._trial.over(self._experience.drafts):
            return 0.0
        good = Replay(self._costs, self._steps, Experience(self._positions), self._stops, [False])
        outlook = good.outlook(self._load.batch, limits, self._worth)
        return max(outlook.hopeful) / outlook.alone

    def _choose(self, outlook: Outlook) -> int:
        """The best lookahead, or the last one where it is as good; as deep as is good if rounds
        are ended early anyway.
        """
        doubts = enumerate(outlook.doubts[1:], 1)
        within = next((k for k, doubt in doubts if doubt > _UNCERTAIN), len(outlook.doubts))
        last, rates = self._lookahead, outlook.hopeful[:within]
        if self._stops:
            return max(k for k, rate in enumerate(rates, 1) if rate >= _GOOD_ENOUGH * max(rates))
        if 0 < last <= within and rates[last - 1] >= _GOOD_ENOUGH * max(rates):
            return last
        return rates.index(max(rates)) + 1

    def _control_is_due(self, gain: float) -> bool:
        """Whether a step without drafts could show that drafting does not pay."""
        doubt = self._costs.plain_doubt(self._load.batch)
        apart = _EARLY_CONTROL if doubt > _UNKNOWN else _CONTROL
        return self._plain_ago >= apart and 2.0 * doubt > math.log(gain)

    def _pays(self, share: float, pending: int) -> bool:
        """Whether a request's catch-up is worth it at this gain over the target alone."""
        horizon = max(_HORIZON / self._load.batch, pending * self._alone())
        return self._costs.catch_up(pending) <= share * horizon

    def _maybe_probe(
        self, now: float, limits: Sequence[int], pending: Sequence[int]
    ) -> LookaheadPlan | None:
        """Drafts for a few requests, where their time has come."""
        if self._budget.early(now):
            return None
        length = _FIRST_PROBE
        if self._outlook is not None:
            length = min(self._choose(self._outlook), _LONGEST_PROBE)
        able = self._able(limits, pending)
        sizes = {1, min(_PROBED, len(able))}
        if self._trial.over(self._experience.drafts):
            sizes.add(min(self._familiar(), len(able)))
        losses = {n: self._foreseen_loss(length, pending, able[:n]) for n in sizes}
        for count in (min(sizes, key=lambda n: losses[n] / n), 1):
            if self._budget.affords(losses[count]):
                self._costs.loosen_drafter(_LOOSE * min(1.0, self._idle(now) / _MEMORY))
                self._probe = _Probe(self._outlook.gain if self._outlook else 0.0)
                return self._draft_for(able[:count], length, limits, probe=True)
        self._budget.defer(now, losses[1])
        return None

    def _foreseen_loss(self, length: int, pending: Sequence[int], chosen: Sequence[int]) -> float:
        """Seconds that a round for these requests is thought to cost beyond what it earns."""
        batch, count = self._load.batch, len(chosen)
        cost = self._costs.more_rows(batch, count * length)
        cost += sum(self._costs.catch_up(pending[i]) for i in chosen)
        if self._costs.knows_drafter:
            cost += self._costs.drafting(count, self._steps.expected(length))
        survival = self._experience.survival([self._random[i] for i in chosen])
        earned = count * float(survival[:, :length].sum(1).mean())
        if not self._trial.over(self._experience.drafts):
            earned = 0.0
        return max(cost - earned * self._alone(), _LEAST_LOSS * cost)

    def _able(self, limits: Sequence[int], pending: Sequence[int]) -> list[int]:
        """Requests that may be drafted for, those that the drafter knows best first."""
        return sorted((i for i, limit in enumerate(limits) if limit), key=lambda i: pending[i])

    def _familiar(self) -> int:
        """For how many requests the drafter's cost is known well enough to draft."""
        count = self._load.batch
        while count > 1 and self._costs.drafter_doubt(count) > _UNCERTAIN:
            count //= 2
        return count

    def _idle(self, now: float) -> float:
        """Seconds since drafts were last learnt from."""
        return now - self._learnt

    def _alone(self) -> float:
        """Seconds that the target alone takes for a token."""
        return self._costs.target(self._load.batch, self._load.batch) / self._load.batch

    def _draft_for(
        self, chosen: Sequence[int], length: int, limits: Sequence[int], *, probe: bool = False
    ) -> LookaheadPlan:
        lookahead = [0] * len(limits)
        for i in chosen:
            lookahead[i] = min(length, limits[i])
        if not probe:
            batch = self._load.batch
            self._round = Round(
                self._costs, self._steps, self._experience, self._worth,
                batch=batch, most=batch + sum(lookahead), random=self._random,
            )  # fmt: skip
        return LookaheadPlan(tuple(lookahead), probe)
