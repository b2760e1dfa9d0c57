# SPDX-License-Identifier: Apache-2.0
"""vLLM measured in a child process: alone, with this plugin, and with vLLM's own method."""

import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from os import kill
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chain_pair import PROMPT
from goodness import follows, p_value
from harness import slem
from target_law import Setting, counted, law_of
from target_law import load as load_model
from vllm.platforms import current_platform

from vllm_hetero_spec.bench import vllm_engine
from vllm_hetero_spec.bench.child_process import processes
from vllm_hetero_spec.bench.load import Load, MeasurementError, Sample
from vllm_hetero_spec.bench.vllm_engine import EngineSpec, VllmEngine, since
from vllm_hetero_spec.errors import ConfigError

LOOKAHEAD = 4


@pytest.fixture(scope="module", autouse=True)
def engine_core_is_a_process() -> Iterator[None]:
    """Run the engine core in a process of its own, as in production, unlike in other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        yield


def tli(drafter: Path, lookahead: int = LOOKAHEAD) -> dict[str, Any]:
    """vLLM's own speculation across vocabularies."""
    return {
        "method": "draft_model",
        "model": str(drafter),
        "use_heterogeneous_vocab": True,
        "num_speculative_tokens": lookahead,
    }


def tokens(sample: Sample) -> list[list[int]]:
    return [trace.token_ids for trace in sample.traces]


def check(sample: Sample, load: Load) -> None:
    """Check what holds for every load.

    Times are in order, all tokens arrived, and no more requests ran at once than the batch size.
    """
    assert len(sample.traces) == len(load.prompts)
    for trace in sample.traces:
        assert 0 < len(trace.token_ids) == sum(trace.counts) <= load.max_tokens
        assert trace.sent < trace.times[0]
        assert trace.times == sorted(trace.times)
        assert trace.times[-1] < sample.seconds
    sent = [trace.sent for trace in sample.traces]
    assert sent == sorted(sent)
    for trace in sample.traces:
        before = [t for t in sample.traces if t.sent < trace.sent and t.times[-1] > trace.sent]
        assert len(before) < load.batch_size
    assert sample.peak_memory_bytes > 10 << 20


def check_drafts(sample: Sample, lookahead: int) -> None:
    """Check that the counters agree with one another and with the tokens that arrived."""
    assert 0 < sample.accepted_tokens <= sample.draft_tokens <= lookahead * sample.drafts
    assert sum(sample.accepted_per_position) == sample.accepted_tokens
    assert sample.accepted_per_position == sorted(sample.accepted_per_position, reverse=True)
    assert sample.accepted_per_position[0] <= sample.drafts
    # Accepted tokens after the end of a completion do not arrive.
    beyond_first = sum(sum(trace.counts) - len(trace.counts) for trace in sample.traces)
    assert 0 <= sample.accepted_tokens - beyond_first <= lookahead * len(sample.traces)
    assert max(max(trace.counts) for trace in sample.traces) <= lookahead + 1


@pytest.fixture(scope="module")
def loads(code_prompts: list[str]) -> list[Load]:
    """Loads of two batch sizes; the first load is repeated."""
    prompts = code_prompts[:5]
    return [Load(prompts, max_tokens=24, batch_size=size) for size in (1, 3, 1)]


@pytest.fixture(scope="module")
def alone(demo_pair: Path, loads: list[Load]) -> list[Sample]:
    with VllmEngine(EngineSpec(str(demo_pair / "target"), max_batch_size=3)) as engine:
        samples = [engine.run(load) for load in loads]
    assert list(processes(engine.pid)) == []
    return samples


@pytest.mark.full
@pytest.mark.engine
def test_the_target_alone(alone: list[Sample], loads: list[Load]) -> None:
    for sample, load in zip(alone, loads, strict=True):
        check(sample, load)
        assert tokens(sample) == tokens(alone[0])
        assert sample.acceptance_length is None
        assert sample.drafts == sample.draft_tokens == sample.accepted_tokens == 0
        assert sample.runner in ("V1", "V2")
        assert sample.dtype == "float32" or not current_platform.is_cpu()
        assert sample.worker == {}
        assert all(set(trace.counts) == {1} for trace in sample.traces)


