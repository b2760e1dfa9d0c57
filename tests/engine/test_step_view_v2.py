# SPDX-License-Identifier: Apache-2.0
"""`RunnerV2` and its speculator, beside stand-ins: views, transfer of drafts, order of calls."""

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
        req_id=req_id, sampling_params=SamplingParams(**params), prompt_embeds=None, mm_features=[]
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
            speculative_config=SPEC, scheduler_config=SimpleNamespace(async_scheduling=False)
        ),
        get_model=lambda: "the target",
        uses_inputs_embeds=False,
        pcp_manager=None,
        adaptive_verification=None,
        model_state=SimpleNamespace(prepare_inputs=lambda batch, states: {"states": states}),
    )


def batch_of(**slots: int) -> SimpleNamespace:
    """Return a batch of requests, which are in these slots of the runner."""
    places = np.array(list(slots.values()))
    return SimpleNamespace(
        req_ids=list(slots),
        num_reqs=len(slots),
        idx_mapping_np=places,
        idx_mapping=torch.from_numpy(places),
    )


@pytest.fixture
def batch() -> SimpleNamespace:
    """A batch of the requests a and b."""
    return batch_of(a=2, b=0)


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


def test_each_row_of_logits_has_the_adapter_of_its_request(runner: Any) -> None:
    seam = RunnerV2(runner)
    seam.map_adapters_by_row()
    seam.on_step_start(output_of(new("a"), new("b"), a=[7, 8]))
    named = runner.lora_state.make_lora_inputs(["a", "b"], "slots", "scheduled")
    assert named == ((4, 4, 4, 5), "tokens", "active")


def test_a_resumed_request_is_not_new_and_another_with_its_id_is(runner: Any, batch: Any) -> None:
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


def test_drafts_are_written_to_the_slots_of_their_requests(runner: Any, batch: Any) -> None:
    seam = RunnerV2(runner)
    told = seam.take_drafts(batch, [[5, 6], []])
    assert (told.req_ids, told.draft_token_ids) == (["a", "b"], [[5, 6], []])
    seam.inputs.put(batch, [[5, 6], []])
    assert runner.req_states.draft_tokens[2, :2].tolist() == [5, 6]
    assert runner.req_states.draft_tokens[1].tolist() == [99] * DRAFTED  # slot without a request
    assert runner.req_states.draft_tokens.min() >= 0  # vLLM embeds these ids
    assert seam.inputs.nothing(batch).shape == (2, DRAFTED)
    seam.inputs.nothing(batch)[:, 1:] = -1  # as vLLM does for shorter drafts
    assert not seam.inputs.nothing(batch).any()
    for length in (2, 4, 2):
        seam.inputs.nothing(batch, length)[:, length:] = -1
        given = seam.inputs.nothing(batch, length)
        assert given[:, :length].shape == (2, length)
        assert not given[:, :length].any()


def test_late_drafts_fill_a_prepared_step(runner: Any, batch: Any) -> None:
    """It has two prompt tokens of c, then the last token and draft positions of b and of a."""
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
def test_no_late_draft_for_a_request_that_begins_or_ends(runner: Any, batch: Any, how: str) -> None:
    seam = RunnerV2(runner)
    seam.on_step_start(output_of(new("a"), new("b")))
    started = [new("a")] if how == "started" else []
    seam.on_step_start(output_of(*started, **({} if started else {how: "a"})))
    told = seam.take_drafts(batch, [[5, 6], [7]], late=True)
    assert (told.req_ids, told.draft_token_ids) == (["a", "b"], [[], [7]])
    assert seam._drafted == {"b": [7]}


def test_positions_beyond_a_draft_are_padding(runner: Any, batch: Any) -> None:
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


def test_a_draft_has_the_place_of_its_first_token(runner: Any, batch: Any) -> None:
    """The place is the length of the output that the draft follows, also in a later step."""
    seam = RunnerV2(runner)
    batch.cu_num_logits_np = np.array([0, 5, 10])
    seam.on_step_start(output_of(new("a"), new("b")))
    seam.view(seam.sampled(batch, SAMPLED))
    seam.take_drafts(batch, [[5, 6], [7]])
    seam.on_step_start(output_of(b=[-1]))
    # Another step's view does not count, until its own drafts are taken.
    runner.req_states.total_len.gpu[:] = torch.tensor([8, 0, 7])
    others = batch_of(b=0)
    seam.view(seam.sampled(others, SAMPLED[:1]))
    output = output_of(a=[-1] * DRAFTED, b=[-1] * DRAFTED)
    seam.on_step_start(output)
    assert seam.batch(batch).num_output_tokens == [2, 0]
    seam.take_drafts(others, [[8]])
    seam.on_step_start(output)
    found = seam.batch(batch)
    assert (found.num_output_tokens, found.lengths) == ([2, 2], [2, 1])
    assert found.first_rows is batch.cu_num_logits_np
    seam.view(seam.sampled(batch, SAMPLED), late=True)
    seam.on_step_start(output_of(new("b"), preempted="a"))
    assert not seam._places


