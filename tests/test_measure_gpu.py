# SPDX-License-Identifier: Apache-2.0
"""`measure_gpu.py` on a CPU: parts, deadline, output lines, and its work in an engine."""

import functools
import json
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _gpu_worker
import measure_gpu
import numpy as np
import pytest
import torch
from _host_sections import device_use
from harness import v2_environment
from measure_gpu import LOOKAHEAD, PARTS, RATES, SHAPES, Cell, Run, rounds, side_by_side
from tape_graphs import TapeGraphs
from toy_drafter import ToyDrafterModel, drafter_of

from vllm_hetero_spec.bench.load import Load, MeasurementError, Sample, Trace
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.recording import idle_step
from vllm_hetero_spec.staging import Sender

SCRIPT = Path(measure_gpu.__file__)
Lines = list[dict[str, Any]]


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class FakeEngine:
    """An engine that takes `seconds` for each load, and records all questions."""

    def __init__(self, clock: Clock, seconds: float, **worker: Any) -> None:
        self._clock, self._seconds, self._worker = clock, seconds, worker
        self.asked: list[Any] = []

    def ask(self, question: Any, until: float) -> Any:
        self.asked.append(question)
        if not isinstance(question, Load):
            return None
        self._clock.now += self._seconds
        trace = Trace([1] * 8, "", 0.0, [0.5, 1.0], [4, 4])
        return Sample([trace], self._seconds, worker=self._worker)


def lines_of(file: Path) -> Lines:
    return [json.loads(line) for line in file.read_text().splitlines()]


def options(demo_pair: Path, out: Path, minutes: int) -> list[str]:
    files = {"target": "target", "drafter": "drafter", "prompts": "prompts.jsonl"}
    given = [f"--{name}={demo_pair / file}" for name, file in files.items()]
    return [*given, f"--out={out}", f"--minutes={minutes}"]


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure_gpu, "time", clock)
    return clock


@pytest.fixture
def run(clock: Clock, tmp_path: Path, demo_pair: Path) -> Run:
    given = Namespace(
        minutes=1, out=tmp_path / "lines", verbose=False, target=demo_pair / "target",
        drafter=demo_pair / "drafter", prompts=demo_pair / "prompts.jsonl",
    )  # fmt: skip
    return Run(given, tmp_path)


def test_rates_give_their_acceptance_lengths() -> None:
    for length, rate in RATES.items():
        assert sum(rate**place for place in range(LOOKAHEAD + 1)) == pytest.approx(length, abs=1e-3)
    assert {cell.length for cell in measure_gpu.C} == RATES.keys()


def test_shapes_have_as_many_parameters_as_the_models() -> None:
    def parameters(of: dict[str, Any]) -> float:
        hidden, head = of["hidden_size"], of["head_dim"]
        heads = 2 * (of["num_attention_heads"] + of["num_key_value_heads"]) * head
        layer = hidden * (heads + 3 * of["intermediate_size"])
        return float(of["num_hidden_layers"] * layer + of["vocab_size"] * hidden)

    billions = {name: round(parameters(of) / 1e9, 2) for name, of in SHAPES.items()}
    assert billions["8B"] == 7.5  # 8.03 with the embedding table, of which a step reads few rows
    assert billions["0.5B"] == 0.49
    assert billions["1B"] == 1.24
    assert SHAPES["0.5B of the target"]["vocab_size"] == SHAPES["8B"]["vocab_size"]


def test_rounds_end_before_a_load_would_be_late(run: Run, clock: Clock) -> None:
    """In 60 seconds there is time for exactly two rounds of two cells of 13 seconds each."""
    alone, ours = FakeEngine(clock, 8.0), FakeEngine(clock, 5.0, steps=2, skipped={})
    run.served = {"alone": done(alone), "ours": done(ours)}
    assert rounds(run, "C", ["alone", "ours"], [Cell(1, 3), Cell(2, 1)], most=9)
    lines = lines_of(run.given.out)
    assert [line.get("round") for line in lines] == [0, 0, 1, 1, None, None]
    assert lines[0]["ours"]["rounds"] == 2
    assert lines[0]["ours"]["ms_a_round"] == 2500
    assert [line["of"] for line in lines[4:]] == [[1.6, 1.6]] * 2
    assert ours.asked[0] == ["gpu_set", [RATES[3]] * LOOKAHEAD, LOOKAHEAD]
    assert ours.asked[2] == ["gpu_set", [0.0] * LOOKAHEAD, 0]
    assert [len(question.prompts) for question in ours.asked[1::2]] == [1, 2, 1, 2]


