# SPDX-License-Identifier: Apache-2.0
"""A plan that is kept for a later step."""

from collections.abc import Iterable, Mapping, Sequence

from vllm_hetero_spec.engine.seam.step_view import StepView
from vllm_hetero_spec.lookahead.controllers import LookaheadPlan

_LAG = 8  # steps; a requested draft length that has not come by then is given up


class WaitingPlan:
    """At most one plan, until a step can have drafts as long as planned."""

    def __init__(self) -> None:
        self._wanted: Mapping[str, int] = {}  # draft lengths by request; empty without a plan
        self._plan = LookaheadPlan(())
        self._waited = 0  # steps

    @property
    def longest(self) -> int:
        """Its longest draft, in target tokens; 0 without a plan."""
        return max(self._wanted.values(), default=0)

    def keep(self, requests: Iterable[str], plan: LookaheadPlan) -> None:
        """Keep the plan of these requests."""
        self._wanted = dict(zip(requests, plan.lookahead, strict=True))
        self._plan, self._waited = plan, 0

    def take(self, step: StepView, limits: Sequence[int]) -> LookaheadPlan | None:
        """Return the plan if the step can have it, or one without drafts while it has to wait.

        None without a plan, and if the plan is given up. A plan for other requests is given up,
        except for a probe.
        """
        wanted, self._wanted = self._wanted, {}
        same = bool(wanted) and (self._plan.probe or wanted.keys() == step.index_of.keys())
        if same and step.lookahead < max(wanted.values()) and self._waited < _LAG:
            self._wanted, self._waited = wanted, self._waited + 1
            return LookaheadPlan((0,) * len(limits))
        if not same or not step.lookahead:
            return None
        lookahead = [wanted.get(req_id, 0) for req_id in step.index_of]
        return self._plan._replace(lookahead=tuple(map(min, lookahead, limits)))
