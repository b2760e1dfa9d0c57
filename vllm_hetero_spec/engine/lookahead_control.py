# SPDX-License-Identifier: Apache-2.0
"""Adapter between steps of the target and the controller.

It reports what each step cost and what was accepted, and gets draft lengths from the controller.
Steps with prefill, and requests that set their own lookahead, are not learned from. It is
independent of the source of drafts and of the model runner.

First tokens have priority. While a request waits for its first token, a request that has just
sampled its own is not drafted for. Until a step later, the drafter does not prefill long contexts
of new requests.

Observations are noted, and learned while the device drafts.

With asynchronous scheduling, the draft length of a step is fixed before its drafts are made. Longer
drafts are requested for later steps (`requested_length`), and shorter ones are padded.
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
from vllm_hetero_spec.lookahead.controllers import Controller, LookaheadPlan, Trees
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics
from vllm_hetero_spec.trees.race_tree import Chances
from vllm_hetero_spec.trees.values import RankValues, TreeValues

logger = logging.getLogger("vllm.hetero_spec")

_LONG = 128  # unread tokens; a shorter drafter prefill costs about one target step
# Output tokens; until then, a request with a long unread context waits while others wait for their
# first tokens. Without a limit, a stream of prompts would make it wait forever.
_PATIENCE = 4
_LAG = 8  # steps; a requested draft length that has not come by then is given up


class StepPlan(NamedTuple):
    """What to do for the requests of a step.

    Attributes:
        lookahead: Target tokens to draft for each request, in the batch's order.
        reads: True if the drafter reads the new tokens of a request. It drafts for no other.
        num_waiting: Requests that are neither read nor drafted for, so that first tokens come
            first.
        paths: Drafter paths of each tree; 0 if all drafts are chains.
    """

    lookahead: list[int]
    reads: list[bool]
    num_waiting: int = 0
    paths: int = 0


class LookaheadControl:
    """The draft lengths of one engine.

    Args:
        controller: May be replaced between steps.
        can_stop_early: True if the controller is consulted between drafter steps.

    Attributes:
        requested_length: Draft length of the next scheduled steps, one of `StepView.buckets`.
        prepared: Seconds that the current round took to read new tokens.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        can_stop_early: bool,
        values: TreeValues | RankValues | None = None,
        branches: BranchStatistics | None = None,
    ) -> None:
        self.requested_length = 0
        self.prepared = 0.0
        self._trees = TreeControl(values or TreeValues.unknown(), branches)
        self._branches = branches
        self._waiting: tuple[dict[str, int], LookaheadPlan] | None = None  # wanted by request
        self._waited = 0  # steps
        self._usual: int | None = None  # longest draft of the controller's newest plan
        self.controller, self.can_stop_early = controller, can_stop_early
        self._verifying: dict[str, PendingDraft] = {}
        self._notes: list[Callable[[], None]] = []  # not learned yet
        self._plan = LookaheadPlan(())
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
        for request in step.requests if self._verifying else ():
            draft = self._verifying.pop(request.req_id, None)
            if draft is not None and request.new_tokens:
                # A draft that was cut to nothing counts, too: such drafts are not worth making.
                verified, accepted = draft.accepted(request)
                found = verified, accepted, draft.confidences, draft.wanted, draft.random
                self._notes.append(partial(controller.observe_acceptance, *found))
        # With pipeline stages, drafts of live requests may be verified in later steps.
        for req_id in self._verifying.keys() - step.live:
            del self._verifying[req_id]
        again = self._trees.observe(step)
        timed = step.target_seconds if step.decodes_only else None
        if timed is not None:
            took = len(step.requests), step.num_rows, timed, again
            self._notes.append(partial(controller.observe_step, *took))
        if controller.learns_first:
            self.learn()
        if timed is not None and step.step_seconds is not None:  # None after a pause
            controller.emitted(step.num_new_tokens, step.step_seconds)

    def learn(self) -> None:
        """Learn from what was noted, and update the forecast of the next step."""
        notes, self._notes = self._notes, []
        for note in notes:
            note()
        self.controller.refresh_forecast()

    def plan(self, step: StepView, unread: Sequence[int]) -> StepPlan:
        """Choose draft lengths. `unread` counts the context tokens that are not read yet."""
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
        if self._branches is not None:
            self._branches.room = room
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
        # If others are drafted for, short contexts are read, too. A long one is read only if the
        # request is drafted for, because the device would read it in the target's time.
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
        """The plan that has waited for this step. Otherwise a new one of the controller."""
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
        """Keep the current plan of these requests for a later step."""
        wanted = dict(zip(requests, self._plan.lookahead, strict=True))
        self._waiting, self._waited = (wanted, self._plan), 0

    def _within(
        self, step: StepView, lookahead: list[int], *, soon: bool, trees: bool
    ) -> list[int]:
        """Limit the plan to this step's draft length, and request the rest for later steps.

        A requested length takes some steps to arrive. So the usual length is requested in advance
        if requests will be drafted for `soon`, after their first token. For trees, the length
        counts rows.
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
        if longest or any(step.going_on):  # otherwise no request can need it
            self.requested_length = next(bucket for bucket in step.buckets if bucket >= longest)
        planned = tuple(min(wanted, step.lookahead) for wanted in self._plan.lookahead)
        self._plan = self._plan._replace(lookahead=planned)
        return [min(wanted, step.lookahead) for wanted in lookahead]

    @property
    def is_idle(self) -> bool:
        """True if the controller is idle and no request sets its own lookahead."""
        return self._nobody and self.controller.is_idle

    def continue_drafting(self, confidences: Mapping[str, Sequence[float]]) -> bool:
        if not self._own.keys().isdisjoint(confidences):
            return True
        worth = self.controller.continue_drafting(self._in_order(confidences))
        self._stopped = not any(worth[self._index_of[req_id]] for req_id in confidences)
        return not self._stopped

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        if timing.trees and self._branches is not None:
            self._branches.found(timing.trees, timing.tree_seconds)
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
        """Accepted tokens of trees that were not on the drafter's own chain."""
        return self._trees.side_tokens_accepted

    @property
    def race_chances(self) -> Chances:
        return self._trees.race_chances

    def trim(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Cut from the drafts what is not worth verifying, and lay out trees."""
        growing = [draft for draft in drafts if draft.explored is not None]
        if not growing:
            return self._trimmed(drafts)
        if self._branches is not None:
            told = [draft for draft in growing if draft.req_id not in self._own]
            self._trees.record_branch_stats(told, self._branches)
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
        """`trim` for chains."""
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
