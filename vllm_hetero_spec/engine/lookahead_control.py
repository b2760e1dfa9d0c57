# SPDX-License-Identifier: Apache-2.0
"""Adapter between steps of the target and the controller.

It reports what each step cost and what was accepted. Steps with prefill, and requests that set
their own lookahead, are not learned from. Observations are noted, and learned while the device
drafts.

A plan has this order: limits of requests, first tokens first; the controller's draft lengths; an
optional `PlanPolicy`; the draft length of the step. With asynchronous scheduling, that length is
fixed in advance. Longer drafts are requested for later steps, and shorter ones are padded.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.tasks import DraftTiming
from vllm_hetero_spec.engine.request_limits import LONG_PREFILL, request_limits
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.engine.waiting_plan import WaitingPlan
from vllm_hetero_spec.lookahead.controllers import Controller, LookaheadPlan
from vllm_hetero_spec.lookahead.estimates import OutputLengths

logger = logging.getLogger("vllm.hetero_spec")


class PendingDraft(NamedTuple):
    """A draft under verification, with all proposed tokens, including trimmed ones.

    Attributes:
        wanted: Planned number of tokens; 0 if the round was ended early.
        chain: For a tree, the leading tokens of the drafter's own chain that are verified.
    """

    confidences: Sequence[float]
    wanted: int
    random: bool
    chain: Sequence[int] | None = None

    def accepted(self, request: RequestView) -> tuple[int, int]:
        """Verified and accepted tokens of the chain, given its request after that step."""
        if self.chain is None:
            return request.num_drafted, request.num_accepted
        chain = self.chain[: request.num_drafted]
        pairs = enumerate(zip(chain, request.new_tokens, strict=False))
        differs = (place for place, (drafted, emitted) in pairs if drafted != emitted)
        return len(chain), next(differs, min(len(chain), len(request.new_tokens)))


class PendingDrafts(dict[str, PendingDraft]):
    """The drafts under verification, by request."""

    def take(self, step: StepView) -> list[tuple[PendingDraft, RequestView]]:
        """Remove and return the drafts that a step has verified, with their requests."""
        found = []
        for request in step.requests if self else ():
            draft = self.pop(request.req_id, None)
            if draft is not None and request.new_tokens:
                found.append((draft, request))
        # With pipeline stages, drafts of live requests may be verified in later steps.
        for req_id in self.keys() - step.live:
            del self[req_id]
        return found


class StepPlan(NamedTuple):
    """Plan for the requests of a step.

    Attributes:
        lookahead: Target tokens to draft for each request, in the batch's order.
        reads: True if the drafter reads the new tokens of a request. It drafts for no other.
        num_waiting: Requests that are neither read nor drafted for, so that first tokens come
            first.
        paths: Drafter paths of each draft; 0 if all drafts are chains.
        rows: Rows of the target for the largest draft, if these are more than its depth.
        copied: Indices of requests whose drafts do not come from the drafter.
    """

    lookahead: list[int]
    reads: list[bool]
    num_waiting: int = 0
    paths: int = 0
    rows: int = 0
    copied: Collection[int] = ()


class PlanPolicy:
    """Optional policy between the controller and the drafts; this base class changes nothing."""

    @property
    def is_idle(self) -> bool:
        """True if the policy needs no steps while the controller plans no drafts."""
        return True

    def observe(self, step: StepView) -> int:
        """Learn from a step, before the next one is planned.

        Return the number of context tokens that the target read again for its drafts.
        """
        return 0

    def plan(self, plan: StepPlan, chosen: LookaheadPlan) -> StepPlan:
        """Return the plan, changed. `chosen` is the controller's; `reads` is filled in later."""
        return plan

    def drafted(self, timing: DraftTiming) -> None:
        """Learn from a round's timing."""

    def trim(self, drafts: Sequence[Draft], control: "LookaheadControl") -> list[Draft]:
        """Return the drafts without the tokens that are not worth verifying."""
        return control.trim_chains(drafts)