@pytest.mark.parametrize("preempted", ["a", ""], ids=["resumed", "another with its id"])
def test_positions_of_a_request_that_begins_are_padding(
    runner: Any, batch: Any, preempted: str
) -> None:
    """vLLM evens the rows of a step. A draft of the earlier request with this id is not used."""
    seam = RunnerV2(runner)
    batch.cu_num_logits_np = np.array([0, 5, 6])
    seam.on_step_start(output_of(new("a"), new("b")))
    seam.take_drafts(batch, [[5, 6], []])
    if preempted:
        seam.on_step_start(output_of(preempted=preempted))
    seam.on_step_start(output_of(new("a"), a=[-1] * DRAFTED))
    assert seam.batch(batch).lengths == [0, 0]
    step = seam.view(seam.sampled(batch, SAMPLED))
    assert [(r.num_drafted, r.num_padding) for r in step.requests] == [(0, 4), (0, 0)]


def test_an_id_is_new_after_a_preemption_and_an_end_in_one_step(runner: Any) -> None:
    seam = RunnerV2(runner)
    seam.on_step_start(output_of(new("a")))
    seam.on_step_start(output_of(finished="a", preempted="a"))
    seam.on_step_start(output_of(new("a")))
    assert seam._started == {"a": None}


class _Proposer:
    """Stand-in whose `finish` drafts one token for each request: the request's index."""

    def __init__(self) -> None:
        self.warm = False
        self.calls: list[str] = []
        self.drafts: list[list[int]] = []
        self.seen: list[Any] = []
        self.views: list[Any] = []

    def bind(self, seam: Any) -> None:
        self.seam = seam

    def load_model(self, target_model: Any) -> None:
        self.calls.append(f"load beside {target_model}")

    def after_step(self, view: Any, num_requests: int) -> list[list[int]]:
        self.calls.append("begin")
        self.views.append(view())
        assert len(self.views[-1].requests) == num_requests
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


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator_v2, "get_tp_group", lambda: SimpleNamespace(world_size=1))


def loaded(runner: Any) -> tuple[HeteroSpeculator, Any]:
    """Return a speculator of a runner, and its proposer."""
    proposer: Any = _Proposer()
    speculator = HeteroSpeculator(proposer)
    speculator.load(runner)
    return speculator, proposer


def scheduled_ahead(runner: Any) -> tuple[HeteroSpeculator, Any]:
    """Return a warm speculator of a runner with asynchronous scheduling, and its proposer."""
    runner.vllm_config.scheduler_config.async_scheduling = True
    speculator, proposer = loaded(runner)
    proposer.warm = True
    return speculator, proposer


def propose(
    speculator: HeteroSpeculator, batch: Any, sampled: torch.Tensor = SAMPLED, **changes: Any
) -> torch.Tensor:
    return speculator.propose(batch, *(None,) * 4, sampled, **changes)


def test_propose_begins_drafts_and_get_draft_tokens_finishes_them(runner: Any, batch: Any) -> None:
    speculator, proposer = loaded(runner)
    assert runner.draft_tokens_handler is speculator
    speculator.seam.on_step_start(output_of(new("a"), new("b")))
    propose(speculator, batch)  # vLLM warms up with its own requests
    proposer.warm = True
    propose(speculator, batch, dummy_run=True)
    assert proposer.calls == ["load beside the target"]
    assert speculator.get_draft_tokens() is None
    assert propose(speculator, batch).shape == (2, DRAFTED)
    speculator.set_draft_tokens(
        batch, propose(speculator, batch)
    )  # the first drafts are never taken
    told = speculator.get_draft_tokens()
    assert told.draft_token_ids == [[0], [1]]
    assert proposer.calls[1:] == ["begin", "begin", "finish"]
    assert runner.req_states.draft_tokens[[2, 0], 0].tolist() == [0, 1]
    assert speculator.get_draft_tokens() is None


