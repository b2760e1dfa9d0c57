# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's steps and the controller: what each step took and gave, and how far to draft next.

A step is seen from the proposer: from the end of one call to the start of the next the target
works, inside a call the drafter does. Steps with prompts in them, or behind a pause, teach nothing.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_hetero_spec.config import HeteroOptions
from vllm_hetero_spec.engine.drafter.draft_batch import Job
from vllm_hetero_spec.engine.drafter.model import DrafterModel
from vllm_hetero_spec.engine.drafter.request_limits import wished_lookahead
from vllm_hetero_spec.engine.drafter.token_choice import DraftRow
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.lookahead.controllers import ConfidenceStop, Controller, Fixed, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.goodput import Goodput

logger = logging.getLogger("vllm.hetero_spec")


def controller_of(options: HeteroOptions, costs: CostModel, *, stops: bool) -> Controller:
    """The controller that a user asked for.

    Args:
        options: The user's.
        costs: What is known of this machine.
        stops: Whether drafting asks between its steps whether to go on.
    """
    longest = options.num_speculative_tokens
    if options.controller == "fixed":
        return Fixed(longest)
    if options.controller == "confidence":
        return ConfidenceStop(options.confidence_threshold, longest)
    return Goodput(costs, longest, can_stop_early=stops)


class RoundMeter:
    """What one round of drafting takes, from when this is made to when it is read.

    Args:
        stats: The proposer's counters.
        model: The drafter.
    """

    def __init__(self, stats: DraftStats, model: DrafterModel) -> None:
        self._stats, self._model = stats, model
        self._before = self._counts()
        self._began = time.perf_counter()

    def read(self) -> "Outcome":
        """The round's outcome."""
        took = time.perf_counter() - self._began
        seconds, forwards, rows, fed = (
            now - before for now, before in zip(self._counts(), self._before, strict=True)
        )
        return Outcome(seconds, max(0.0, took - seconds), int(forwards), int(rows), int(fed))

    def _counts(self) -> tuple[float, int, int, int]:
        stats, model = self._stats, self._model
        return model.forward_seconds, model.forwards, stats.drafter_tokens, stats.catch_up_tokens


class Outcome(NamedTuple):
    """What a round of drafting took.

    seconds: in the drafter's forwards. overhead: seconds in everything else. forwards: how many
    there were, the one that caught up included. rows: tokens picked, over all requests. fed:
    context tokens that were caught up.
    """

    seconds: float
    overhead: float
    forwards: int
    rows: int
    fed: int


class _Draft(NamedTuple):
    """A draft on its way through the target: of all tokens proposed, those trimmed included."""

    confidences: list[float]
    wanted: int
    random: bool


