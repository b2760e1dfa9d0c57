# SPDX-License-Identifier: Apache-2.0
"""Draft lengths in the engine: observations for the controller, plans, limits of requests."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goodness import follows
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy
from target_law import Setting, counted, law_of, load
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.ahead.control import PrecomputedDrafts
from vllm_hetero_spec.engine.drafter.requests import NEVER
from vllm_hetero_spec.engine.drafter.tasks import DraftTiming
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl, StepPlan
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG, RequestParams
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView, TreeRoom
from vllm_hetero_spec.engine.trees.control import TreePolicy
from vllm_hetero_spec.lookahead.controllers import ConfidenceStop, Controller, Fixed, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.options import ConfidenceOptions
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics
from vllm_hetero_spec.trees.values import TreeValues


class Scripted(Fixed):
    """A controller with scripted draft lengths that records its observations."""

    learns_first = False

    def __init__(self, *lookaheads: int, probe: bool = False) -> None:
        super().__init__(4)
        self.script, self.probe = list(lookaheads), probe
        self.steps: list[tuple[int, int]] = []
        self.tokens: list[tuple[int, bool]] = []  # emitted tokens, True with seconds
        self.verified: list[tuple[int, int]] = []

    def plan(self, batch: int, limits: Any, *rest: Any) -> LookaheadPlan:
        lookahead = self.script.pop(0) if self.script else 0
        self.off = not self.script
        return LookaheadPlan(tuple(min(limit, lookahead) for limit in limits), self.probe)

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        self.steps.append((batch, rows))

    def observe_acceptance(self, verified: int, accepted: int, *rest: Any) -> None:
        self.verified.append((verified, accepted))

    def emitted(self, tokens: int, seconds: float | None) -> None:
        self.tokens.append((tokens, seconds is not None))


def step_of(
    sampled: dict[str, list[int]],
    drafted: dict[str, int] | None = None,
    *,
    rows: int | None = None,
    new: bool = False,
    asked: dict[str, int] | None = None,
    seconds: tuple[float, float] = (0.04, 0.05),
    lookahead: int = 4,
    buckets: Sequence[int] = (),
) -> StepView:
    """Return a step in which each request sampled these tokens; only request `b` is random.

    Args:
        sampled: Target ids by request.
        drafted: Length of each draft that was verified, by request.
        rows: Tokens computed in the step; by default, those that were sampled or drafted.
        asked: Draft lengths that requests set themselves.
        seconds: Time of the target, and of the whole step.
    """
    drafted, asked = drafted or {}, asked or {}
    requests = [
        RequestView(
            req_id=name,
            params=RequestParams(0, float(name == "b"), lookahead=asked.get(name)),
            token_ids=np.arange(9),
            num_prompt_tokens=4,
            new_tokens=tokens,
            num_drafted=drafted.get(name, 0),
        )
        for name, tokens in sampled.items()
    ]
    plain = len(sampled) + sum(drafted.values())
    return StepView(
        requests=requests,
        started=dict.fromkeys(sampled) if new else {},
        live=sampled,
        lookahead=lookahead,
        max_model_len=100,
        num_rows=plain if rows is None else rows,
        target_seconds=seconds[0],
        step_seconds=seconds[1],
        buckets=buckets,
    )


def drafts_of(lengths: dict[str, int], confidence: float) -> list[Draft]:
    return [Draft.chain(name, [1] * n, [confidence] * n) for name, n in lengths.items()]


def test_steps_with_prompts_in_them_teach_no_costs() -> None:
    controller = Scripted()
    control = LookaheadControl(controller, can_stop_early=False)
    control.observe(step_of({"a": [1], "b": [1]}, rows=30, new=True))
    control.observe(step_of({"a": [7, 8, 1], "b": [1]}, {"a": 3}))
    control.observe(step_of({"a": [1], "b": []}, rows=40))  # b was preempted and is prefilled again
    control.learn()
    assert controller.steps == [(2, 5)]
    assert controller.tokens == [(2, False), (4, True), (1, False)]


@pytest.mark.parametrize("first", [False, True])
def test_what_a_step_teaches_is_learnt_when_drafts_have_begun(first: bool) -> None:
    """It is learnt before the plan only if the controller has `learns_first`."""
    controller = Scripted(4)
    controller.learns_first = first
    control, step = LookaheadControl(controller, can_stop_early=False), step_of({"a": [1]})
    control.observe(step)
    control.plan(step, [0])
    assert controller.steps == [(1, 1)] * first
    control.learn()
    assert controller.steps == [(1, 1)]


def test_other_batches_come_before_a_draft_is_verified() -> None:
    """This happens with pipeline stages. Drafts of requests that have ended are forgotten."""
    controller = Scripted(4, 0)
    control = LookaheadControl(controller, can_stop_early=False)

    def observed(sampled: dict[str, list[int]], drafted: dict[str, int] | None, live: str) -> None:
        control.observe(replace(step_of(sampled, drafted), live=set(live)))

    first = step_of({"a": [1], "c": [1]})
    control.plan(first, [0, 0])
    control.observe(first)
    control.trim(drafts_of({"a": 4, "c": 4}, 0.9))
    controller.learns_first = True
    observed({"b": [1]}, None, live="ab")
    observed({"c": [1]}, {"c": 0}, live="abc")  # another request with the same name
    assert controller.verified == []
    observed({"a": [1, 2, 3]}, {"a": 4}, live="abc")
    assert controller.verified == [(4, 2)]


NOTHING = DraftTiming(0.1, 0.01, 0, 0, 0)


def precomputed(controller: Controller) -> tuple[LookaheadControl, PrecomputedDrafts]:
    control = LookaheadControl(controller, can_stop_early=False)
    return control, PrecomputedDrafts(control)


def test_drafts_that_were_not_there_are_learnt_from() -> None:
    """They count as drafts of length 0, unless the request sets its own draft length."""
    controller = Scripted(4)
    control, ahead = precomputed(controller)
    step = step_of({"a": [1], "b": [1], "c": [1]}, asked={"c": 2})
    ahead.observe(step)
    control.plan(step, [0, 0, 0])
    ahead.drafted(NOTHING, drafts_of({"a": 0, "b": 3, "c": 0}, 0.9))
    assert controller.verified == [(0, 0)]
    assert ahead.wait({"a": 3, "b": 2}, 1.0, 0) == (0, 0.0)  # no costs are known
    assert ahead.guesses(2, 4, 1.0, 8) == 8


def test_a_probe_is_kept_until_its_drafts_are_there() -> None:
    """The target waits only if the drafter has not finished the probe after two steps."""
    controller = Scripted(3, 3, 0, probe=True)
    control, ahead = precomputed(controller)
    step = step_of({"a": [1], "b": [1], "c": [1]}, asked={"c": 2})

    def planned() -> list[int]:
        ahead.observe(step)
        return list(control.plan(step, [0, 0, 0]).lookahead)

    def not_there(missing: dict[str, int], wrong: set[str] | None = None) -> tuple[int, float]:
        waited = ahead.wait(missing, 1.0, 0, wrong or set())
        there = {name: 0 if name in missing else 3 for name in "abc"}
        ahead.drafted(NOTHING, drafts_of(there, 0.9))
        return waited

    both = {"a": 3, "b": 3}
    for waited in ((0, 0.0), (0, 0.0), (3, 0.1)):
        assert planned() == [3, 3, 2]
        assert len(controller.script) == 2
        assert not_there(both) == waited
    assert controller.verified == []
    assert planned() == [3, 3, 2]
    assert len(controller.script) == 1
    assert not_there(both) == (0, 0.0)
    assert planned() == [3, 3, 2]
    assert len(controller.script) == 1
    assert not_there(both, {"b"}) == (0, 0.0)  # the text differs from the draft, which is a result
    assert controller.verified == [(0, 0)]
    assert planned() == [0, 0, 2]
    controller.script = [3]
    assert planned() == [3, 3, 2]
    assert not_there({"a": 3}) == (0, 0.0)  # b's draft is ready
    assert planned() == [0, 0, 2]
    assert controller.verified == [(0, 0)]


def test_what_the_target_waits_for_is_what_drafting_costs() -> None:
    """Costs come from observed times. Drafting that is not exposed costs nothing, but is timed."""
    costs = CostModel(target=[(1, 0.05), (8, 0.05)], drafter=[(1, 0.004), (8, 0.004)])
    known = Estimates.of(costs, 4)
    control, ahead = precomputed(Goodput(known))
    for _ in range(100):
        step = step_of({"a": [1]})
        ahead.observe(step)
        control.plan(step, [0])
        timing = DraftTiming(0.04, 0.001, 5, 10, 0, exposed=0.0)
        ahead.drafted(timing, drafts_of({"a": 4}, 0.9))
    assert costs.drafter(1) == pytest.approx(0.008, rel=0.3)  # of a forward while the target runs
    assert costs.drafting(1, known.steps.expected(4)) == pytest.approx(0.003, abs=0.003)
    waits = [ahead.wait({"a": 4}, 1.0, 0)[0] for _ in range(16)]
    assert waits == [0] * 16
    tokens, seconds = ahead.wait({"a": 4}, 1.0, 0)
    assert tokens > 0
    assert seconds < 0.2
    assert ahead.wait({"a": 4}, 20.0, 0) == (0, 0.0)


def test_drafts_that_were_waited_for_are_learnt_by_themselves() -> None:
    """Drafts that were ready, or that did not arrive, do not change these rates."""
    costs = CostModel(target=[(1, 0.05), (8, 0.06)], drafter=[(1, 0.004), (8, 0.004)])
    control, ahead = precomputed(Goodput(Estimates.of(costs, 4)))
    late = ahead.late
    late.share = before = 1.0
    step = step_of({"a": [1], "b": [1], "c": [1]})
    ahead.observe(step)
    control.plan(step, [0, 0, 0])
    tokens, _ = ahead.wait({"a": 4, "c": 4}, 1.0, 0)
    assert tokens > 0
    drafts = drafts_of({"a": 4, "b": 4, "c": 0}, 0.9)
    ahead.drafted(DraftTiming(0.04, 0.001, 5, 10, 0, exposed=0.0), drafts)
    lengths = {draft.req_id: len(draft.tokens) for draft in control.trim(drafts)}
    assert lengths["a"] > 1
    others = step_of({"b": [1, 2], "c": [1]}, {"b": lengths["b"], "c": 0})
    ahead.observe(replace(others, live=set("abc")))
    assert late.share == before
    ahead.observe(step_of({"a": [1]}, {"a": lengths["a"]}))
    assert late.share < before
    known_now = late.share
    ahead.observe(step_of({"a": [1, 2]}, {"a": 0}))
    assert late.share == known_now


def test_what_requests_ask_for_goes_first() -> None:
    control = LookaheadControl(Scripted(3, 3, 0), can_stop_early=False)
    asked = {"b": 0, "c": 2, "d": 9}

    def planned(sampled: dict[str, list[int]]) -> StepPlan:
        step = step_of(sampled, asked=asked)
        control.observe(step)
        return control.plan(step, [0] * len(sampled))

    four: dict[str, list[int]] = {name: [1] for name in "abcd"}
    assert planned(four) == StepPlan([3, 0, 2, 4], [True, False, True, True])
    assert planned(four | {"c": []}).lookahead == [3, 0, 0, 4]
    assert planned(four) == StepPlan([0, 0, 2, 4], [False, False, True, True])
    del four["c"]
    assert planned(four).lookahead == [0, 0, 4]


def test_who_has_ended_is_left_alone() -> None:
    """It is neither read nor drafted for. If all have ended, the requested length stays."""
    ended = {
        "a": RequestParams(0, end_ids=frozenset({7})),
        "b": RequestParams(0, max_tokens=5),
        "c": RequestParams(0, max_tokens=6, lookahead=4),  # its next token is its last
        "d": RequestParams(0, max_tokens=7, end_ids=frozenset({7})),
    }
    for names in ("abcd", "abc"):
        control = LookaheadControl(Fixed(4), can_stop_early=False)
        step = step_of({name: [7 if name == "a" else 1] for name in names}, buckets=[0, 2, 4])
        requests = [each._replace(params=ended[each.req_id]) for each in step.requests]
        step, control.requested_length = replace(step, requests=requests), 2
        control.observe(step)
        plan = control.plan(step, [1] * len(names))
        assert plan == StepPlan([0, 0, 0, 4][: len(names)], [False] * 3 + [True] * ("d" in names))
        assert control.requested_length == (4 if "d" in names else 2)
    full = step_of({"a": [1]})
    assert not any(replace(full, max_model_len=10).going_on)
    assert all(replace(full, max_model_len=11).going_on)


def test_nothing_is_planned_for_a_retired_request() -> None:
    """No draft of it would ever end the plans."""
    control = LookaheadControl(Fixed(4), can_stop_early=False)
    step = step_of({"a": [1], "b": [1]}, buckets=[0, 2, 4])
    control.observe(step)
    assert control.plan(step, [NEVER, 1]) == StepPlan([0, 4], [False, True])


def test_the_controller_is_told_whether_trees_have_room() -> None:
    controller, room = Goodput(Estimates.of(CostModel(), 4)), TreeRoom(nodes=8, rows=40, branches=2)
    branches = BranchStatistics()
    policy = TreePolicy(TreeValues.unknown(), branches, DraftStats())
    control = LookaheadControl(controller, can_stop_early=False, policy=policy)
    for trees in (room, room._replace(branches=0), None, room):
        step = replace(step_of({"a": [1]}), trees=trees)
        control.observe(step)
        control.plan(step, [0])
        assert branches.room == (trees is room)


def test_a_plan_waits_for_a_step_that_may_draft_so_far() -> None:
    """With asynchronous scheduling, a requested length applies one or two steps later."""
    controller = Scripted(3, 1, 4, 0, 2)
    control = LookaheadControl(controller, can_stop_early=False)

    def planned(lookahead: int, **asked: int) -> tuple[list[int], int]:
        step = step_of({"a": [1], "b": [1]}, lookahead=lookahead, buckets=[0, 2, 4], asked=asked)
        control.observe(step)
        return control.plan(step, [0, 0]).lookahead, control.requested_length

    assert planned(0) == ([0, 0], 4)
    assert planned(0) == ([0, 0], 4)
    assert planned(4) == ([3, 3], 4)  # the plan that waited
    assert planned(4) == ([1, 1], 2)
    assert planned(2) == ([2, 2], 4)  # the possible length, until a longer one is possible
    assert planned(4) == ([0, 0], 0)
    assert planned(4) == ([2, 2], 2)
    assert controller.script == []
    assert planned(2, b=3) == ([0, 2], 4)  # a request's own length


def test_what_a_request_asks_for_itself_is_no_tree() -> None:
    """If drafts may be trees, steps are scheduled with more rows than a chain has."""
    control = LookaheadControl(Scripted(0), can_stop_early=False)
    step = step_of({"a": [1]}, lookahead=4, buckets=[0, 2, 4, 16], asked={"a": 64})
    assert control.plan(replace(step, longest=4), [0]).lookahead == [4]
    assert control.requested_length == 4


def test_a_plan_does_not_wait_for_ever() -> None:
    controller = Scripted(*[4] * 3)
    control = LookaheadControl(controller, can_stop_early=False)
    step = step_of({"a": [1]}, lookahead=0, buckets=[0, 2, 4])
    for _ in range(12):
        assert control.plan(step, [0]).lookahead == [0]
    assert len(controller.script) == 1


def test_a_plan_is_made_anew_for_other_requests_but_for_a_probe() -> None:
    for probe in (False, True):
        controller = Scripted(4, 3, probe=probe)
        control = LookaheadControl(controller, can_stop_early=False)
        control.plan(step_of({"a": [1], "b": [1]}, lookahead=0, buckets=[0, 2, 4]), [0, 0])
        other = step_of({"c": [1], "a": [1]}, lookahead=4, buckets=[0, 2, 4])
        assert control.plan(other, [0, 0]).lookahead == ([0, 4] if probe else [3, 3])


def prompted(outputs: dict[str, int]) -> StepView:
    """Return a step in which requests have this many output tokens, the last one new; 0: none."""
    requests = [
        RequestView(name, RequestParams(0), np.arange(500 + n), 500, [1] * (n > 0))
        for name, n in outputs.items()
    ]
    return StepView(requests, {}, outputs, lookahead=4, max_model_len=999, num_rows=99)


@pytest.mark.parametrize("controller", [Fixed(4), ConfidenceStop(0.4, 4)])
def test_first_tokens_go_before_long_contexts(controller: Controller) -> None:
    """While first tokens are produced, long contexts are not read, up to a limit.

    A short context is read, unless its request has just begun and another one has no token yet.
    """
    control = LookaheadControl(controller, can_stop_early=False)
    long, short = 150, 100

    def read(outputs: dict[str, int], *unread: int) -> tuple[str, int]:
        step = prompted(outputs)
        control.observe(step)
        plan = control.plan(step, unread)
        assert all(reads or not n for reads, n in zip(plan.reads, plan.lookahead, strict=True))
        return "".join(n for n, reads in zip(outputs, plan.reads, strict=True) if reads), (
            plan.num_waiting
        )

    assert read({"a": 1}, long) == ("", 1)
    assert read({"a": 1}, short) == ("a", 0)
    assert read({"a": 2, "b": 1, "c": 0}, long, long, long) == ("", 2)
    assert read({"a": 3, "b": 2, "c": 1}, long, long, short) == ("c", 2)
    assert read({"a": 3, "b": 2, "c": 1, "d": 0}, long, short, short, short) == ("b", 2)
    assert read({"a": 4, "b": 3, "c": 2}, long, long, short) == ("abc", 0)
    assert read({"a": 5, "b": 4, "d": 0}, long, long, long) == ("a", 1)


def test_no_draft_holds_up_a_first_token() -> None:
    """Requests that have just begun have none then, even if they set their own draft length."""
    limits: list[list[int]] = []

    class Limited(Scripted):
        def plan(self, batch: int, given: Any, *rest: Any) -> LookaheadPlan:
            limits.append(list(given))
            return super().plan(batch, given, *rest)

    control = LookaheadControl(Limited(2), can_stop_early=False)
    for _ in range(2):
        step = prompted({"a": 1, "b": 2, "c": 0})
        control.observe(step)
        control.plan(step, [40] * 3)
    assert limits == [[0, 4, 0], [0, 4, 0]]
    wishing = [request._replace(params=RequestParams(0, lookahead=3)) for request in step.requests]
    assert control.plan(replace(step, requests=wishing), [40] * 3).lookahead == [0, 3, 0]
    assert control.plan(replace(step, requests=wishing[:2]), [40] * 2).lookahead == [3, 3]


def test_long_contexts_are_read_for_drafts_alone() -> None:
    """Beside drafts, short contexts of other requests are read, too, but not beside a probe."""

    class One(Scripted):
        def plan(self, *args: Any) -> LookaheadPlan:
            return LookaheadPlan((2, 0, 0), probe=self.probe)

    for probe, reads in ((False, [True, True, False]), (True, [True, False, False])):
        control = LookaheadControl(One(1, probe=probe), can_stop_early=False)
        step = prompted(dict.fromkeys("abc", 9))
        control.observe(step)
        assert control.plan(step, [500, 3, 500]) == StepPlan([2, 0, 0], reads)


def test_a_draft_that_was_ended_did_not_run_dry() -> None:
    """The planned length counts only for other drafts. The controller decides once per step."""
    told: list[tuple[Any, ...]] = []
    asked: list[int] = []

    class Stopping(Scripted):
        def continue_drafting(self, confidences: Any) -> list[bool]:
            asked.append(len(confidences))
            return [len(request) == 1 for request in confidences]

        def observe_acceptance(self, *figures: Any) -> None:
            told.append(figures)

    control = LookaheadControl(Stopping(4, 4), can_stop_early=True)
    for drafted in ({}, {"a": 2, "b": 1}):
        step = step_of({"a": [7], "b": [9]}, drafted, new=True)
        control.observe(step)
        control.plan(step, [0] * 2)
        assert control.continue_drafting({"a": [0.5], "b": [0.5]})
        if not drafted:  # in the second round it is called only once
            assert not control.continue_drafting({"a": [0.5, 0.4], "b": [0.5, 0.4]})
        control.trim(drafts_of({"a": 2, "b": 1}, 0.5))
    assert asked == [2, 2, 2]
    control.observe(step_of({"a": [7, 1], "b": [9, 1]}, {"a": 2, "b": 1}))
    control.learn()
    assert [figures[-2:] for figures in told] == [(0, False), (0, True), (4, False), (4, True)]


def test_drafts_that_are_cut_to_nothing_end_drafting() -> None:
    """If confidence is always 0, no draft is verified. This disables speculation, too."""
    now = 0.0
    target = [(1, 0.039), (6, 0.039), (8, 0.041), (12, 0.052), (16, 0.054), (24, 0.068), (48, 0.12)]
    costs = CostModel(target, drafter=[(1, 0.0015), (8, 0.0016)])
    control = LookaheadControl(
        Goodput(Estimates.of(costs, 4), clock=lambda: now), can_stop_early=False
    )
    drafted: dict[str, int] = {}
    drafting = []
    took = proposing = 0.0
    for number in range(100):
        sampled: dict[str, list[int]] = {name: [1] for name in "abcdefgh"}
        step = step_of(sampled, drafted, new=not number, seconds=(took, took + proposing))
        control.observe(step)
        lookahead = control.plan(step, [0] * 8).lookahead
        control.learn()
        drafts = drafts_of(
            {name: n for name, n in zip("abcdefgh", lookahead, strict=True) if n}, 0.0
        )
        drafting.append(len(drafts) == 8)
        steps = max(lookahead)
        proposing = 0.0016 * steps
        now += proposing
        control.drafted(DraftTiming(proposing, 0.0, steps, steps * len(drafts), 0), drafts)
        drafted = {draft.req_id: len(draft.tokens) for draft in control.trim(drafts)}
        took = costs.target(8, 8 + sum(drafted.values()))
        now += took
    assert drafting[0]  # nothing was observed yet, and the costs are low
    assert sum(drafting) < 12
    assert not any(drafting[50:])


# ---- engines -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["goodput", "confidence"])
def llm(request: pytest.FixtureRequest, demo_pair: Path, alone: Outputs) -> Any:
    spec = slem(demo_pair / "drafter", 6, method="hetero", controller=request.param)
    with engine(demo_pair / "target", spec) as llm:
        yield llm


@pytest.mark.full
@pytest.mark.engine
def test_greedy_output_is_the_targets(llm: Any, texts: list[str], alone: Outputs) -> None:
    """Requests run in one batch and one by one, with drafts of any length or without drafts."""
    assert generate(llm, texts, greedy()) == alone
    for index, text in enumerate(texts[:3]):
        assert generate(llm, [text], greedy()) == {"0": alone[str(index)]}
    stats = read_stats(llm)
    assert set(stats["skipped"]) <= {"not_worth_it", "catching_up"}
    # Drafts may not pay for so small a target on some machines, so goodput may make none.
    if isinstance(proposer_of(llm).options.controller, ConfidenceOptions):
        assert stats["drafts"] > 0
    else:
        assert stats["drafts"] + stats["skipped"].get("not_worth_it", 0) > 0


@pytest.mark.full
@pytest.mark.engine
def test_samples_follow_the_law(llm: Any, demo_pair: Path, code_prompts: list[str]) -> None:
    """Drafting stops by confidences that are known before a token is sampled."""
    prompt, setting = code_prompts[0][:200], Setting(0.8, top_k=3)
    model, start = load(demo_pair / "target", prompt)
    params = SamplingParams(temperature=0.8, top_k=3, max_tokens=8, ignore_eos=True)
    before = metrics_of(llm)["num_draft_tokens"]
    outputs = llm.generate([prompt] * 2000, params, use_tqdm=False)
    assert follows(counted(o.outputs[0].token_ids for o in outputs), law_of(model, start, setting))
    if isinstance(proposer_of(llm).options.controller, ConfidenceOptions):
        assert metrics_of(llm)["num_draft_tokens"] > before


@pytest.mark.full
@pytest.mark.engine
def test_requests_decide_for_themselves(llm: Any, texts: list[str], alone: Outputs) -> None:
    """A request may disable its drafts or set their length. An invalid length raises an error."""

    def drafts_of(wish: int) -> tuple[int, dict[int, int]]:
        proposer = proposer_of(llm)
        before = dict(proposer.stats.lengths)
        params = greedy()
        params.extra_args = {LOOKAHEAD_ARG: wish}
        assert generate(llm, texts, params) == alone
        gained = {k: n - before.get(k, 0) for k, n in proposer.stats.lengths.items()}
        return sum(gained.values()), {k: n for k, n in gained.items() if n}

    wrong = greedy(extra_args={LOOKAHEAD_ARG: -1})
    with pytest.raises(VLLMValidationError, match=f"{LOOKAHEAD_ARG} is -1; it must be"):
        llm.generate(texts[:2], [greedy(), wrong], use_tqdm=False)
    assert drafts_of(0) == (0, {})
    count, lengths = drafts_of(2)
    assert count > 0
    assert set(lengths) <= {1, 2}
    assert lengths[2] > count / 2