def test_drafts_are_filled_in_after_a_step_without_their_requests(runner: Any, batch: Any) -> None:
    speculator, _ = scheduled_ahead(runner)
    forward_of(runner)  # start-up timing, before any step
    seam = speculator.seam
    seam.on_step_start(output_of(new("a"), new("b")))
    seam.take_drafts(batch, [[5, 6], [7]])
    seam.on_step_start(output_of(new("c")))
    forward_of(runner)
    seam.on_step_start(output_of(a=[-1] * 2, b=[-1] * 2))
    prepared = SimpleNamespace(
        req_ids=["a", "b"],
        num_reqs=2,
        num_draft_tokens_per_req=np.array([2, 2], np.int32),
        query_start_loc_np=np.array([0, 3, 6], np.int32),
        input_ids=torch.full((6,), -1, dtype=torch.int32),
    )
    speculator.fill(prepared)
    assert prepared.input_ids.tolist() == [-1, 5, 6, -1, 7, 0]
    assert seam._verified == {"a": 2, "b": 1}


@pytest.mark.parametrize("following", ["a", "c"])
def test_a_step_scheduled_ahead_is_read_when_the_next_begins(
    runner: Any, batch: Any, following: str
) -> None:
    """Reading waits for the device, and would delay the tokens of the step before.

    If no request of a step continues, the engine may have been idle before the next step. The view
    then has no `step_seconds`.
    """
    speculator, proposer = scheduled_ahead(runner)
    outputs = [output_of(new("a"), new("b")), output_of(), output_of(new("c")), output_of()]
    scheduled = ["ab", "ab", following, "abc"]
    for output, names in zip(outputs, scheduled, strict=True):
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        speculator.on_step_start(output)
        forward_of(runner)
        calls = list(proposer.calls)
        propose(speculator, batch)
        assert proposer.calls == calls
        speculator.seam.on_drafts_taken()
    assert proposer.calls[1:] == ["begin", "finish"] * 3
    assert all(view.target_seconds is not None for view in proposer.views)
    assert [view.step_seconds is None for view in proposer.views] == [True, False, following == "c"]
    assert speculator.seam._output is outputs[-1]


def test_nothing_is_drafted_for_a_request_that_was_preempted_since(runner: Any, batch: Any) -> None:
    """The engine may sleep, so that the drafter has no memory, when a preemption is reported."""
    speculator, proposer = scheduled_ahead(runner)
    for output in (output_of(new("a"), new("b")), output_of(preempted="b")):
        speculator.on_step_start(output)
        forward_of(runner)
        propose(speculator, batch)
    (view,) = proposer.views
    assert dict(zip(view.index_of, view.going_on, strict=True)) == {"a": True, "b": False}


@pytest.mark.parametrize("reads", ["", "uses_inputs_embeds", "pcp_manager", "trees", "nothing"])
def test_a_step_scheduled_ahead_is_prepared_while_its_drafts_are_made(
    runner: Any, batch: Any, reads: str
) -> None:
    """Exceptions: other code needs the draft tokens earlier, or the step has no forward."""
    speculator, proposer = scheduled_ahead(runner)
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
        propose(speculator, batch)


def test_a_request_that_has_ended_is_not_going_on(runner: Any, batch: Any) -> None:
    """With asynchronous scheduling, one more step may contain a request that has ended."""
    speculator, proposer = scheduled_ahead(runner)
    going_on: list[list[bool]] = []
    proposer.after_step = lambda view, _: going_on.append(view().going_on) or [[], []]
    both = torch.tensor([1, 1])
    for output in (output_of(new("a"), new("b")), output_of(), output_of(finished="a")):
        speculator.on_step_start(output)
        propose(speculator, batch, both)
    assert going_on == [[True, True], [False, True]]


