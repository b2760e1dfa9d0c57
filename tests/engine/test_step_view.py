# SPDX-License-Identifier: Apache-2.0
"""Tests of `RunnerV1`: step views and batch views, built from a runner of plain values."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.seam.runner_v1 import RunnerV1
from vllm_hetero_spec.engine.trees import attention_v1


def request_of(prompt: int, output: list[int], **params: Any) -> SimpleNamespace:
    from vllm import SamplingParams

    return SimpleNamespace(
        num_prompt_tokens=prompt,
        output_token_ids=output,
        prompt_embeds=None,
        mm_features=[],
        sampling_params=SamplingParams(**params),
    )


@pytest.fixture
def runner() -> SimpleNamespace:
    """Three requests: "a" decodes, "b" prefills, "waits" is not in the batch."""
    hetero = SimpleNamespace(num_speculative_tokens=4, tree_nodes=0)
    spec = SimpleNamespace(hetero=hetero, num_speculative_tokens=4)
    return SimpleNamespace(
        requests={
            "a": request_of(3, [8, 9], temperature=0.5, seed=3),
            "b": request_of(6, []),
            "waits": request_of(2, [4]),
        },
        input_batch=SimpleNamespace(
            req_ids=["a", "b"],
            num_tokens_no_spec=np.array([5, 4]),
            token_ids_cpu=np.arange(20).reshape(2, 10),
            spec_token_ids=[[], []],
        ),
        max_model_len=100,
        model_config=SimpleNamespace(seed=0),
        speculative_config=spec,
        vllm_config=SimpleNamespace(speculative_config=spec),
    )


def output_of(drafted: dict[str, list[int]], new: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=req_id) for req_id in new],
        scheduled_spec_decode_tokens=drafted,
        total_num_scheduled_tokens=6,
        preempted_req_ids=None,
        num_spec_tokens_to_schedule=4,
    )


def test_full_graphs_are_for_chains(
    runner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reserves 16 rows per draft for trees; chains of four tokens still use graphs."""
    compilation = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24],
        max_cudagraph_capture_size=24,
    )
    config: Any = SimpleNamespace(
        num_speculative_tokens=16,
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        lora_config=None,
    )
    runner.device, runner.uniform_decode_query_len = torch.device("cpu"), 17
    runner.cudagraph_dispatcher = dispatcher = CudagraphDispatcher(config)
    monkeypatch.setattr(attention_v1, "nodes_of", lambda config: 8)
    RunnerV1(runner, attention_v1.trees_of(runner))
    rows = runner.uniform_decode_query_len
    compilation.adjust_cudagraph_sizes_for_spec_decode(rows)  # from here like vLLM
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, rows)
    for requests in (1, 2, 4):
        mode, batch = dispatcher.dispatch(5 * requests, uniform_decode=True)
        assert (mode, batch.num_tokens, batch.num_reqs) == (
            CUDAGraphMode.FULL,
            5 * requests,
            requests,
        )


def test_media_are_no_text(runner: SimpleNamespace) -> None:
    """Placeholder tokens of images and the like are not part of `prompt_text`."""
    places = [SimpleNamespace(offset=offset, length=2) for offset in (0, 1, 4)]
    runner.requests["b"].mm_features = [SimpleNamespace(mm_position=place) for place in places]
    runner.input_batch.num_tokens_no_spec[1] = 6
    a, b = RunnerV1(runner).view(output_of({}), [[9], []]).requests
    assert a.prompt_text.tolist() == [0, 1, 2]
    assert b.prompt_text.tolist() == [13]


def test_a_view_has_what_the_step_did(runner: SimpleNamespace) -> None:
    seam = RunnerV1(runner)
    assert runner.effective_drafter_max_model_len == 105
    step = seam.view(output_of({"a": [7, 8]}, new=("b",)), [[8, 9], []])
    a, b = step.requests
    assert (a.req_id, a.num_prompt_tokens, a.num_output_tokens, a.num_drafted) == ("a", 3, 2, 2)
    assert a.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert (a.params.temperature, a.params.noise_seed, a.params.random) == (0.5, 3, True)
    assert (b.num_tokens, list(b.new_tokens), b.num_drafted) == (4, [], 0)
    assert (sum(step.going_on), step.num_new_tokens, step.lookahead) == (1, 2, 4)
    assert step.started == {"b": None}
    assert set(step.live) == {"a", "b", "waits"}
    assert not step.decodes_only
    assert step.in_order([Draft.chain("a", [5, 6])]) == [[5, 6], []]


def test_places_behind_a_preemption_are_no_draft(runner: SimpleNamespace) -> None:
    """If a step preempts requests, scheduled positions without a draft are padding."""
    seam = RunnerV1(runner)
    output = output_of({"a": [-1] * 4})
    output.preempted_req_ids = {"waits"}
    step = seam.view(output, [[8], []])
    assert (step.requests[0].num_drafted, step.requests[0].num_padding) == (0, 4)
    assert set(step.preempted) == {"waits"}


def test_times_are_between_views_and_handing_out(runner: SimpleNamespace) -> None:
    """`target_seconds` begin when the drafts are taken, `step_seconds` with the last view."""
    seam = RunnerV1(runner)
    first = seam.view(output_of({}), [[8], [9]])
    assert first.target_seconds is first.step_seconds is None
    runner._draft_probs = "theirs"
    seam.on_drafts_taken()
    assert runner._draft_probs is None
    second = seam.view(output_of({"a": [1, 2, 3, 4]}), [[8], [9]])
    assert 0 <= second.target_seconds <= second.step_seconds
    assert second.decodes_only  # 6 scheduled tokens: two requests and four draft tokens


def test_parameters_are_read_once_and_those_of_the_same_id_anew(runner: SimpleNamespace) -> None:
    seam = RunnerV1(runner)

    def params() -> Any:
        return seam.view(output_of({}), [[8], [9]]).requests[0].params

    first = params()
    assert params() is first
    runner.requests["a"] = request_of(3, [], temperature=0.9)
    assert params().temperature == 0.9
    del runner.requests["waits"], runner.requests["b"]
    runner.input_batch.req_ids.remove("b")
    seam.view(output_of({}), [[8]])
    assert list(seam._params) == ["a"]


def test_requests_without_a_seed_are_given_one(runner: SimpleNamespace) -> None:
    """It depends on the engine's seed and the order of requests, so all ranks and runs agree."""

    def seeds() -> list[int]:
        return list(RunnerV1(runner).batch().noise_seeds)

    runner.requests["a"] = request_of(3, [])
    first = seeds()
    assert len(set(first)) == 2
    assert seeds() == first
    runner.model_config.seed = 1
    assert not set(seeds()) & set(first)
    runner.requests["a"] = request_of(3, [], seed=2**64 - 1)  # torch accepts it
    assert seeds()[0] == -1


def test_the_batch_that_tokens_are_chosen_for(runner: SimpleNamespace) -> None:
    seam = RunnerV1(runner)
    batch = seam.batch()
    assert (list(batch.req_ids), list(batch.num_output_tokens)) == (["a", "b"], [2, 0])
    assert batch.noise_seeds[0] == 3
    runner.input_batch.spec_token_ids = [[5, 6], [-1, -1]]
    assert seam.batch().void == ["b"]
    runner.input_batch.req_ids.clear()  # vLLM profiles with requests that do not exist
    assert not seam.batch().req_ids