@pytest.mark.full
@pytest.mark.engine
def test_our_method(demo_pair: Path, alone: list[Sample], loads: list[Load]) -> None:
    spec = EngineSpec(str(demo_pair / "target"), slem(demo_pair / "drafter", LOOKAHEAD), 3)
    with VllmEngine(spec) as engine:
        samples = [engine.run(load) for load in loads]
        with pytest.raises(ConfigError, match=r"^vLLM refuses this: .*2048"):
            engine.run(Load(["a ", "b " * 5000], max_tokens=8, batch_size=2))
        again = engine.run(loads[0])  # nothing remains of the refused load
    assert list(processes(engine.pid)) == []
    for sample, load in zip([*samples, again], [*loads, loads[0]], strict=True):
        check(sample, load)
        check_drafts(sample, LOOKAHEAD)
        assert tokens(sample) == tokens(alone[0])
        assert sample.worker["drafts"] == sample.drafts
        assert sample.worker["draft_tokens"] == sample.draft_tokens
        # Each load prefills its prompts again. A batch changes no draft. But long prompts in it
        # wait for the first tokens of other requests, so the counters may differ by a few tokens.
        read = samples[0].worker["catch_up_tokens"]
        assert sample.worker["catch_up_tokens"] == pytest.approx(read, rel=0.02)
        assert sample.drafts == pytest.approx(samples[0].drafts, abs=2 * len(load.prompts))
    assert samples[1].worker["steps"] < samples[0].worker["steps"]


@pytest.mark.full
@pytest.mark.engine
def test_a_method_of_vllms_own(demo_pair: Path, alone: list[Sample], loads: list[Load]) -> None:
    spec = EngineSpec(str(demo_pair / "target"), tli(demo_pair / "drafter"), max_batch_size=3)
    with VllmEngine(spec) as engine:
        sample = engine.run(loads[1])
    check(sample, loads[1])
    check_drafts(sample, LOOKAHEAD)
    assert tokens(sample) == tokens(alone[0])
    assert sample.worker == {}


