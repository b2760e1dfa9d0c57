# SPDX-License-Identifier: Apache-2.0
"""The controller and drafts that are made ahead, in a process of their own.

What the target waits for is what drafting costs: a look-up in every step, and where a draft was not
foreseen, as much of the drafter's time as such a draft is worth, at the controller's own prices.
That a draft was not there is learnt like a drafter that has nothing to propose: in what is
expected of the next drafts it counts with those that were. What was waited for is learnt by itself
as well (`lookahead/late_drafts.py`), as it tends to bring less than others.

A probe's drafts are made ahead as well, so that nothing is waited for: the plan is kept for a step
or two, in which the drafter catches up. Only one that is not done by then is waited for.
"""

from collections.abc import Collection, Mapping, Sequence

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.tasks import DraftTiming
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl
from vllm_hetero_spec.engine.seam.step_view import StepView

_HELD = 2  # steps that a probe's drafts are made beside, before they are waited for:
_PROBE = 0.1  # so many seconds at most, as a probe shows nothing without any


class PrecomputedDrafts(LookaheadControl):
    """A `LookaheadControl` where drafts are made ahead."""

    _held = 0  # steps that the present probe has been kept for
    _wrong: Collection[str] = ()  # requests for which something else had been drafted in this step
    _late: frozenset[str] = frozenset()  # requests whose draft was waited for, until it is verified

    def observe(self, step: StepView) -> None:
        """See `LookaheadControl`."""
        for request in step.requests if self._late else ():
            if request.req_id not in self._late or not request.new_tokens:
                continue
            self._late -= {request.req_id}
            draft, policy = self._verifying.get(request.req_id), self.controller.policy
            if draft is not None and policy is not None:
                policy.came_late(*draft.accepted(request), draft.random)
        self._late = self._late.intersection(step.live) if self._late else self._late
        super().observe(step)

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        """A step's drafts were looked up, or waited for."""
        planned = self._plan.lookahead
        self._late -= {draft.req_id for draft in drafts if not draft.tokens}
        if self._waiting is None:
            self._held = 0
        for draft in drafts:
            known = not self._plan.probe or draft.req_id in self._wrong
            if known and not draft.tokens and draft.req_id not in self._own:
                index = self._index_of[draft.req_id]
                self.controller.observe_acceptance(0, 0, (), planned[index], self._random[index])
        self._wrong = ()
        self._observe(timing, max(planned, default=0))

    def wait(
        self, missing: Mapping[str, int], each: float, unread: int, wrong: Collection[str] = ()
    ) -> tuple[int, float]:
        """See `engine.draft_source.PrecomputedDrafts`."""
        longest, policy, planned = max(missing.values()), self.controller.policy, self._plan
        self._wrong = wrong
        if planned.probe:
            if wrong or len(missing) < sum(wanted > 0 for wanted in planned.lookahead):
                return 0, 0.0  # it has shown something
            if self._held < _HELD:
                self._held += 1
                self._keep_plan(self._index_of)
                return 0, 0.0
            return longest, _PROBE
        if policy is None:
            return 0, 0.0
        indices = [self._index_of[req_id] for req_id in missing]
        tokens, seconds = policy.wait(indices, longest, each, unread)
        if tokens:
            self._late |= missing.keys()
        return tokens, seconds

    def looked_up(self, rank: int | None, guesses: int) -> None:
        """See `engine.draft_source.PrecomputedDrafts`."""
        if self.controller.policy is not None:
            self.controller.policy.looked_up(rank, guesses)

    def guesses(self, drafting: int, longest: int, each: float, most: int) -> int:
        """See `engine.draft_source.PrecomputedDrafts`."""
        policy = self.controller.policy
        return most if policy is None else policy.guesses(drafting, longest, each, most)
