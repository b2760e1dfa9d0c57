# SPDX-License-Identifier: Apache-2.0
"""Tests of `RunnerV2` and its speculator: step views, transfer of drafts, order of calls.

The runner, its batches and the proposer are stand-ins with plain values.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hetero_spec.engine.seam import speculator_v2
from vllm_hetero_spec.engine.seam.async_scheduling import AsyncStepInfo
from vllm_hetero_spec.engine.seam.runner_v2 import RunnerV2
from vllm_hetero_spec.engine.seam.speculator_v2 import HeteroSpeculator

DRAFTED = 4
SPEC = SimpleNamespace(
    hetero=SimpleNamespace(num_speculative_tokens=DRAFTED, tree_nodes=0),
    num_speculative_tokens=DRAFTED,
)


def new(req_id: str, **params: Any) -> SimpleNamespace:
    from vllm import SamplingParams

    return SimpleNamespace(
        req_id=req_id,
        sampling_params=SamplingParams(**params),
        prompt_embeds=None,
        mm_features=[],
    )


def output_of(*started: Any, finished: str = "", preempted: str = "", **drafted: Any) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=list(started),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None,
        scheduled_spec_decode_tokens=drafted,
        total_num_scheduled_tokens=6,
        num_scheduled_tokens=dict.fromkeys("ab", 1),
        num_spec_tokens_to_schedule=DRAFTED,
    )


@pytest.fixture
def runner() -> SimpleNamespace:
    """A runner with three slots: "a" has the last one and "b" the first."""
    texts = np.arange(30, dtype=np.int32).reshape(3, 10)
    uva = SimpleNamespace(np=texts)
    return SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=3,
        num_speculative_steps=DRAFTED,
        max_model_len=100,
        req_states=SimpleNamespace(
            req_id_to_index={"a": 2, "b": 0},
            all_token_ids=SimpleNamespace(_uva_buf=uva),
            total_len=SimpleNamespace(gpu=torch.tensor([6, 0, 5], dtype=torch.int32)),
            prompt_len=SimpleNamespace(np=np.array([6, 0, 3])),
            draft_tokens=torch.full((3, DRAFTED), 99),
        ),
        sampler=SimpleNamespace(
            sampling_states=SimpleNamespace(seeds=SimpleNamespace(np=np.array([70, 0, 3]))),
            logprob_token_ids_state=SimpleNamespace(max_num_token_ids=max),
        ),
        draft_tokens_handler=None,
        lora_state=SimpleNamespace(make_lora_inputs=lambda ids, *_: ((4, 5), "tokens", "active")),
        model_memory_usage=0,
        use_pp=False,
        speculative_config=SPEC,
        vllm_config=SimpleNamespace(
            speculative_config=SPEC,
            scheduler_config=SimpleNamespace(async_scheduling=False),
        ),
        get_model=lambda: "the target",
        uses_inputs_embeds=False,
        pcp_manager=None,
        adaptive_verification=None,
        model_state=SimpleNamespace(prepare_inputs=lambda batch, states: {"states": states}),
    )


@pytest.fixture
def batch() -> SimpleNamespace:
    """A batch of the requests a and b."""
    places = np.array([2, 0])
    return SimpleNamespace(
        req_ids=["a", "b"],
        num_reqs=2,
        idx_mapping_np=places,
        idx_mapping=torch.from_numpy(places),
    )


def batch_of_a(batch: Any) -> Any:
    """Return a batch of the request a alone."""
    places = batch.idx_mapping[:1]
    return SimpleNamespace(
        req_ids=["a"], num_reqs=1, idx_mapping=places, idx_mapping_np=places.numpy()
    )


SAMPLED = torch.tensor([2, 0])  # b is in prefill


def test_a_view_has_what_the_step_did(runner: Any, batch: Any) -> None:
    seam = RunnerV2(runner)
    seam.on_step_start(output_of(new("a", temperature=0.5, seed=3), a=[7, 8]))
    seam.on_step_start(output_of(new("b"), a=[7, 8]))
    step = seam.view(seam.sampled(batch, SAMPLED))
    a, b = step.requests
    assert (a.req_id, a.num_prompt_tokens, a.num_output_tokens) == ("a", 3, 2)
    assert a.token_ids.tolist() == [20, 21, 22, 23, 24]
    assert list(a.new_tokens) == [23, 24]
    assert (a.params.temperature, a.params.noise_seed, a.params.random) == (0.5, 3, True)
    assert (b.num_tokens, list(b.new_tokens), b.num_drafted) == (6, [], 0)
    assert (sum(step.going_on), step.num_new_tokens, step.lookahead) == (1, 2, DRAFTED)
    assert (step.started, set(step.live)) == ({"a": None, "b": None}, {"a", "b"})
    assert step.target_seconds is step.step_seconds is None
    seam.on_drafts_taken()
    again = seam.view(seam.sampled(batch, SAMPLED))
    assert 0 <= again.target_seconds <= again.step_seconds


def test_adapters_of_the_head_are_named_for_each_row_of_logits(runner: Any) -> None:
    """Each row of logits has the LoRA adapter of its request."""
    seam = RunnerV2(runner)
    seam.map_adapters_by_row()
    seam.on_step_start(output_of(new("a"), new("b"), a=[7, 8]))
    named = runner.lora_state.make_lora_inputs(["a", "b"], "slots", "scheduled")
    assert named == ((4, 4, 4, 5), "tokens", "active")


def test_preempted_requests_come_back_and_others_of_the_same_id_are_new(
    runner: Any, batch: Any
) -> None:
    """A resumed request is not new; another request with the same id is."""
    seam = RunnerV2(runner)
    seam.on_step_start(output_of(new("a"), new("b", temperature=0.5)))
    seam.on_step_start(output_of(preempted="b"))
    assert set(seam.view(seam.sampled(batch, SAMPLED)).live) == {"a", "b"}  # b waits
    seam.on_step_start(output_of(new("b", temperature=0.5)))
    assert seam.view(seam.sampled(batch, SAMPLED)).started == {}
    seam.on_step_start(output_of(new("b", temperature=0.9), preempted="a"))
    again = seam.view(seam.sampled(batch, SAMPLED))
    assert again.started == {"b": None}
    assert again.requests[1].params.temperature == 0.9
    seam.on_step_start(output_of(new("a"), finished="a"))  # aborted; a new request has its id
    assert seam.view(seam.sampled(batch, SAMPLED)).started == {"a": None}
    seam.on_step_start(output_of(finished="ab"))
    assert not seam._new
    assert not seam._params
    assert not seam._preempted


def test_drafts_are_put_where_the_requests_are(runner: Any, batch: Any) -> None:
    seam = RunnerV2(runner)
    told = seam.take_drafts(batch, [[5, 6], []])
    assert (told.req_ids, told.draft_token_ids) == (["a", "b"], [[5, 6], []])
    seam.inputs.put(batch, [[5, 6], []])
    assert runner.req_states.draft_tokens[2, :2].tolist() == [5, 6]
    assert runner.req_states.draft_tokens[1].tolist() == [99] * DRAFTED  # slot without a request
    assert runner.req_states.draft_tokens.min() >= 0  # vLLM embeds these ids
    assert seam.inputs.nothing(batch).shape == (2, DRAFTED)


def test_drafts_follow_where_all_else_of_a_step_is_prepared(runner: Any, batch: Any) -> None:
    """The prepared step has two prompt tokens of c, then b and then a.

    Each of b and a has its last token and its draft positions.
    """
    runner.vllm_config.scheduler_config.async_scheduling = True
    seam = RunnerV2(runner)
    seam.on_step_start(output_of(new("a"), new("b")))
    seam.on_step_start(output_of(new("c"), a=[-1] * 3, b=[-1] * 2))
    told = seam.take_drafts(batch, [[5, 6], [7, 8, 9]], late=True)
    assert told.draft_token_ids == [[5, 6], [7, 8, 9]]
    prepared = SimpleNamespace(
        req_ids=["c", "b", "a"],
        num_reqs=3,
        num_draft_tokens_per_req=np.array([0, 2, 3], np.int32),
        query_start_loc_np=np.array([0, 2, 5, 9, 9], np.int32),
        input_ids=torch.arange(40, 52, dtype=torch.int32),
    )
    seam.inputs.filling(prepared)(seam.drafts_of_running_step())
    ids = [40, 41, 42, 7, 8, 45, 5, 6, 0, 49, 50, 51]
    assert prepared.input_ids.tolist() == ids
    assert (seam._verified, runner.req_states.draft_tokens.min()) == ({"a": 2, "b": 2}, 99)
    prepared.num_draft_tokens_per_req = None
    seam.inputs.filling(prepared)(seam.drafts_of_running_step())
    assert prepared.input_ids.tolist() == ids


@pytest.mark.parametrize("how", ["finished", "preempted", "started"])
def test_who_comes_or_goes_with_a_step_has_no_draft_of_the_one_before(
    runner: Any, batch: Any, how: str
) -> None:
    """A request that begins, ends or is preempted in the running step gets no late draft."""
    seam = RunnerV2(runner)
    seam.on_step_start(output_of(new("a"), new("b")))
    started = [new("a")] if how == "started" else []
    seam.on_step_start(output_of(*started, **({} if started else {how: "a"})))
    told = seam.take_drafts(batch, [[5, 6], [7]], late=True)
    assert (told.req_ids, told.draft_token_ids) == (["a", "b"], [[], [7]])
    assert seam._drafted == {"b": [7]}


def test_padding_behind_drafts_is_not_theirs(runner: Any, batch: Any) -> None:
    """Scheduled positions beyond a draft's length are padding, not draft tokens."""
    runner.vllm_config.scheduler_config.async_scheduling = True
    seam = RunnerV2(runner)
    batch.cu_num_logits_np = np.array([0, 5, 10])
    made_up = output_of(new("a"), new("b"), a=[-1] * DRAFTED, b=[-1] * DRAFTED)
    seam.on_step_start(made_up)
    assert seam.batch(batch).lengths == [0, 0]  # nothing has been drafted
    assert seam.batch(batch).named == 2  # the stand-in returns the largest slot
    seam.take_drafts(batch, [[5, 6], []])
    seam.inputs.put(batch, [[5, 6], []])
    assert runner.req_states.draft_tokens[[2, 0]].min() >= 0  # the target computes padding, too
    made_up.scheduled_new_reqs = []
    seam.on_step_start(made_up)
    assert seam.batch(batch).lengths == [2, 0]
    step = seam.view(seam.sampled(batch, SAMPLED))
    assert [(r.num_drafted, r.num_padding) for r in step.requests] == [(2, 2), (0, 4)]
    assert (step.buckets, step.decodes_only) == ([0, 2, 4], False)
    output = SimpleNamespace()
    seam.attach_to_output(output, 2)
    assert output.hetero_spec_ahead == AsyncStepInfo(2, {"a": 2, "b": 4})
    seam.on_step_start(output_of(a=[-1]))  # the scheduler had room for one
    assert seam.batch(batch).lengths == [1, 0]