@pytest.mark.full
@pytest.mark.engine
def test_requests_as_long_as_the_memory_holds(
    demo_pair: Path, alone: list[Sample], loads: list[Load]
) -> None:
    """The drafter serves a target whose longest sequence vLLM has shortened."""
    fitted = {"max_model_len": -1, "kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 2048}
    config = slem(demo_pair / "drafter", LOOKAHEAD)
    with VllmEngine(EngineSpec(str(demo_pair / "target"), config, 3, fitted)) as engine:
        assert tokens(engine.run(loads[1])) == tokens(alone[0])
        with pytest.raises(ConfigError, match=r"of 2000 tokens ended .* --max-tokens"):
            engine.run(Load(["a "], max_tokens=2000, ignore_eos=True))
        assert tokens(engine.run(loads[0])) == tokens(alone[0])


@pytest.mark.parametrize("room", [64, 32])
def test_trees_need_room_beside_the_longest_request(room: int) -> None:
    model = SimpleNamespace(
        original_max_model_len=-1,
        max_model_len=room,
        get_and_verify_max_len=lambda longest: 64,
        dtype="float32",
    )
    config = SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(hetero=SimpleNamespace(tree_nodes=8)),
        parallel_config=SimpleNamespace(worker_extension_cls=""),
        use_v2_model_runner=False,
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    refused = pytest.raises(ConfigError, match=r"only 32 tokens of one request; .*: 16\}")
    with refused if room < 64 else nullcontext():
        vllm_engine.Driver(llm)


def test_on_a_gpu_requests_are_as_long_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length given by the user has precedence; on a CPU requests are short."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert vllm_engine._engine_arguments(EngineSpec("m"))["max_model_len"] == -1
    given = EngineSpec("m", engine={"max_model_len": 64})
    assert vllm_engine._engine_arguments(given)["max_model_len"] == 64


@pytest.mark.parametrize("given", [{"max_model_len": -1}, {"max_model_len": None}, {}])
def test_on_a_cpu_the_cache_holds_requests_of_usual_length(
    demo_pair: Path, given: dict[str, Any]
) -> None:
    def room(engine: dict[str, Any]) -> int:
        spec = EngineSpec(str(demo_pair / "target"), engine=engine)
        return int(vllm_engine._engine_arguments(spec)["kv_cache_memory_bytes"])

    assert room(given) == room({}) > room({"max_model_len": 64})


@pytest.mark.full
@pytest.mark.engine
def test_models_that_vllm_refuses(tmp_path: Path, demo_pair: Path) -> None:
    with pytest.raises(ConfigError, match=r"the configuration of .*absent cannot be read"):
        VllmEngine(EngineSpec(str(tmp_path / "absent")))
    config = slem(demo_pair / "drafter")
    with pytest.raises(ConfigError, match="tensor_parallel is 'tp9'"):
        VllmEngine(EngineSpec(str(demo_pair / "target"), config | {"tensor_parallel": "tp9"}))


@pytest.mark.full
@pytest.mark.engine
def test_an_engine_core_that_is_killed_at_work(demo_pair: Path, code_prompts: list[str]) -> None:
    endless = Load(code_prompts[:4] * 200, max_tokens=200, ignore_eos=True)
    with VllmEngine(EngineSpec(str(demo_pair / "target"))) as engine:
        (core,) = (
            int(process.name)
            for process in processes(engine.pid)
            if "EngineCore" in (process / "cmdline").read_text()
        )
        threading.Timer(2.0, kill, (core, signal.SIGKILL)).start()
        with pytest.raises(MeasurementError, match="the engine ended with exit code 1"):
            engine.run(endless)
    assert list(processes(engine.pid)) == []


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("repaired", [True, False])
def test_the_law_of_vllms_own_method_on_a_cpu(
    chain_pair: Path, repaired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the target's with the plugin. Without it, the test must detect that it is not."""
    if not current_platform.is_cpu():
        pytest.skip("the stock fault is of CPUs")
    if not repaired:
        monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # saves the start of a process
    count = 1500
    model, start = load_model(chain_pair / "target", PROMPT)
    law = law_of(model, start, Setting(0.8, top_p=0.5))
    options = {"max_tokens": 5, "batch_size": 64, "temperature": 0.8, "top_p": 0.5}
    load = Load([PROMPT] * count, **options, ignore_eos=True)
    drafts = tli(chain_pair / "drafter", lookahead=3)
    spec = EngineSpec(str(chain_pair / "target"), drafts, max_batch_size=64)
    with VllmEngine(spec) as engine:
        sample = engine.run(load)
    assert sample.drafts > count / 2
    if repaired:  # without the repair, temperatures are unwritten memory and the count is arbitrary
        assert sample.accepted_tokens > count / 20
    found = counted(trace.token_ids for trace in sample.traces)
    assert follows(found, law) is repaired, p_value(found, law)


def test_counters_of_the_warm_up_are_left_out() -> None:
    before = {"drafts": 3, "skipped": {"no_blocks": 1}, "positions": [4, 2]}
    after = {
        "drafts": 10,
        "skipped": {"no_blocks": 1, "catching_up": 2},
        "positions": [9, 3],
        "first seen": [1],
    }
    assert since(before, after) == {
        "drafts": 7,
        "skipped": {"no_blocks": 0, "catching_up": 2},
        "positions": [5, 1],
        "first seen": [1],
    }


def test_a_worker_rests_before_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would poll for more work, on a core that the first step of the load needs."""
    done: list[object] = []
    driver = object.__new__(vllm_engine.Driver)
    driver._warm, driver._extended, driver._runner, driver._dtype = set(), False, "V1", "float32"
    monkeypatch.setattr(driver, "_drive", lambda load: (done.append(load), ([], 1.0))[1])
    monkeypatch.setattr(driver, "_counters", lambda: (done.append("asked"), {"worker": {}})[1])
    monkeypatch.setattr(vllm_engine.time, "sleep", lambda seconds: done.append("rest"))
    load = Load(["a", "b", "c"], max_tokens=40, batch_size=2, seed=1)
    driver.run(load)
    driver.run(load)
    measured = ["asked", "rest", load, "asked"]
    assert done == [Load(["a", "b"], 16, batch_size=2, ignore_eos=True), *measured, *measured]


def test_each_dataset_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Load] = []
    driver = object.__new__(vllm_engine.Driver)
    driver._warm = set()
    monkeypatch.setattr(driver, "_drive", done.append)
    loads = [Load(["a"], 40), Load(["b"], 40), Load(["b"], 40, temperature=1.0)]
    for load in [*loads, *loads]:
        driver.warm_up(load)
    assert done == [load.warm_up for load in loads]