def test_faults_of_a_drafter_are_not_good(run: Run, clock: Clock) -> None:
    faulty = FakeEngine(clock, 1.0, steps=2, skipped={"drafter_error": 1})
    run.served = {"ours": done(faulty)}
    assert not rounds(run, "C", ["ours"], [Cell(1, 3)], most=1)


def test_an_engine_that_is_late_is_left_out(run: Run, clock: Clock) -> None:
    alone = FakeEngine(clock, 1.0)
    failed: Future[Any] = Future()
    failed.set_exception(MeasurementError("it is broken"))
    run.served = {"alone": done(alone), "ours": Future(), "draft_model": failed}
    run.until = clock.now
    assert not rounds(run, "C", list(run.served), [Cell(1, None)], most=1)
    lines = lines_of(run.given.out)
    assert {line["engine"]: line["error"] for line in lines} == {
        "draft_model": "it is broken",
        "ours": "it has not started yet",
    }
    run.until += 60
    run.served = {"alone": done(alone), "draft_model": failed}
    assert not rounds(run, "C", list(run.served), [Cell(1, None)], most=1)
    assert lines_of(run.given.out)[-1]["alone"]["tokens_per_second"] == 8


def test_a_job_that_fails_is_a_line(run: Run) -> None:
    def job(name: str) -> dict[str, int]:
        if name == "bad":
            raise MeasurementError("it is broken")
        return {"ms": 3}

    assert dict(side_by_side(run, "B", ["bad", "good"], job)) == {"good": {"ms": 3}}
    bad, good = lines_of(run.given.out)
    assert (bad["setup"], bad["error"]) == ("bad", "it is broken")
    assert (good["part"], good["setup"], good["ms"]) == ("B", "good", 3)


@pytest.mark.parametrize(
    ("outcomes", "code"), [("good", 0), ("good late", 3), ("late bad good", 1), ("bad late", 1)]
)
def test_exit_codes_of_late_and_wrong_parts(
    clock: Clock, demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], outcomes: str, code: int,
) -> None:  # fmt: skip
    """Later parts get the rest of the time."""

    def part(outcome: str) -> Any:
        def work(run: Run) -> bool:
            if outcome == "late":
                clock.now = run.until
                raise MeasurementError("no answer")
            return outcome == "good"

        return work

    shares = (0.3, 0.6, 1.0)
    parts = {of: (part(of), share) for of, share in zip(outcomes.split(), shares, strict=False)}
    monkeypatch.setattr(measure_gpu, "PARTS", parts)
    monkeypatch.setattr(Run, "serve", lambda self: None)
    out = tmp_path / "out"
    given = options(demo_pair, out, minutes=1)
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", *given, "--parts", *parts])
    assert measure_gpu.main() == code
    lines = lines_of(out)
    assert [(line["part"], line["ok"], line["late"]) for line in lines] == [
        (of, of == "good", of == "late") for of in parts
    ]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines


def test_imposed_acceptance_ignores_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests have three rows each. The second draft is one token and one padding token."""
    pytest.importorskip("triton")
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_hetero_spec.engine.verifier.rejection_sampler_v2 import HeteroRejectionSamplerV2

    verified: list[list[int]] = []
    monkeypatch.setattr(
        RejectionSampler, "_verify", lambda self, *args: verified.append(args[-1].tolist())
    )
    view = SimpleNamespace(lengths=[2, 1], first_rows=np.array([0, 3, 6], np.int32))
    sampler = SimpleNamespace(_view=view, synthetic_conditional_rates=None)
    sampler._first = functools.partial(HeteroRejectionSamplerV2._first, sampler)
    sampler._send = Sender(torch.device("cpu")).send

    def verify(logits: str, ids: torch.Tensor) -> str:
        sampler._verified = 2
        return logits + " are ours"

    sampler._verify = verify
    _gpu_worker.impose(sampler)
    ids = torch.tensor([10, 11, 12, 20, 21, 0])
    sampler._verified = 0
    assert sampler._verify("logits", ids) == "logits are ours"
    assert not verified
    sampler._verified = 0
    sampler.synthetic_conditional_rates = torch.zeros(2)
    assert sampler._verify("logits", ids) is None
    assert verified == [[-1, 11, 12, -1, 21, -1]]


def test_forwards_are_replayed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(ToyDrafterModel(), LOOKAHEAD, 4)
    graphs = TapeGraphs()
    sizes = [(size, width) for size in (1, 4) for width in (1, 4, 8)]
    drafter.record(graphs.capture, sizes, GraphSupport(in_graph=True, several_tokens=True))
    step = functools.partial(idle_step, drafter)
    source = SimpleNamespace(drafter=drafter, step=step, pool=SimpleNamespace(capacity=8))
    worker = _gpu_worker.GpuWorker()
    drafting = SimpleNamespace(source=source)
    worker.model_runner = SimpleNamespace(drafter=SimpleNamespace(drafting=drafting))
    counted: list[int] = []

    def counts(work: Any) -> float:
        before = graphs.replays
        for _ in range(2 * drafter.most_steps):  # more often than a plan has lines
            work()
        counted.append(graphs.replays - before)
        return 1.0

    monkeypatch.setattr(_gpu_worker, "milliseconds", counts)
    times = worker.gpu_forwards([1, 4], [16])
    assert set(times) == {
        "step, batch 1", "step, batch 4", "batch 1, width 0, 16 tokens",
        "batch 1, width 4, 16 tokens", "batch 4, width 0, 16 tokens", "batch 4, width 4, 16 tokens",
    }  # fmt: skip
    assert set(counted) == {2 * drafter.most_steps}


def test_idle_times_of_the_device_by_section() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("user_annotation", "plan", 0, 1500),
        event("user_annotation", "wait", 1500, 4500),
        event("kernel", "gemm", 1000, 1000),
        event("kernel", "beside it", 1500, 1000),
        event("gpu_memcpy", "Memcpy HtoD", 4000, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 900, 10),
        event("cuda_runtime", "cudaStreamSynchronize", 2000, 3000),
        {"ph": "M", "name": "process_name"},
    ]
    use = device_use(events, rounds=2)
    assert use["busy_ms"] == 1.25
    assert use["idle_ms"] == {"plan": 0.5, "wait": 1.25}
    assert use["counts"] == {"kernels": 1.0, "Memcpy HtoD": 0.5, "waits": 0.5}
    assert device_use(events[:1], rounds=1)["idle_ms"] == {"plan": 1.5}


@pytest.fixture(scope="module")
def lines(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Output lines of all parts, from engines on Model Runner V2 with asynchronous scheduling."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("measured") / "lines.jsonl"
    command = [sys.executable, str(SCRIPT), *options(demo_pair, out, minutes=60)]
    run = subprocess.run(
        command, env=v2_environment() | {"V2_AHEAD": "1"}, stdout=subprocess.PIPE, text=True
    )
    printed = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, printed
    assert lines_of(out) == printed
    assert [line["part"] for line in printed if "ok" in line] == list(PARTS)
    return printed


@pytest.mark.full
@pytest.mark.engine
def test_texts_are_the_targets_own(lines: Lines) -> None:
    (verdict,) = [line for line in lines if line["part"] == "A" and "same" in line]
    assert verdict["same"] == dict.fromkeys(("alone", "eager", "itself"), verdict["texts"])
    assert 0 < verdict["accepted"]["eager"] < verdict["accepted"]["itself"] == 1


@pytest.mark.full
@pytest.mark.engine
def test_forwards_are_timed_beside_a_tiny_target(lines: Lines) -> None:
    (times,) = [line for line in lines if line["part"] == "B" and "setup" in line]
    assert {"step, batch 1", "step, batch 2"} <= times.keys()


@pytest.mark.full
@pytest.mark.engine
def test_acceptance_is_imposed_on_both_drafters(lines: Lines) -> None:
    cells = [line for line in lines if line["part"] == "C" and "round" in line]
    for name in ("ours", "draft_model"):
        lengths = {tuple(of["cell"].values())[:2]: of[name]["length"] for of in cells}
        assert lengths[8, 1] in (1, None)
        assert 1.5 < lengths[8, 3] < 5
    assert all(of["ours"]["drafts"] > 0 for of in cells if of["cell"]["length"] == 3)
    ratios = [line for line in lines if line["part"] == "C" and "ratio" in line]
    assert len(ratios) == 2 * len(cells)


@pytest.mark.full
@pytest.mark.engine
def test_a_drafter_that_recites_as_the_target_does_is_accepted(lines: Lines) -> None:
    """Part S imposes no acceptance. It runs after loads without drafts."""
    lengths = [line["ours"]["length"] for line in lines if line["part"] == "S" and "round" in line]
    assert any(lengths)
    assert all(length > 4 for length in lengths if length is not None)


@pytest.mark.full
@pytest.mark.engine
def test_a_profile_has_the_sections_of_a_round(lines: Lines) -> None:
    profiles = [line for line in lines if line["part"] == "D" and "engine" in line]
    assert [line["engine"] for line in profiles] == ["ours"] * 3 + ["alone"] * 3
    for line in profiles:
        drafts = line["engine"] == "ours" and line["cell"]["length"] == 3
        assert {"execute_model", "sample_tokens"} <= line["idle_ms"].keys()
        assert drafts == ({"read", "translate", "wait"} <= line["idle_ms"].keys())
        assert line["rounds"] > 2
