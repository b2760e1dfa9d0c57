# SPDX-License-Identifier: Apache-2.0
"""Adapter between the controller and precomputed drafts (`draft_ahead`).

The cost of drafting is the time that the target waits: a look-up in each step, and sometimes a
draft that was not precomputed. A missing draft counts like a draft that proposes nothing, so it
lowers the expected gain of the next drafts. Drafts that were waited for are also learned separately
(`late_drafts.py`), because their acceptance rate tends to be lower.

The drafts of a probe are precomputed, too. Its plan is kept for `_HELD` steps, in which the drafter
catches up. After that, the target waits for them.
"""

from collections.abc import Collection, Mapping, Sequence

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.ahead.late_drafts import LateDrafts
from vllm_hetero_spec.engine.drafter.tasks import DraftTiming
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl
from vllm_hetero_spec.engine.seam.step_view import StepView

_HELD = 2  # steps; the plan of a probe is kept so long before the target waits for its drafts
_PROBE = 0.1  # seconds; longest wait for the drafts of a probe, which is useless without any


class PrecomputedDrafts:
    """A `Control` for precomputed drafts, in front of the `LookaheadControl` that learns.

    Args:
        parallel: True if one forward of the drafter drafts all tokens.

    Attributes:
        late: Decisions on drafts that were not precomputed.
    """

    can_stop_early = False  # the drafter's process does not consult the controller

    def __init__(self, control: LookaheadControl, *, parallel: bool = False) -> None:
        self._control, self.late = control, LateDrafts(parallel=parallel)
        self._step: StepView | None = None
        self._held = 0  # steps for which the current probe's plan has been kept
        self._wrong: Collection[str] = ()  # requests whose precomputed drafts were all wrong
        # Requests whose draft was waited for, until it is verified.
        self._late: frozenset[str] = frozenset()

    def observe(self, step: StepView) -> None:
        """Learn from drafts that the target waited for. Then the control observes the step."""
        self._step = step
        for request in step.requests if self._late else ():
            if request.req_id not in self._late or not request.new_tokens:
                continue
            self._late -= {request.req_id}
            draft = self._control.pending.get(request.req_id)
            policy = self._control.controller.policy
            if draft is not None and policy is not None:
                self.late.observe(policy, *draft.accepted(request), draft.random)
        self._late = self._late.intersection(step.live) if self._late else self._late
        self._control.observe(step)

    def continue_drafting(self, confidences: Mapping[str, Sequence[float]]) -> bool:
        return True

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        step, plan = self._step, self._control.current
        assert step is not None
        self._late -= {draft.req_id for draft in drafts if not draft.tokens}
        if not self._control.waiting.longest:
            self._held = 0
        for draft in drafts:
            if draft.tokens or (plan.probe and draft.req_id not in self._wrong):
                continue
            index = step.index_of[draft.req_id]
            params, planned = step.requests[index].params, plan.lookahead[index]
            if params.lookahead is None:
                self._control.controller.observe_acceptance(0, 0, (), planned, params.random)
        self._wrong = ()
        self._control.note_timing(timing, max(plan.lookahead, default=0))

    def wait(
        self, missing: Mapping[str, int], each: float, unread: int, wrong: Collection[str] = ()
    ) -> tuple[int, float]:
        """Decide how long to wait for drafts that were not precomputed.

        Args:
            missing: By request, how many target tokens its draft should have, at least one.
            each: Drafter tokens per target token.
            unread: Context tokens that the drafter has to read before.
            wrong: Requests among them whose precomputed drafts were all wrong.

        Returns:
            Target tokens to wait for (0: do not wait), and the longest wait in seconds.
        """
        plan, policy = self._control.current, self._control.controller.policy
        longest, self._wrong = max(missing.values()), wrong
        if plan.probe:
            if wrong or len(missing) < sum(wanted > 0 for wanted in plan.lookahead):
                return 0, 0.0  # the probe has a result already
            if self._held < _HELD:
                self._held += 1
                self._control.keep_plan()
                return 0, 0.0
            return longest, _PROBE
        if policy is None or self._step is None:
            return 0, 0.0
        indices = [self._step.index_of[req_id] for req_id in missing]
        tokens, seconds = self.late.wait(policy, indices, longest, each, unread)
        if tokens:
            self._late |= missing.keys()
        return tokens, seconds

    def looked_up(self, rank: int | None, guesses: int) -> None:
        """Learn which precomputed draft was found; arguments as in `GuessHits.observe`."""
        if self._control.controller.policy is not None:  # None for a probe
            self.late.hits.observe(rank, guesses)

    def guesses(self, drafting: int, longest: int, each: float, most: int) -> int:
        """Choose the number of branches beside each chain; arguments as in `LateDrafts`."""
        policy = self._control.controller.policy
        if policy is None:
            return most
        return self.late.guesses(policy, drafting, longest, each, most)