def test_pipeline_stages_get_drafts_at_once(runner: Any, batch: Any) -> None:
    """The scheduler takes the drafts of all requests only after another batch has sampled."""
    runner.use_pp = True
    speculator, proposer = scheduled_ahead(runner)
    speculator.seam.on_step_start(output_of(new("a"), new("b")))
    given = propose(speculator, batch)
    assert proposer.calls[1:] == ["begin", "finish"]
    assert given[:, :2].tolist() == [[0, 0], [1, 0]]
    others = batch_of(c=1)
    runner.req_states.req_id_to_index["c"] = 1
    speculator.seam.on_step_start(output_of(new("c")))
    propose(speculator, others, SAMPLED[1:])
    told = speculator.get_draft_tokens()
    assert (told.req_ids, told.draft_token_ids) == (["a", "b", "c"], [[0], [1], [0]])
    speculator.seam.on_step_start(output_of(finished="b", a=[-1] * DRAFTED))
    # The step verifies the earlier draft of one token; the padding below refers to that draft.
    speculator.seam.take_drafts(batch_of(a=2), [[5, 6]])
    output = SimpleNamespace()
    speculator.seam.attach_to_output(output, 4)
    assert output.hetero_spec_ahead == AsyncStepInfo(4, {"a": DRAFTED - 1})
    assert speculator.seam.take_drafts(others, [[]]).req_ids == ["a", "c"]


def test_steps_without_drafts_are_skipped_with_asynchronous_scheduling(
    runner: Any, batch: Any
) -> None:
    """They are read when they have ended. The next view has all requests started since the last."""
    speculator, proposer = scheduled_ahead(runner)
    views: list[Any] = []
    proposer.after_step = lambda view, _: views.append(view()) or [[], []]
    for number in range(10):
        output = output_of(new("a"), new("b")) if number == 0 else output_of()
        output.num_spec_tokens_to_schedule = 0 if number < 8 else 2
        speculator.on_step_start(output)
        forward_of(runner)
        propose(speculator, batch)
    assert proposer.calls[1:].count("2 pass by") == 8
    assert len(proposer.seen) == 8
    (view,) = views
    assert view.started == {"a": None, "b": None}
    assert view.step_seconds is not None


def test_skip_step_skips_a_step_with_synchronous_scheduling(runner: Any, batch: Any) -> None:
    speculator, proposer = loaded(runner)
    proposer.warm = True
    asked: list[tuple[int, bool | None, bool]] = []
    proposer.skip_step = lambda *step: bool(asked.append(step) or len(asked) == 2)
    for output in (output_of(new("a"), new("b")), output_of(), output_of()):
        speculator.on_step_start(output)
        propose(speculator, batch)
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


def test_v2_is_not_chosen_with_features_that_need_v1() -> None:
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
def is_idle(runner: Any) -> tuple[HeteroSpeculator, Any, list[_Counts]]:
    """A speculator, its proposer, and a list that receives the counts of each step."""
    speculator, proposer = scheduled_ahead(runner)
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
    propose(speculator, batch, torch.ones(batch.num_reqs, dtype=torch.int32))


def test_a_step_without_drafts_is_read_after_its_end(runner: Any, batch: Any, is_idle: Any) -> None:
    """Only the newest step that ended before a queued one is read, and no step twice."""
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


def test_skipped_steps_before_a_draft_are_not_read(runner: Any, batch: Any, is_idle: Any) -> None:
    speculator, proposer, counts = is_idle
    rest(speculator, batch, new("a"), new("b"))
    rest(speculator, batch)
    for number in range(3):
        output = output_of()
        for step in counts:
            step.there = True
        speculator.on_step_start(output)
        forward_of(runner)
        propose(speculator, batch, torch.tensor([1, 1]))
        expected = ["look back in a hurry"] if number == 0 else ["begin", "finish"]
        assert proposer.calls[-len(expected) :] == expected
    assert len(proposer.seen) == 1


@pytest.mark.parametrize("how", ["finished", "preempted", "back", "another"])
def test_a_late_view_has_no_request_that_has_left_its_slot(
    runner: Any, batch: Any, is_idle: Any, how: str
) -> None:
    """Its slot may contain the text of another request, which may even have the same id."""
    speculator, proposer, counts = is_idle
    rest(speculator, batch, new("a"), new("b"))
    if how in ("finished", "preempted"):
        rest(speculator, batch_of(a=2), **{how: "b"})
    elif how == "back":
        rest(speculator, batch, preempted="b")
        rest(speculator, batch, new("b"))
    else:
        rest(speculator, batch, new("b"), finished="b")
    counts[0].there = True
    rest(speculator, batch_of(a=2))
    (seen,) = proposer.seen
    assert [request.req_id for request in seen.requests] == ["a"]
    assert not seen.decodes_only  # the step's time includes rows of b
