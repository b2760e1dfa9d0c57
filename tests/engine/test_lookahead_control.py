# SPDX-License-Identifier: Apache-2.0
"""How far to draft, in the engine: what is learnt, what requests ask for, nothing lost by it."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from goodness import follows
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy
from target_law import Setting, counted, law_of, load
from vllm import SamplingParams

from vllm_hetero_spec.engine.drafter.request_limits import LOOKAHEAD_ARG, wished_lookahead
from vllm_hetero_spec.engine.lookahead_control import Outcome, Pace
from vllm_hetero_spec.engine.metrics.counters import read_stats
from vllm_hetero_spec.lookahead.controllers import Fixed, Gauges, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.goodput import Goodput


class Scripted(Fixed):
    """Drafts by a script, and keeps what it is told."""

    def __init__(self, *lookaheads: int, probe: bool = False) -> None:
        super().__init__(4)
        self.script, self.probe = list(lookaheads), probe
        self.steps: list[tuple[int, int]] = []
        self.tokens: list[int] = []
        self.verified: list[tuple[int, int]] = []

    def plan(
        self, batch: int, limits: Any, pending: Any = None, random: Any = None
    ) -> LookaheadPlan:
        lookahead = self.script.pop(0) if self.script else 0
        self.off = not self.script
        return LookaheadPlan(tuple(min(limit, lookahead) for limit in limits), self.probe)

    def observe_step(self, batch: int, rows: int, seconds: float) -> None:
        self.steps.append((batch, rows))

    def observe_acceptance(self, verified: int, accepted: int, *rest: Any) -> None:
        self.verified.append((verified, accepted))

    def emitted(self, tokens: int, seconds: float) -> None:
        self.tokens.append(tokens)

    def gauges(self) -> Gauges:
        return Gauges(0)


def runner_of(*req_ids: str, wishes: dict[str, Any] | None = None) -> Any:
    def request(req_id: str) -> Any:
        extra = {LOOKAHEAD_ARG: wishes[req_id]} if wishes and req_id in wishes else None
        return SimpleNamespace(sampling_params=SamplingParams(extra_args=extra))

    return SimpleNamespace(
        requests={req_id: request(req_id) for req_id in req_ids},
        input_batch=SimpleNamespace(req_ids=list(req_ids), random_reqs={"b"}),
    )


def step_of(total: int, drafted: dict[str, list[int]], new: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=req_id) for req_id in new],
        scheduled_spec_decode_tokens=drafted,
        total_num_scheduled_tokens=total,
    )


def test_steps_with_prompts_in_them_teach_nothing() -> None:
    controller = Scripted()
    pace = Pace(controller, stops=False)
    runner = runner_of("a", "b")
    pace.begin(runner, step_of(30, {}, new=("a", "b")), [[1], [1]])
    pace.end()
    pace.begin(runner, step_of(5, {"a": [7, 8, 9]}), [[7, 8, 1], [1]])
    pace.end()
    pace.begin(runner, step_of(40, {}), [[1], []])  # b was preempted and reads again
    assert controller.steps == [(2, 5)]
    assert controller.tokens == [4]


def test_what_requests_ask_for_goes_first() -> None:
    pace = Pace(Scripted(3, 3, 0), stops=False)
    runner = runner_of("a", "b", "c", "d", wishes={"b": 0, "c": 2, "d": 9})
    pace.begin(runner, step_of(9, {}, new=("a", "b", "c", "d")), [[1]] * 4)
    assert pace.plan([[1]] * 4, [0] * 4, 4) == [3, 0, 2, 4]
    assert pace.plan([[1], [1], [], [1]], [0] * 4, 4) == [3, 0, 0, 4]
    assert pace.plan([[1]] * 4, [0] * 4, 4) == [0, 0, 2, 4]
    assert not pace.reads_all
    del runner.requests["c"]
    runner.input_batch.req_ids.remove("c")
    pace.begin(runner, step_of(3, {}, new=()), [[1]] * 3)
    assert pace.plan([[1]] * 3, [0] * 3, 4) == [0, 0, 4]


def test_a_draft_that_was_ended_did_not_run_dry() -> None:
    """The controller is asked once a step, and told what was wanted only where that was drafted."""
    told: list[tuple[Any, ...]] = []
    asked: list[int] = []

    class Stopping(Scripted):
        def continue_drafting(self, confidences: Any) -> list[bool]:
            asked.append(len(confidences))
            return [len(request) == 1 for request in confidences]

        def observe_acceptance(self, *figures: Any) -> None:
            told.append(figures)

    pace = Pace(Stopping(4, 4), stops=True)
    runner = runner_of("a", "b")
    for drafted in ({}, {"a": [7, 8], "b": [9]}):
        pace.begin(runner, step_of(2 + len(drafted), drafted, new=("a", "b")), [[7], [9]])
        pace.plan([[1]] * 2, [0] * 2, 4)
        rows: list[Any] = [SimpleNamespace(index=i, confidences=[0.5]) for i in range(2)]
        assert pace.proceed is not None
        assert pace.proceed(rows)
        for row in rows:
            row.confidences = [0.5, 0.4]
        if not drafted:  # the second round is not asked for a second time
            assert not pace.proceed(rows)
        jobs: list[Any] = [
            SimpleNamespace(index=i, confidences=[0.5] * n, proposal=[1] * n)
            for i, n in ((0, 2), (1, 1))
        ]
        pace.trim(jobs)
    assert asked == [2, 2, 2]
    pace.begin(runner, step_of(5, {"a": [7, 8], "b": [9]}), [[7, 1], [9, 1]])
    assert [figures[-2:] for figures in told] == [(0, False), (0, True), (4, False), (4, True)]


def test_drafts_that_are_cut_to_nothing_end_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is never sure has nothing verified, which is a lesson too."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    target = [(1, 0.039), (6, 0.039), (8, 0.041), (12, 0.052), (16, 0.054), (24, 0.068), (48, 0.12)]
    costs = CostModel(target, drafter=[(1, 0.0015), (8, 0.0016)])
    pace = Pace(Goodput(costs, 4, clock=lambda: now), stops=False)
    runner = runner_of(*"abcdefgh")
    drafted: dict[str, list[int]] = {}
    drafting = []
    for step in range(100):
        new = () if step else tuple("abcdefgh")
        rows = 8 + sum(map(len, drafted.values()))
        pace.begin(runner, step_of(rows, drafted, new), [[1]] * 8)
        lengths = pace.plan([[1]] * 8, [0] * 8, 4)
        jobs: list[Any] = [
            SimpleNamespace(index=i, confidences=[0.0] * n, proposal=[1] * n)
            for i, n in enumerate(lengths)
            if n
        ]
        drafting.append(len(jobs) == 8)
        steps = max(lengths)
        now += 0.0016 * steps
        pace.drafted(Outcome(0.0016 * steps, 0.0, steps, steps * len(jobs), 0), jobs)
        pace.trim(jobs)
        drafted = {"abcdefgh"[job.index]: job.proposal for job in jobs if job.proposal}
        pace.end()
        now += costs.target(8, 8 + sum(map(len, drafted.values())))
    assert drafting[0]  # nothing is known yet, and the costs are good
    assert sum(drafting) < 12
    assert not any(drafting[50:])


@pytest.mark.parametrize("wish", [True, -1, 1.5, "two", [3]])
def test_an_odd_wish_is_no_wish(wish: Any, caplog: pytest.LogCaptureFixture) -> None:
    request = SimpleNamespace(sampling_params=SamplingParams(extra_args={LOOKAHEAD_ARG: wish}))
    assert wished_lookahead(request) is None
    assert wished_lookahead(request) is None
    assert len([m for m in caplog.messages if repr(wish) in m]) == 1


# ---- engines -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["goodput", "confidence"])
def llm(request: pytest.FixtureRequest, demo_pair: Path, alone: Outputs) -> Any:
    spec = slem(demo_pair / "drafter", 6, method="hetero", controller=request.param)
    with engine(demo_pair / "target", spec) as llm:
        yield llm


@pytest.mark.engine
def test_greedy_output_is_the_targets(llm: Any, texts: list[str], alone: Outputs) -> None:
    """Whatever is drafted, trimmed, or left alone: with all in one batch, and one by one."""
    assert generate(llm, texts, greedy()) == alone
    for index, text in enumerate(texts[:3]):
        assert generate(llm, [text], greedy()) == {"0": alone[str(index)]}
    stats = read_stats(llm)
    assert stats["drafts"] > 0
    assert sum(stats["skipped"].values()) == stats["skipped"].get("not_worth_it", 0)


@pytest.mark.engine
def test_samples_follow_the_law(llm: Any, demo_pair: Path, code_prompts: list[str]) -> None:
    """Stopping by confidences known before the draw; the target drafts whatever it costs."""
    prompt, setting = code_prompts[0][:200], Setting(0.8, top_k=3)
    model, start = load(demo_pair / "target", prompt)
    params = SamplingParams(temperature=0.8, top_k=3, max_tokens=8, ignore_eos=True)
    before = metrics_of(llm)["num_draft_tokens"]
    outputs = llm.generate([prompt] * 2000, params, use_tqdm=False)
    assert follows(counted(o.outputs[0].token_ids for o in outputs), law_of(model, start, setting))
    if proposer_of(llm).options.controller == "confidence":
        assert metrics_of(llm)["num_draft_tokens"] > before


@pytest.mark.engine
def test_requests_decide_for_themselves(llm: Any, texts: list[str], alone: Outputs) -> None:
    """Off and fixed in one batch: only those that want drafts have any, of their own length."""

    def drafts_of(wish: int) -> tuple[int, dict[int, int]]:
        proposer = proposer_of(llm)
        before = dict(proposer.stats.lengths)
        params = greedy()
        params.extra_args = {LOOKAHEAD_ARG: wish}
        assert generate(llm, texts, params) == alone
        gained = {k: n - before.get(k, 0) for k, n in proposer.stats.lengths.items()}
        return sum(gained.values()), {k: n for k, n in gained.items() if n}

    assert drafts_of(0) == (0, {})
    count, lengths = drafts_of(2)
    assert count > 0
    assert set(lengths) <= {1, 2}
    assert lengths[2] > count / 2
