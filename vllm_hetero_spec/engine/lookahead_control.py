# SPDX-License-Identifier: Apache-2.0
"""Between the target's steps and the controller: what each step took and gave, how far to draft.

Steps with prompts in them teach nothing. A request that asks for a lookahead of its own has it, and
teaches nothing either. Knows neither where drafts come from nor which model runner asks.

First tokens go first: while any request of the batch waits for its own, one that has just sampled
its first is not drafted for; and until a step later the drafter reads no long context of a request
that has only begun.

What a step teaches is noted, and learnt before its drafts are waited for: a device makes them then.

With asynchronous scheduling, a plan for longer drafts than the present step may have waits for a
step that may have them (`requested_length`). Shorter drafts are padded until then.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.tasks import DraftTiming
from vllm_hetero_spec.engine.seam.step_view import StepView
from vllm_hetero_spec.engine.trees.control import TreeControl
from vllm_hetero_spec.engine.verifying import PendingDraft
from vllm_hetero_spec.lookahead.controllers import Controller, LookaheadPlan
from vllm_hetero_spec.trees.policy import Trees
from vllm_hetero_spec.trees.race_tree import Chances
from vllm_hetero_spec.trees.values import RankValues, TreeValues

logger = logging.getLogger("vllm.hetero_spec")

_LONG = 128  # unread tokens: fewer take the drafter no longer than a step of the target, about
# Target tokens without a draft that a request gives for the first tokens of others, at most: where
# prompts never end, every request would wait for ever.
_PATIENCE = 4
_LAG = 8  # steps within which a lookahead that was asked for has come, or will not


class StepPlan(NamedTuple):
    """What to do for the requests of a step.

    Attributes:
        lookahead: Target tokens to draft for each, in the batch's order.
        reads: Whether the drafter reads what it has not read of each; it drafts for no other.
        num_waiting: Requests that go on, and are neither read nor drafted for so that first
            tokens go first.
        paths: How many the drafter follows for drafts that may be trees; 0 where all are chains.
    """

    lookahead: list[int]
    reads: list[bool]
    num_waiting: int = 0
    paths: int = 0


class LookaheadControl:
    """How far one engine drafts.

    Args:
        controller: Who decides; may be exchanged between steps.
        can_stop_early: Whether the controller is asked between drafter steps.
        values: Of what is in trees.

    Attributes:
        requested_length: Draft length of the next scheduled steps, one of `StepView.buckets`.
        prepared: Seconds that it took to bring the texts of the present round up to date.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        can_stop_early: bool,
        values: TreeValues | RankValues | None = None,
    ) -> None:
        self.requested_length = 0
        self.prepared = 0.0
        self._trees = TreeControl(values or TreeValues.unknown())
        self._waiting: tuple[dict[str, int], LookaheadPlan] | None = None  # a plan, by request
        self._waited = 0  # steps
        self._usual: int | None = None  # the longest of the controller's newest plan
        self.controller, self.can_stop_early = controller, can_stop_early
        self._verifying: dict[str, PendingDraft] = {}
        self._notes: list[Callable[[], None]] = []  # what is still to be learnt
        self._plan = LookaheadPlan(())
        self._own: dict[str, int] = {}  # what requests of this step ask for themselves
        self._index_of: Mapping[str, int] = {}
        self._random: Sequence[bool] = ()
        self._stopped = False  # whether `continue_drafting` ended the round's drafts
        self._nobody = False  # whether in the newest plan no request is drafted for, or asks for it
        self._regime = ""

    def observe(self, step: StepView) -> None:
        """A step of the target has ended: note what it took, and what was accepted."""
        controller = self.controller
        self._index_of = step.index_of
        self._random = [request.params.random for request in step.requests]
        for request in step.requests if self._verifying else ():
            draft = self._verifying.pop(request.req_id, None)
            if draft is not None and request.new_tokens:
                # One that was cut to nothing teaches too: that such drafts are not worth making.
                verified, accepted = draft.accepted(request)
                found = verified, accepted, draft.confidences, draft.wanted, draft.random
                self._notes.append(partial(controller.observe_acceptance, *found))
        for req_id in self._verifying.keys() - step.live:  # others' come, in pipeline stages
            del self._verifying[req_id]
        again = self._trees.observe(step)
        timed = step.target_seconds if step.decodes_only else None
        if timed is not None:
            took = len(step.requests), step.num_rows, timed, again
            self._notes.append(partial(controller.observe_step, *took))
        if controller.learns_first:
            self.learn()
        if timed is not None and step.step_seconds is not None:  # not behind a pause
            controller.emitted(step.num_new_tokens, step.step_seconds)

    def learn(self) -> None:
        """Learn what has been noted, and foresee the next step."""
        notes, self._notes = self._notes, []
        for note in notes:
            note()
        self.controller.refresh_forecast()

    def plan(self, step: StepView, unread: Sequence[int]) -> StepPlan:
        """How far to draft for each request; one that is still reading its prompt is left alone.

        Args:
            step: The step.
            unread: Context tokens that the drafter has yet to read of each request.
        """
        begins = [request.begins for request in step.requests]
        first_tokens = any(begins)
        on_their_way = first_tokens and any(
            begun and not request.new_tokens
            for request, begun in zip(step.requests, begins, strict=True)
        )
        longest = max(step.buckets, default=step.lookahead)
        self._stopped, self._own, limits, num_waiting = False, {}, [], 0
        every = zip(step.requests, step.going_on, begins, unread, strict=True)
        for request, goes_on, begun, left in every:
            limit, asked = longest if goes_on else 0, request.params.lookahead
            waits = first_tokens and request.num_output_tokens <= _PATIENCE and left > _LONG
            if limit and (waits or (begun and on_their_way)):
                limit, num_waiting = 0, num_waiting + 1
            if asked is not None:
                self._own[request.req_id] = min(asked, limit, step.longest or limit)
                limit = 0
            limits.append(limit)
        room = step.trees is not None and step.trees.branches > 0
        if self.controller.branches is not None:
            self.controller.branches.room = room
        self._plan = self._planned(step, limits, unread)
        self._say(len(limits))
        lookahead = list(self._plan.lookahead)
        for req_id, asked in self._own.items():
            lookahead[step.index_of[req_id]] = asked
        trees = self._plan.trees if room else Trees()
        if step.buckets:
            soon = any(each.begins and each.params.lookahead != 0 for each in step.requests)
            verified = trees.paths > 0 and not (trees.looks or self._plan.probe)
            lookahead = self._within(step, lookahead, soon=soon, trees=verified)
        # Beside drafts, short contexts are caught up; a long one is read for a draft of its own. A
        # device would read what nobody waits for in the target's time.
        beside = not self._plan.probe and any(self._plan.lookahead)
        reads = [
            wanted > 0 or (beside and limit > 0 and left <= _LONG)
            for wanted, limit, left in zip(lookahead, limits, unread, strict=True)
        ]
        if step.trees is not None:
            self._trees.begin(step)
        ask = any(request.params.lookahead for request in step.requests)
        self._nobody = not any(lookahead) and not ask
        return StepPlan(lookahead, reads, num_waiting, trees.paths)

    def _planned(
        self, step: StepView, limits: Sequence[int], unread: Sequence[int]
    ) -> LookaheadPlan:
        """The plan that was waiting for this step, or else the controller's."""
        if self._waiting is not None:
            wanted, waiting = self._waiting
            same = waiting.probe or wanted.keys() == step.index_of.keys()
            if same and step.lookahead < max(wanted.values()) and self._waited < _LAG:
                self._waited += 1
                return LookaheadPlan((0,) * len(limits))
            self._waiting = None
            if same and step.lookahead:
                lookahead = [wanted.get(req_id, 0) for req_id in step.index_of]
                return waiting._replace(lookahead=tuple(map(min, lookahead, limits)))
        plan = self.controller.plan(len(limits), limits, unread, self._random, step.buckets)
        if any(limits) and not plan.probe:
            self._usual = max(plan.lookahead)
        return plan

    def _keep_plan(self, requests: Iterable[str]) -> None:
        """Have the present plan, for these requests, wait for a step to come."""
        wanted = dict(zip(requests, self._plan.lookahead, strict=True))
        self._waiting, self._waited = (wanted, self._plan), 0

    def _within(
        self, step: StepView, lookahead: list[int], *, soon: bool, trees: bool
    ) -> list[int]:
        """What of a plan can be had in this step; the rest is asked for, rows of trees too.

        What is asked for takes some steps to come: requests that will be drafted for `soon`, behind
        their first token, have what is usual asked for already.
        """
        if not step.lookahead and any(self._plan.lookahead):
            self._keep_plan(step.index_of)
        waiting = self._waiting[0].values() if self._waiting else ()
        longest = max([0, *lookahead, *waiting])
        if soon and not self.controller.off:
            usual = step.buckets[-1] if self._usual is None else self._usual
            longest = max(longest, usual)
        if trees and longest:
            longest = max(longest, min(self._trees.rows, step.buckets[-1]))
        if longest or any(step.going_on):  # else nobody is there who could want anything
            self.requested_length = next(bucket for bucket in step.buckets if bucket >= longest)
        planned = tuple(min(wanted, step.lookahead) for wanted in self._plan.lookahead)
        self._plan = self._plan._replace(lookahead=planned)
        return [min(wanted, step.lookahead) for wanted in lookahead]

    @property
    def is_idle(self) -> bool:
        """Whether the controller is, and no request asks for drafts of its own."""
        return self._nobody and self.controller.is_idle

    def continue_drafting(self, confidences: Mapping[str, Sequence[float]]) -> bool:
        """Whether any request is worth another step of the drafter.

        Args:
            confidences: Of the drafter tokens picked so far, of each request still drafted.
        """
        if not self._own.keys().isdisjoint(confidences):
            return True
        worth = self.controller.continue_drafting(self._in_order(confidences))
        self._stopped = not any(worth[self._index_of[req_id]] for req_id in confidences)
        return not self._stopped

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        """A round of drafting has ended."""
        if timing.trees and self.controller.branches is not None:
            self.controller.branches.found(timing.trees, timing.tree_seconds)
        self._observe(timing, max((len(draft.tokens) for draft in drafts), default=0))

    def _observe(self, timing: DraftTiming, longest: int) -> None:
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

    @property
    def side_tokens_accepted(self) -> int:
        """Accepted tokens of trees that were not of the drafter's own chain."""
        return self._trees.side_tokens_accepted

    @property
    def race_chances(self) -> Chances:
        """See `Control`."""
        return self._trees.race_chances

    def trim(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts without what is not worth verifying, and trees laid out."""
        growing = [draft for draft in drafts if draft.explored is not None]
        if not growing:
            return self._trimmed(drafts)
        if self.controller.branches is not None:
            told = [draft for draft in growing if draft.req_id not in self._own]
            self._trees.record_branch_stats(told, self.controller.branches)
        if self._plan.probe or self._plan.trees.looks:  # chains cost less
            growing = [draft for draft in growing if draft.req_id in self._own]
        grown = {draft.req_id for draft in growing}
        chains = self._trimmed([draft for draft in drafts if draft.req_id not in grown])
        self._trees.update_from(draft for draft in chains if draft.explored is not None)
        if not growing:
            return chains
        rows = len(self._index_of) + sum(len(draft.tokens) for draft in chains)
        free = [draft.req_id in self._own for draft in growing]
        trees = self._trees.trim(growing, free, rows, self.controller)
        for chain, tree in zip(growing, trees, strict=True):
            if chain.confidences and chain.req_id not in self._own:
                along = self._noted(chain)._replace(chain=tree.common(chain.tokens))
                self._verifying[chain.req_id] = along
        return chains + trees

    def _trimmed(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Chains."""
        judged = {
            draft.req_id: draft.confidences
            for draft in drafts
            if draft.confidences and draft.req_id not in self._own
        }
        if not judged:
            return list(drafts)
        for draft in drafts:
            if draft.req_id in judged:
                self._verifying[draft.req_id] = self._noted(draft)
        lengths = self.controller.trim(self._in_order(judged))
        return [
            draft.first(lengths[self._index_of[draft.req_id]]) if draft.req_id in judged else draft
            for draft in drafts
        ]

    def _noted(self, draft: Draft) -> PendingDraft:
        index = self._index_of[draft.req_id]
        wanted = 0 if self._stopped else self._plan.lookahead[index]
        return PendingDraft(draft.confidences, wanted, self._random[index])

    def _in_order(self, confidences: Mapping[str, Sequence[float]]) -> list[Sequence[float]]:
        """One list for each request of the batch, as controllers have them."""
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
                "Speculation: %s (batch %d; foreseen gain %.2f; drafter step %.2f ms, target step "
                "%.2f ms, acceptance %s).",
                regime,
                batch,
                gauges.gain,
                1e3 * gauges.drafter_seconds,
                1e3 * gauges.target_seconds,
                " ".join(f"{rate:.2f}" for rate in gauges.acceptance[:4]),
            )
        self._regime = regime