class Pace:
    """One engine's pace.

    Args:
        controller: Who decides.
        stops: Whether the controller is asked between drafter steps.
    """

    def __init__(self, controller: Controller, stops: bool) -> None:
        self.controller = controller
        self.proceed = self._proceed if stops else None
        self._wishes: dict[str, int] = {}  # lookaheads that requests ask for
        self._drafts: dict[str, _Draft] = {}
        self._regime = ""
        self._began = self._ended = 0.0
        self._plan = LookaheadPlan(())
        self._req_ids: Sequence[str] = ()
        self._random: Sequence[bool] = ()
        self._own: dict[int, int] = {}  # batch indices of requests that decide for themselves
        self._stopped = False  # whether `proceed` ended the round's drafts

    def begin(self, runner: Any, scheduler_output: Any, sampled: Sequence[Sequence[int]]) -> None:
        """A step of the target has ended: learn from it."""
        now = time.perf_counter()
        self._listen(runner, scheduler_output.scheduled_new_reqs)
        drafted = scheduler_output.scheduled_spec_decode_tokens
        self._req_ids = list(runner.input_batch.req_ids)
        random = runner.input_batch.random_reqs
        self._random = [req_id in random for req_id in self._req_ids]
        for req_id, tokens in zip(self._req_ids, sampled, strict=True):
            draft = self._drafts.get(req_id)
            if draft is not None and tokens:
                # One that was cut to nothing teaches too: that such drafts are not worth making.
                verified = len(drafted.get(req_id, ()))
                self.controller.observe_acceptance(verified, len(tokens) - 1, *draft)
        self._drafts.clear()
        rows = scheduler_output.total_num_scheduled_tokens
        decoding = len(sampled) + sum(map(len, drafted.values()))
        if self._ended and rows == decoding and not scheduler_output.scheduled_new_reqs:
            self.controller.observe_step(len(sampled), rows, now - self._ended)
            self.controller.emitted(sum(map(len, sampled)), now - self._began)
        self._began = now

    def plan(
        self,
        sampled: Sequence[Sequence[int]],
        unread: Sequence[int],
        lookahead: int,
    ) -> list[int]:
        """Target tokens to draft for each request of the batch; what requests ask for goes first.

        Args:
            sampled: What each sampled; one that sampled nothing is still reading its prompt.
            unread: Context tokens that the drafter has yet to read of each.
            lookahead: The scheduler's limit.
        """
        limits = [lookahead if tokens else 0 for tokens in sampled]
        self._own = {}
        self._stopped = False
        if self._wishes:
            for index, req_id in enumerate(self._req_ids):
                wish = self._wishes.get(req_id)
                if wish is not None:
                    self._own[index] = min(wish, limits[index])
                    limits[index] = 0
        self._plan = self.controller.plan(len(sampled), limits, unread, self._random)
        self._say()
        lengths = list(self._plan.lookahead)
        for index, wish in self._own.items():
            lengths[index] = wish
        return lengths

    @property
    def reads_all(self) -> bool:
        """Whether requests that are not drafted for are to be caught up beside those that are."""
        if self._plan.probe:
            return False
        return any(self._plan.lookahead) or not self.controller.off

    def drafted(self, outcome: Outcome, jobs: Sequence[Job]) -> None:
        """A round of drafting has ended."""
        if outcome.forwards:
            self.controller.observe_draft(
                outcome.rows / outcome.forwards,
                outcome.forwards,
                outcome.seconds,
                overhead=outcome.overhead,
                fed=outcome.fed,
                longest=max((len(job.proposal) for job in jobs), default=0),
            )

    def trim(self, jobs: Sequence[Job]) -> None:
        """Cut the jobs' proposals to what is worth verifying."""
        told: list[Sequence[float]] = [()] * len(self._req_ids)
        for job in jobs:
            if job.confidences and job.index not in self._own:
                told[job.index] = job.confidences
                wanted = 0 if self._stopped else self._plan.lookahead[job.index]
                draft = _Draft(job.confidences, wanted, self._random[job.index])
                self._drafts[self._req_ids[job.index]] = draft
        lengths = self.controller.trim(told)
        for job in jobs:
            if told[job.index]:
                del job.proposal[lengths[job.index] :]

    def end(self) -> None:
        """The drafts are out, and the target's next step begins."""
        self._ended = time.perf_counter()

    def _listen(self, runner: Any, new: Sequence[Any]) -> None:
        """What new requests ask for themselves."""
        for request in new:
            wish = wished_lookahead(runner.requests[request.req_id])
            if wish is not None:
                self._wishes[request.req_id] = wish
        if self._wishes and new:
            live = runner.requests
            self._wishes = {req_id: w for req_id, w in self._wishes.items() if req_id in live}

    def _proceed(self, rows: Sequence[DraftRow]) -> bool:
        """Whether any request is worth another step of the drafter."""
        told: list[Sequence[float]] = [()] * len(self._req_ids)
        for row in rows:
            if row.index in self._own:
                return True
            told[row.index] = row.confidences
        worth = self.controller.continue_drafting(told)
        self._stopped = not any(worth[row.index] for row in rows)
        return not self._stopped

    def _say(self) -> None:
        regime = self.controller.regime
        if regime == self._regime:
            return
        if self._regime:
            found = self.controller.gauges()
            logger.info(
                "Speculation: %s (batch %d; foreseen gain %.2f; drafter step %.2f ms, target step "
                "%.2f ms, acceptance %s).",
                regime,
                len(self._plan.lookahead),
                found.gain,
                1e3 * found.drafter_seconds,
                1e3 * found.target_seconds,
                " ".join(f"{rate:.2f}" for rate in found.acceptance[:4]),
            )
        self._regime = regime
