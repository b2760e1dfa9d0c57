# SPDX-License-Identifier: Apache-2.0
"""Engines on a simulated device: no unexpected waits, no mixing of host and device tensors.

`test_device_apart.py` runs these tests in a child process. vLLM's CPU build uses its GPU code paths
here: separate buffers for host and device, and copies between them.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_pair import PROMPT
from device_apart import DEVICE, Apart, Event, Queued, device_apart
from vllm.utils import torch_utils

copied_there = torch_utils.async_tensor_h2d
from vllm.v1.worker.cpu import shm  # noqa: E402  # replaces CUDA functions, and also that one

torch_utils.async_tensor_h2d = copied_there
from harness import engine, metrics_of, proposer_of, slem  # noqa: E402
from tape_graphs import TapeGraphs  # noqa: E402
from test_recorded_engine import record  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.worker import cpu_model_runner  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

from vllm_hetero_spec import read_stats  # noqa: E402
from vllm_hetero_spec.lookahead.controllers import Fixed  # noqa: E402

V2 = os.environ.get("TRITON_INTERPRET") == "1"
ROOM = {"max_num_seqs": 8, "max_num_batched_tokens": 64}  # prompts come in chunks
MIXED = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "logprobs": 2, "seed": 3},
    {"bad_words": ["self"], "min_tokens": 5, "logprob_token_ids": [5, 300]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
]
GREEDY = [place for place, asked in enumerate(MIXED) if "temperature" not in asked]
WAYS: dict[str, dict[str, Any]] = {
    "hetero": {"method": "hetero"},
    "block": {"method": "union", "verification": "block", "controller": "confidence"},
    "races, trees": {"method": "tli", "verification": "race", "tree_nodes": 8},
    "slem, trees": {"tree_nodes": 8},
    "fuzzy": {"method": "tli", "verification": {"fuzzy": {"threshold": 0.1}}},
    "slrs": {"method": "slrs", "merge_candidates": 3},
    "timed": {"method": "push_forward", "controller": "goodput"},
}
# Files that wait for the device in every step by design: the controller `confidence` reads
# confidences between decode steps, and SLRS-n reads each token that it draws.
WAITING = {
    "block": ("token_picking.py",),
    "slrs": ("slrs_spans.py", "slrs.py", "path.py", "tree.py", "sampling.py"),
}


@pytest.fixture(scope="module", autouse=True)
def queued(chain_pair: Path) -> Iterator[Queued]:  # `chain_pair` is built first, on the host
    def init_v1(runner: Any, config: Any, device: Any) -> None:
        GPUModelRunner.__init__(runner, config, DEVICE)
        runner.use_cuda_graph = False

    with pytest.MonkeyPatch.context() as patch, device_apart() as queued:
        patch.setattr(cpu_model_runner.CPUModelRunner, "__init__", init_v1)
        for module in list(sys.modules.values()):
            if vars(module).get("async_tensor_h2d") is shm.async_tensor_h2d and module is not shm:
                patch.setattr(module, "async_tensor_h2d", copied_there)
        if V2:
            _of_v2(patch)
        yield queued


def _of_v2(patch: pytest.MonkeyPatch) -> None:
    import lanes
    from vllm.v1.worker.cpu import buffer_utils
    from vllm.v1.worker.gpu import model_runner

    init, argument = model_runner.GPUModelRunner.__init__, lanes._argument
    runner = model_runner.GPUModelRunner
    patch.setattr(runner, "__init__", lambda self, config, _: init(self, config, DEVICE))
    patch.setattr(lanes, "_argument", lambda x: argument(x.here if isinstance(x, Apart) else x))
    # With UVA, the device reads the memory of the host.
    patch.setattr(buffer_utils.UvaBuffer, "uva", lambda buffer, n=None: Apart(buffer.cpu[:n]))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return ["def add(self, a, b):\n    return", "import os\n", "class Stack:\n    def", "x = "] * 2


def answers(llm: Any, texts: list[str], every: list[dict[str, Any]] = MIXED) -> list[list[int]]:
    common = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    params = [SamplingParams(**(common | asked)) for asked in every]
    outputs = llm.generate(texts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(demo_pair: Path, texts: list[str]) -> list[list[int]]:
    with engine(demo_pair / "target", **ROOM) as llm:
        return answers(llm, texts)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_waits_and_nothing_is_on_the_other_side(
    way: str, demo_pair: Path, texts: list[str], alone: list[list[int]], queued: Queued
) -> None:
    spec = slem(demo_pair / "drafter", 3, **WAYS[way])
    with engine(demo_pair / "target", spec, **ROOM) as llm:
        for recorded in (False, True) if way == "hetero" else (False,):
            if recorded:
                graphs = record(llm)
            queued.waits.clear()
            ids = answers(llm, texts)
            assert [ids[place] for place in GREEDY] == [alone[place] for place in GREEDY]
            if "trees" in way:  # few requests, so that a step has room for trees
                answers(llm, texts[:3], MIXED[:1] * 3)
            ours = {wait.line for wait in queued.waits if wait.ours}
            assert all(line.startswith(WAITING.get(way, ())) for line in ours), ours
        assert proposer_of(llm).drafting.source.drafter.model.device == DEVICE
        stats, drafts = read_stats(llm), metrics_of(llm)
    assert "drafter_error" not in stats["skipped"]
    assert drafts["num_accepted_tokens"] > 0 or way == "timed"
    assert (stats["trees"] > 0) is ("trees" in way)
    if way == "hetero":
        assert graphs.replays > 15


def test_copies_between_host_and_device_are_not_recorded() -> None:
    """So the graphs of the test above contain no such copies."""
    here, there = torch.ones(2), torch.zeros(2, device=DEVICE)
    for work in (lambda: there.copy_(here), lambda: here.copy_(there), lambda: here.to(DEVICE)):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            TapeGraphs().capture(work)
    TapeGraphs().capture(lambda: there.copy_(there + 1))()


@pytest.mark.parametrize(("heat", "most"), [(0.0, 30), (1.0, 95)])
def test_few_operations_are_queued_in_a_step(
    heat: float, most: int, chain_pair: Path, queued: Queued
) -> None:
    """Each operation of this package is a kernel launch on a GPU, which costs time of the host.

    The number depends on the accepted tokens. Untrained weights make it the same on every machine.
    """
    texts = [PROMPT[start:] for start in range(8)]
    spec = slem(chain_pair / "drafter", 4, method="push_forward")
    with engine(chain_pair / "target", spec, max_num_seqs=8) as llm:
        wanted = [{"temperature": heat, "max_tokens": 24}] * len(texts)
        answers(llm, texts, wanted)  # warm-up
        queued.ours.clear()
        steps = read_stats(llm)["steps"]
        answers(llm, texts, wanted)
        steps = read_stats(llm)["steps"] - steps
    print(f"{queued.ours.total() / steps:.0f} operations in a step at temperature {heat}")
    assert queued.ours.total() <= most * steps, queued.ours.most_common(30)


@pytest.mark.skipif(not V2, reason="Model Runner V1 schedules one step after the other")
def test_at_rest_nothing_of_ours_waits(
    demo_pair: Path, queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no drafts are planned, the plugin views a step at most once, after it has ended.

    Here a step ends two steps later. More requests come than fit in a batch. Drafting begins at
    most three steps after the controller plans it: two steps are already queued, and one drafts.
    """
    spec = slem(demo_pair / "drafter", 3)
    prompts = [f"def function_{number}(self, value):\n" for number in range(9)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30 + 20 * number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    room = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    with engine(demo_pair / "target", **room) as llm:
        alone = [of.outputs[0].token_ids for of in llm.generate(prompts, params, use_tqdm=False)]
    with engine(demo_pair / "target", spec, **room) as llm:
        proposer, views, hurries = proposer_of(llm), list[Any](), list[bool]()
        proposer.drafting.control.controller = Fixed(0)
        llm.generate(prompts[:2], params[0], use_tqdm=False)  # the scheduler gets length 0
        look_back = proposer.look_back

        def noted(view: Any, num_requests: int, *, hurried: bool) -> None:
            hurries.append(hurried)
            look_back(lambda: views.append(view()) or views[-1], num_requests, hurried=hurried)

        monkeypatch.setattr(proposer, "look_back", noted)
        monkeypatch.setattr(Event, "lag", 7)
        before = read_stats(llm)
        queued.events.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        steps = read_stats(llm)["steps"] - before["steps"]
        assert steps > 200
        assert not [wait for wait in queued.events if wait.ours]
        assert queued.events  # vLLM's own waits for sampled tokens
        seen = len(views)
        assert 0.8 * steps < seen < steps
        assert sum(hurries) < 10  # only after a pause
        assert all(view.target_seconds is not None for view in views)
        lengths: dict[str, int] = {}
        for view in views:
            for request in view.requests:
                assert len(request.token_ids) > lengths.get(request.req_id, 0)
                lengths[request.req_id] = len(request.token_ids)
        driver, drafts = llm.llm_engine, read_stats(llm)["drafts"]
        driver.add_request("x", prompts[0], params[-1])
        for _ in range(20):
            driver.step()
        drafted, after_step = list[Any](), proposer.after_step

        def kept(view: Any, num_requests: int) -> Any:
            return after_step(lambda: drafted.append(view()) or drafted[-1], num_requests)

        monkeypatch.setattr(proposer, "after_step", kept)
        proposer.drafting.control.controller, wanted = Fixed(3), read_stats(llm)["steps"]
        while read_stats(llm)["drafts"] == drafts:
            driver.step()
        waited = read_stats(llm)["steps"] - wanted
        print(f"{seen} of {steps} steps seen at rest, drafts after {waited} steps")
        assert waited <= 1 + 3
        for _ in range(10):
            driver.step()
        assert len(drafted) >= 10
        assert all(view.target_seconds is not None for view in drafted)
        driver.abort_request(["x"])


def test_what_a_device_refuses_is_refused() -> None:
    """Otherwise the tests above could not fail."""
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    for mixed in (lambda: there + here, lambda: there[here.long()], lambda: here.add_(there)):
        with pytest.raises(RuntimeError, match="two devices"):
            mixed()
    with pytest.raises(RuntimeError, match="not supported"):
        there.numpy()


@pytest.mark.parametrize("inference", [False, True])
def test_what_waits_is_noted(inference: bool, queued: Queued) -> None:
    waits = queued.waits
    with torch.inference_mode(inference):
        there, here = torch.arange(3, device=DEVICE), torch.arange(3)
        for wait in (
            lambda: there.sum().item(),
            lambda: bool(there[0]),
            lambda: there.tolist(),
            lambda: there.cpu(),
            lambda: here.to(DEVICE),
            lambda: there.copy_(here),
            lambda: here.copy_(there),
            lambda: there[there > 1],
            lambda: there.nonzero(),
            lambda: there[[0, 1]],
        ):
            waits.clear()
            wait()
            assert len(waits) == 1
            assert waits[0].lines[0].startswith(__file__)
        waits.clear()
        there.copy_(here, non_blocking=True)
        assert here.to(DEVICE, non_blocking=True).tolist() == [0, 1, 2]
        assert len(waits) == 1  # `tolist`
        there.to(torch.float32).add_(1).softmax(-1)
        assert len(waits) == 1