class LookaheadControl:
    """The draft lengths of one engine.

    Args:
        controller: May be replaced between steps.
        can_stop_early: True if the controller is consulted between drafter steps.
        policy: At most one; None without optional features.

    Attributes:
        requested_length: Draft length of the next scheduled steps, one of `StepView.buckets`.
        prepared: Seconds that the current round took to read new tokens.
        current: The controller's plan for the current step.
        waiting: Its plan for a later step, if any.
        pending: Drafts in verification.
    """

    def __init__(
        self, controller: Controller, *, can_stop_early: bool, policy: PlanPolicy | None = None
    ) -> None:
        self.requested_length = 0
        self.prepared = 0.0
        self.controller, self.can_stop_early = controller, can_stop_early
        self.current, self.waiting = LookaheadPlan(()), WaitingPlan()
        self.pending = PendingDrafts()
        self._policy, self._outputs = policy or PlanPolicy(), OutputLengths()
        self._usual: int | None = None  # longest draft of the controller's newest plan
        self._notes: list[Callable[[], None]] = []  # not learned yet
        self._own: dict[str, int] = {}  # lookaheads that requests of this step set
        self._index_of: Mapping[str, int] = {}
        self._random: Sequence[bool] = ()
        self._stopped = False  # True if `continue_drafting` ended the round
        self._nobody = False  # True if the newest plan has no drafts, and no request sets any
        self._regime = ""

    def observe(self, step: StepView) -> None:
        """Note what a step of the target cost and what it accepted."""
        controller = self.controller
        self._index_of = step.index_of
        self._random = [request.params.random for request in step.requests]
        for draft, request in self.pending.take(step):
            # A draft that was cut to nothing counts, too: such drafts are not worth making.
            verified, accepted = draft.accepted(request)
            found = verified, accepted, draft.confidences, draft.wanted, draft.random
            self._notes.append(partial(controller.observe_acceptance, *found))
        again = self._policy.observe(step)
        timed = step.target_seconds if step.decodes_only else None
        if timed is not None:
            took = len(step.requests), step.num_rows, timed, again
            self._notes.append(partial(controller.observe_step, *took))
        if controller.learns_first:
            self.learn()
        if not step.decodes_only:
            controller.emitted(step.num_new_tokens, None)
        elif timed is not None and step.step_seconds is not None:  # None after a pause
            controller.emitted(step.num_new_tokens, step.step_seconds)

    def learn(self) -> None:
        """Learn from what was noted, and update the forecast of the next step."""
        notes, self._notes = self._notes, []
        for note in notes:
            note()
        self.controller.refresh_forecast()

    def plan(self, step: StepView, unread: Sequence[int]) -> StepPlan:
        """Choose draft lengths. `unread` counts the context tokens that are not read yet."""
        limits, self._own, num_waiting = request_limits(step, unread)
        self._stopped = False
        self.current = self.waiting.take(step, limits) or self._planned(step, limits, unread)
        self._say(len(limits))
        lookahead = list(self.current.lookahead)
        for req_id, asked in self._own.items():
            lookahead[step.index_of[req_id]] = asked
        plan = self._policy.plan(StepPlan(lookahead, [], num_waiting), self.current)
        if step.buckets:
            plan = plan._replace(lookahead=self._within(step, plan))
        # If others are drafted for, short contexts are read, too. A long one is read only if the
        # request is drafted for, because the device would read it in the target's time.
        beside = not self.current.probe and any(self.current.lookahead) and any(plan.lookahead)
        reads = [
            wanted > 0 or (beside and limit > 0 and left <= LONG_PREFILL)
            for wanted, limit, left in zip(plan.lookahead, limits, unread, strict=True)
        ]
        ask = any(request.params.lookahead for request in step.requests)
        self._nobody = not any(plan.lookahead) and not plan.copied and not ask
        return plan._replace(reads=reads)

    def _planned(
        self, step: StepView, limits: Sequence[int], unread: Sequence[int]
    ) -> LookaheadPlan:
        emitted = [request.num_output_tokens for request in step.requests]
        lengths = self._outputs.expected(emitted, step.room)
        load = unread, self._random, step.buckets, lengths
        plan = self.controller.plan(len(limits), limits, *load)
        if any(limits) and not plan.probe:
            self._usual = max(plan.lookahead)
        return plan

    def _within(self, step: StepView, plan: StepPlan) -> list[int]:
        """Limit draft lengths to this step's, and request the rest for later steps.

        A requested length takes some steps to arrive. So the usual length is requested in advance
        if requests will be drafted for soon, after their first token.
        """
        lookahead = plan.lookahead
        if not step.lookahead and any(self.current.lookahead):
            self.waiting.keep(step.index_of, self.current)
        longest = max([self.waiting.longest, *lookahead])
        soon = any(each.begins and each.params.lookahead != 0 for each in step.requests)
        if soon and not self.controller.off:
            longest = max(longest, step.buckets[-1] if self._usual is None else self._usual)
        longest = max(longest, min(plan.rows, step.buckets[-1]))
        if longest or any(step.going_on):  # otherwise no request can need it
            self.requested_length = next(bucket for bucket in step.buckets if bucket >= longest)
        planned = tuple(min(wanted, step.lookahead) for wanted in self.current.lookahead)
        self.current = self.current._replace(lookahead=planned)
        return [min(wanted, step.lookahead) for wanted in lookahead]

    def keep_plan(self) -> None:
        """Keep the current plan for a later step."""
        self.waiting.keep(self._index_of, self.current)

    @property
    def is_idle(self) -> bool:
        """True if the controller and the policy are idle and no request sets its own lookahead."""
        return self._nobody and self.controller.is_idle and self._policy.is_idle

    def continue_drafting(self, confidences: Mapping[str, Sequence[float]]) -> bool:
        if not self._own.keys().isdisjoint(confidences):
            return True
        worth = self.controller.continue_drafting(self._in_order(confidences))
        self._stopped = not any(worth[self._index_of[req_id]] for req_id in confidences)
        return not self._stopped

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        self._policy.drafted(timing)
        self.note_timing(timing, max((len(draft.tokens) for draft in drafts), default=0))

    def note_timing(self, timing: DraftTiming, longest: int) -> None:
        """Note what a round cost. `longest` is the target tokens of its longest draft."""
        if timing.forwards:
            learn = partial(
                self.controller.observe_draft,
                timing.picked / timing.forwards,
                timing.forwards,
                timing.seconds,
                overhead=timing.overhead + self.prepared,
                fed=timing.caught_up,
                longest=longest,
                exposed=timing.exposed,
                wide=timing.trees > 0,
            )
            self._notes.append(learn)

    def trim(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Cut from the drafts what is not worth verifying."""
        return self._policy.trim(drafts, self)

    def trim_chains(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Trim chains by the controller. Requests with their own lookahead keep their drafts."""
        judged = {
            draft.req_id: draft.confidences
            for draft in drafts
            if draft.confidences and draft.req_id not in self._own
        }
        if not judged:
            return list(drafts)
        for draft in drafts:
            self.expect(draft)
        lengths = self.controller.trim(self._in_order(judged))
        return [
            draft.first(lengths[self._index_of[draft.req_id]]) if draft.req_id in judged else draft
            for draft in drafts
        ]

    def expect(self, draft: Draft, chain: Sequence[int] | None = None) -> None:
        """Learn from this draft once it is verified. `chain` is as in `PendingDraft`."""
        if draft.confidences and draft.req_id not in self._own:
            index = self._index_of[draft.req_id]
            wanted = 0 if self._stopped else self.current.lookahead[index]
            pending = PendingDraft(draft.confidences, wanted, self._random[index], chain)
            self.pending[draft.req_id] = pending

    def _in_order(self, confidences: Mapping[str, Sequence[float]]) -> list[Sequence[float]]:
        """One list for each request of the batch, as a `Controller` receives them."""
        ordered: list[Sequence[float]] = [()] * len(self._index_of)
        for req_id, request in confidences.items():
            ordered[self._index_of[req_id]] = request
        return ordered

    def _say(self, batch: int) -> None:
        regime = self.controller.regime
        if regime == self._regime:
            return
        if self._regime:
            gauges = self.controller.gauges()
            logger.info(
                "Speculation: %s (batch %d; predicted speedup %.2f; drafter step %.2f ms, target "
                "step %.2f ms, acceptance %s).",
                regime,
                batch,
                gauges.gain,
                1e3 * gauges.drafter_seconds,
                1e3 * gauges.target_seconds,
                " ".join(f"{rate:.2f}" for rate in gauges.acceptance[:4]),
            )
        self._regime = regime