def test_a_draft_is_none_of_the_places_behind_a_preemption(runner: Any, batch: Any) -> None:
    """vLLM schedules draft positions for a resumed request; they are padding.

    All requests of a step then have equally many rows.
    """
    seam = RunnerV2(runner)
    batch.cu_num_logits_np = np.array([0, 5, 6])
    seam.on_step_start(output_of(new("a"), new("b")))
    seam.take_drafts(batch, [[5, 6], []])
    seam.on_step_start(output_of(preempted="a"))
    seam.on_step_start(output_of(new("a"), a=[-1] * DRAFTED))
    assert seam.batch(batch).lengths == [0, 0]
    step = seam.view(seam.sampled(batch, SAMPLED))
    assert [(r.num_drafted, r.num_padding) for r in step.requests] == [(0, 4), (0, 0)]


def test_nothing_is_left_of_one_that_is_preempted_and_over_at_once(runner: Any) -> None:
    """If a request is preempted and ends in one step, its id is new when it is used again."""
    seam = RunnerV2(runner)
    seam.on_step_start(output_of(new("a")))
    seam.on_step_start(output_of(finished="a", preempted="a"))
    seam.on_step_start(output_of(new("a")))
    assert seam._started == {"a": None}


def test_a_draft_is_none_of_another_request_with_its_name(runner: Any, batch: Any) -> None:
    """A new request with the id of an earlier one does not get its draft."""
    seam = RunnerV2(runner)
    batch.cu_num_logits_np = np.array([0, 5, 6])
    seam.on_step_start(output_of(new("a"), new("b")))
    seam.take_drafts(batch, [[5, 6], []])
    seam.on_step_start(output_of(new("a"), a=[-1] * DRAFTED))
    assert seam.batch(batch).lengths == [0, 0]


class _Proposer:
    """Stand-in whose `finish` drafts one token for each request: the request's index."""

    def __init__(self) -> None:
        self.warm = False
        self.calls: list[str] = []
        self.drafts: list[list[int]] = []
        self.seen: list[Any] = []

    def bind(self, seam: Any) -> None:
        self.seam = seam

    def load_model(self, target_model: Any) -> None:
        self.calls.append(f"load beside {target_model}")

    def after_step(self, view: Any, num_requests: int) -> list[list[int]]:
        self.calls.append("begin")
        assert len(view().requests) == num_requests
        self.drafts = [[] for _ in range(num_requests)]
        return self.drafts

    def skip_step(self, num_requests: int, without_drafts: bool | None, begun: bool) -> bool:
        self.calls += [f"{num_requests} pass by"] * bool(without_drafts)
        return bool(without_drafts)

    def look_back(self, view: Any, num_requests: int, *, hurried: bool) -> None:
        self.calls.append("look back" + " in a hurry" * hurried)
        self.seen.append(view())

    def finish(self) -> None:
        self.calls.append("finish")
        for index, draft in enumerate(self.drafts):
            draft.append(index)


def forward_of(runner: Any) -> dict[str, str]:
    """Return the last inputs that vLLM prepares for a forward, for a batch without drafts."""
    batch = SimpleNamespace(num_draft_tokens_per_req=None)
    found: dict[str, str] = runner.model_state.prepare_inputs(batch, "states")
    return found


def loaded(runner: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[HeteroSpeculator, Any]:
    """Return a speculator of a runner, and its proposer."""
    monkeypatch.setattr(speculator_v2, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    proposer: Any = _Proposer()
    speculator = HeteroSpeculator(proposer)
    speculator.load(runner)
    return speculator, proposer


def scheduled_ahead(runner: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[HeteroSpeculator, Any]:
    """Return a warm speculator of a runner with asynchronous scheduling, and its proposer."""
    runner.vllm_config.scheduler_config.async_scheduling = True
    speculator, proposer = loaded(runner, monkeypatch)
    proposer.warm = True
    return speculator, proposer


def test_drafts_are_begun_when_sampled_and_finished_when_asked_for(
    runner: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With synchronous scheduling `propose` begins drafts and `get_draft_tokens` finishes them."""
    speculator, proposer = loaded(runner, monkeypatch)
    assert runner.draft_tokens_handler is speculator
    speculator.seam.on_step_start(output_of(new("a"), new("b")))
    nothing = (None,) * 4

    def propose(**changes: Any) -> torch.Tensor:
        return speculator.propose(batch, *nothing, SAMPLED, **changes)

    propose()  # vLLM warms up with its own requests
    proposer.warm = True
    propose(dummy_run=True)
    assert proposer.calls == ["load beside the target"]
    assert speculator.get_draft_tokens() is None
    assert propose().shape == (2, DRAFTED)
    speculator.set_draft_tokens(batch, propose())  # the first drafts are never taken
    told = speculator.get_draft_tokens()
    assert told.draft_token_ids == [[0], [1]]
    assert proposer.calls[1:] == ["begin", "begin", "finish"]
    assert runner.req_states.draft_tokens[[2, 0], 0].tolist() == [0, 1]
    assert speculator.get_draft_tokens() is None


@pytest.mark.parametrize("following", ["a", "c"])
def test_a_step_scheduled_ahead_is_looked_at_when_the_next_begins(
    runner: Any, batch: Any, following: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading waits for the device, and would delay the tokens of the step before.

    If no request of a step continues, the engine may have been idle before the next step. The view
    then has no `step_seconds`.
    """
    speculator, proposer = scheduled_ahead(runner, monkeypatch)
    views: list[Any] = []
    after_step = proposer.after_step
    proposer.after_step = lambda view, n: after_step(lambda: views.append(view()) or views[-1], n)
    outputs = [output_of(new("a"), new("b")), output_of(), output_of(new("c")), output_of()]
    scheduled = ["ab", "ab", following, "abc"]
    for output, names in zip(outputs, scheduled, strict=True):
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        speculator.on_step_start(output)
        forward_of(runner)
        calls = list(proposer.calls)
        speculator.propose(batch, *(None,) * 4, SAMPLED)
        assert proposer.calls == calls
        speculator.seam.on_drafts_taken()
    assert proposer.calls[1:] == ["begin", "finish"] * 3
    assert all(view.target_seconds is not None for view in views)
    assert [view.step_seconds is None for view in views] == [True, False, following == "c"]
    assert speculator.seam._output is outputs[-1]


@pytest.mark.parametrize("reads", ["", "uses_inputs_embeds", "pcp_manager", "trees", "nothing"])
def test_a_step_scheduled_ahead_is_prepared_while_its_drafts_are_made(
    runner: Any, batch: Any, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions: other code needs the draft tokens earlier, or the step has no forward."""
    speculator, proposer = scheduled_ahead(runner, monkeypatch)
    if reads == "trees":
        speculator.seam.trees = SimpleNamespace(
            uneven=False,
            on_step_start=lambda output: None,
            room=lambda *_: None,
            on_drafts_taken=lambda *_: 0,
        )
    elif reads not in ("", "nothing"):
        setattr(runner, reads, True)
    for number in range(3):
        output = output_of(new("a"), new("b"))
        output.total_num_scheduled_tokens *= reads != "nothing"
        speculator.on_step_start(output)
        begun = ["begin", "finish"] * number
        assert proposer.calls[1:] == (begun if reads else begun[:-1])
        for _ in range(2):  # the second call is like one of vLLM's dummy runs
            assert forward_of(runner) == {"states": "states"}
            assert proposer.calls[1:] == begun
        speculator.propose(batch, *(None,) * 4, SAMPLED)


def test_who_is_over_is_not_drafted_for_again(
    runner: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous scheduling, one more step may contain a request that has ended."""
    speculator, proposer = scheduled_ahead(runner, monkeypatch)
    going_on: list[list[bool]] = []
    proposer.after_step = lambda view, _: going_on.append(view().going_on) or [[], []]
    both = torch.tensor([1, 1])
    for output in (output_of(new("a"), new("b")), output_of(), output_of(finished="a")):
        speculator.on_step_start(output)
        speculator.propose(batch, *(None,) * 4, both)
    assert going_on == [[True, True], [False, True]]


def test_pipeline_stages_are_given_drafts_at_once(
    runner: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler receives the drafts of all requests.

    It takes them only after another batch has sampled.
    """
    runner.use_pp = True
    speculator, proposer = scheduled_ahead(runner, monkeypatch)
    speculator.seam.on_step_start(output_of(new("a"), new("b")))
    given = speculator.propose(batch, *(None,) * 4, SAMPLED)
    assert proposer.calls[1:] == ["begin", "finish"]
    assert given[:, :2].tolist() == [[0, 0], [1, 0]]
    places = torch.tensor([1])
    others = SimpleNamespace(
        req_ids=["c"], num_reqs=1, idx_mapping=places, idx_mapping_np=places.numpy()
    )
    runner.req_states.req_id_to_index["c"] = 1
    speculator.seam.on_step_start(output_of(new("c")))
    speculator.propose(others, *(None,) * 4, SAMPLED[1:])
    told = speculator.get_draft_tokens()
    assert (told.req_ids, told.draft_token_ids) == (["a", "b", "c"], [[0], [1], [0]])
    speculator.seam.on_step_start(output_of(finished="b", a=[-1] * DRAFTED))
    # The step verifies the earlier draft of one token; the padding below refers to that draft.
    speculator.seam.take_drafts(batch_of_a(batch), [[5, 6]])
    output = SimpleNamespace()
    speculator.seam.attach_to_output(output, 4)
    assert output.hetero_spec_ahead == AsyncStepInfo(4, {"a": DRAFTED - 1})
    assert speculator.seam.take_drafts(others, [[]]).req_ids == ["a", "c"]


def test_steps_that_may_have_no_drafts_go_by(
    runner: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped steps are read later, when they have ended.

    The next view contains all requests that have started since the last one.
    """
    speculator, proposer = scheduled_ahead(runner, monkeypatch)
    views: list[Any] = []
    proposer.after_step = lambda view, _: views.append(view()) or [[], []]
    for number in range(10):
        output = output_of(new("a"), new("b")) if number == 0 else output_of()
        output.num_spec_tokens_to_schedule = 0 if number < 8 else 2
        speculator.on_step_start(output)
        forward_of(runner)
        speculator.propose(batch, *(None,) * 4, SAMPLED)
    assert proposer.calls[1:].count("2 pass by") == 8
    assert len(proposer.seen) == 8
    (view,) = views
    assert view.started == {"a": None, "b": None}
    assert view.step_seconds is not None


def test_steps_that_may_all_have_drafts_go_by_where_the_proposer_says_so(
    runner: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With synchronous scheduling a step is skipped if `skip_step` returns True."""
    speculator, proposer = loaded(runner, monkeypatch)
    proposer.warm = True
    asked: list[tuple[int, bool | None, bool]] = []
    proposer.skip_step = lambda *step: bool(asked.append(step) or len(asked) == 2)
    for output in (output_of(new("a"), new("b")), output_of(), output_of()):
        speculator.on_step_start(output)
        speculator.propose(batch, *(None,) * 4, SAMPLED)
        speculator.seam.on_drafts_taken()
        told = speculator.get_draft_tokens()
        assert (told is None) == (len(asked) == 2)
    assert asked == [(2, None, True), (2, None, False), (2, None, False)]
    assert proposer.calls[1:] == ["begin", "finish"] * 2


def config_of(**changes: Any) -> Any:
    plain = {
        "parallel_config": SimpleNamespace(enable_batch_sharded_sampling=None),
        "speculative_config": SimpleNamespace(hetero="options"),
    }
    return SimpleNamespace(**(plain | changes))


def test_v2_is_left_out_where_it_cannot_serve_us() -> None:
    """V2 is not chosen if a feature does not work with this package on V2."""
    from vllm_hetero_spec.engine.seam import runner_choice

    custom = "speculative method 'custom_class'"
    choose = partial(runner_choice._features, lambda config: [custom, "theirs"])
    assert choose(config_of()) == ["theirs"]
    assert choose(config_of(speculative_config=None)) == [custom, "theirs"]
    assert len(choose(config_of(watermark_config="some"))) == 2
    sharded = SimpleNamespace(enable_batch_sharded_sampling=True)
    assert len(choose(config_of(parallel_config=sharded))) == 2


class _Counts:
    """Counts in transfer until the test sets `there`."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.there = values, False

    def wait(self) -> np.ndarray:
        assert self.there, "a look that waits"
        return self.values.numpy()


@pytest.fixture
def is_idle(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[HeteroSpeculator, Any, list[_Counts]]:
    """A speculator, its proposer, and a list that receives the counts of each step."""
    speculator, proposer = scheduled_ahead(runner, monkeypatch)
    counts: list[_Counts] = []
    fetch = SimpleNamespace(fetch=lambda values: counts.append(_Counts(values)) or counts[-1])
    speculator.seam._counts = [fetch]
    return speculator, proposer, counts


def rest(speculator: HeteroSpeculator, batch: Any, *started: Any, **changes: Any) -> None:
    """Run one step without drafts."""
    output = output_of(*started, **changes)
    output.num_spec_tokens_to_schedule = 0
    speculator.on_step_start(output)
    forward_of(speculator.seam._runner)
    speculator.propose(batch, *(None,) * 4, torch.ones(batch.num_reqs, dtype=torch.int32))


def test_a_step_without_drafts_is_looked_at_once_it_has_ended(
    runner: Any, batch: Any, is_idle: Any
) -> None:
    """A step is read after it has ended and a later one has been queued.

    Only the newest ended step is read, and no step is read twice.
    """
    speculator, proposer, counts = is_idle
    rest(speculator, batch, new("a"), new("b"))
    for _ in range(3):
        rest(speculator, batch)
    assert proposer.calls[1:] == ["2 pass by"] * 3
    for step in counts[:3]:
        step.there = True
    rest(speculator, batch)
    assert proposer.calls[-2:] == ["2 pass by", "look back"]
    (seen,) = proposer.seen
    assert [list(request.new_tokens) for request in seen.requests] == [[24], [5]]
    assert (seen.started, seen.lookahead, seen.num_rows) == ({}, 0, 6)
    assert 0 <= seen.target_seconds <= seen.step_seconds
    rest(speculator, batch)
    assert len(proposer.seen) == 1
    counts[3].there = counts[4].there = True  # the queued step 5 has not ended
    rest(speculator, batch)
    assert proposer.calls[-1] == "look back"
    counts[5].there = counts[6].there = True
    rest(speculator, batch)
    assert proposer.calls[-1] == "look back in a hurry"
    assert len(proposer.seen) == 3


def test_drafts_are_looked_at_before_steps_without_them(
    runner: Any, batch: Any, is_idle: Any
) -> None:
    """Skipped steps that are older than a step with drafts are not read any more."""
    speculator, proposer, counts = is_idle
    rest(speculator, batch, new("a"), new("b"))
    rest(speculator, batch)
    for number in range(3):
        output = output_of()
        for step in counts:
            step.there = True
        speculator.on_step_start(output)
        forward_of(runner)
        speculator.propose(batch, *(None,) * 4, torch.tensor([1, 1]))
        expected = ["look back in a hurry"] if number == 0 else ["begin", "finish"]
        assert proposer.calls[-len(expected) :] == expected
    assert len(proposer.seen) == 1


@pytest.mark.parametrize("how", ["finished", "preempted", "back", "another"])
def test_who_has_gone_since_is_left_out_of_a_late_look(
    runner: Any, batch: Any, is_idle: Any, how: str
) -> None:
    """Its slot may contain the text of another request, which may even have the same id."""
    speculator, proposer, counts = is_idle
    rest(speculator, batch, new("a"), new("b"))
    if how in ("finished", "preempted"):
        rest(speculator, batch_of_a(batch), **{how: "b"})
    elif how == "back":
        rest(speculator, batch, preempted="b")
        rest(speculator, batch, new("b"))
    else:
        rest(speculator, batch, new("b"), finished="b")
    counts[0].there = True
    rest(speculator, batch_of_a(batch))
    (seen,) = proposer.seen
    assert [request.req_id for request in seen.requests] == ["a"]
    assert not seen.decodes_only  # the step's time includes rows of b
