# SPDX-License-Identifier: Apache-2.0
"""The script for GPU machines, kept alive on a CPU: what it counts, never what it times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _gpu_graphs
import pytest
import torch
from _gpu_engine import Lesson, Profile, Record, Task
from _gpu_profile import device_use
from _gpu_ratios import _groups, _taught, part_c
from _gpu_setups import LOOKAHEAD, Options, Setups, running
from _gpu_watch import is_right
from tape_graphs import TapeGraphs
from toy_drafter import VOCAB, ToyDrafterModel

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.model import GraphSupport

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "measure_gpu.py"


def measured(folder: Path, *parts: str) -> tuple[list[dict[str, Any]], int]:
    """What the script prints of a folder's pair, and its exit code."""
    files = {"target": "target", "drafter": "drafter", "prompts": "prompts.jsonl"}
    given = [str(x) for name, file in files.items() for x in (f"--{name}", folder / file)]
    command = [sys.executable, str(SCRIPT), *given, "--parts", *parts]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


@pytest.fixture(scope="module")
def parts(demo_pair: Path) -> dict[str, dict[str, Any]]:
    """What parts 0, A and B found on the demo pair, by part."""
    found, code = measured(demo_pair, "0", "A", "B")
    assert [part["part"] for part in found] == ["0", "A", "B"]
    assert all(part["ok"] for part in found), found
    assert code == 0
    return {part["part"]: part for part in found}


@pytest.mark.full
@pytest.mark.engine
def test_a_pair_runs_at_all(parts: dict[str, dict[str, Any]]) -> None:
    assert parts["0"]["pair"]["drafts"] > 0
    assert parts["0"]["pair"]["engine"]["runner"] == "V1"


@pytest.mark.full
@pytest.mark.engine
def test_tokens_are_compared_one_by_one(parts: dict[str, dict[str, Any]]) -> None:
    setups = parts["A"]["setups"]
    assert list(setups) == [
        "alone", "eager", "target as drafter", "target as drafter, through text",
    ]  # fmt: skip
    assert {setup["same"] for setup in setups.values()} == {parts["A"]["prompts"]}
    assert 0 < setups["eager"]["accepted"] < setups["eager"]["drafted"]
    own = setups["target as drafter"]
    assert 0 < own["accepted"] == own["drafted"]
    assert parts["A"]["graphs"].startswith("there are no CUDA graphs")


@pytest.mark.full
@pytest.mark.engine
def test_forwards_are_timed_in_another_shape(parts: dict[str, dict[str, Any]]) -> None:
    eager = parts["B"]["modes"]["eager"]
    assert list(eager["step"]) == ["1", "8", "64"]
    assert list(eager["read"]) == ["4", "8"]
    assert set(eager["step_replay"].values()) == {None}


@pytest.mark.full
@pytest.mark.engine
def test_acceptance_is_imposed_and_the_output_stays(
    demo_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent), prepend=os.pathsep)
    prompts = demo_pair / "prompts.jsonl"
    options = Options(demo_pair / "target", demo_pair / "drafter", prompts, "", False, False)
    setup = Setups(options, exact=True, batch=2).ours({"controller": "fixed"})
    texts = options.texts(2)
    with running(options, setup) as engine:
        known = [text.token_ids for text in engine.ask(Record(texts, 20 + LOOKAHEAD))]
        for rate in (0.0, 1.0):
            for lookahead in (2, LOOKAHEAD):
                lesson = Lesson(known, rate)
                task = Task(texts, 20, 2, ignore_eos=True, lookahead=lookahead, lesson=lesson)
                outcome = engine.ask(task)
                assert outcome.same_as(known) == 2
                assert outcome.taught >= outcome.drafts > 0
                assert outcome.accepted_tokens == rate * outcome.draft_tokens
                lengths = [length for length, n in outcome.worker["lengths"].items() if n]
                assert max(lengths) <= lookahead
        untaught = engine.ask(Task(texts, 20, 2, ignore_eos=True))
        assert untaught.taught == 0
        assert 0 < untaught.accepted_tokens < untaught.draft_tokens
        profile = engine.ask(Profile(Task(texts, 20, 2, ignore_eos=True)))
        assert profile["rounds"] == untaught.worker["steps"]
        assert profile["gpu"] is None
        assert min(profile["host_ms"].values()) > 0
        assert not any("sleep" in place or place.endswith(" rest") for place in profile["host_ms"])


def test_both_runners_are_compared_on_a_gpu(demo_pair: Path) -> None:
    """As users have them: ours on V1, and on V2 ahead and one step after the other."""
    options = Options(demo_pair / "target", demo_pair / "drafter", Path(), "", True, False)
    setups = Setups(options, exact=False, batch=8)
    served = [
        setup
        for group in _groups(setups, options)
        for name, (setup, _) in group.items()
        if "TLI" not in name and "eager" not in name
    ]
    compared = {
        (setup.runner, bool(setup.speculative_config), setup.engine.get("async_scheduling"))
        for setup in served
    }
    assert compared == {
        ("0", False, None),
        ("1", True, None),
        ("1", True, False),
        ("0", True, None),
    }
    assert not any(setup.watched or "compilation_config" in setup.engine for setup in served)
    ((taught, variants),) = _taught(setups, options).values()
    assert taught.watched
    assert [(variant.lookahead, variant.taught) for variant in variants] == [
        (0, False),
        (3, True),
        (LOOKAHEAD, True),
    ]


def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    for name in ("target", "drafter", "prompts.jsonl"):
        (tmp_path / name).mkdir()
    found, code = measured(tmp_path, "A", "B")
    assert [(part["part"], part["ok"]) for part in found] == [("A", False), ("B", False)]
    assert "prompts" in found[0]["error"]
    assert code == 1


def test_a_part_that_is_late_is_told_from_one_that_is_wrong(tmp_path: Path) -> None:
    """By the exit code, in which the quickstart looks."""
    for name in ("target", "drafter", "prompts.jsonl"):
        (tmp_path / name).mkdir()
    given = [f"--{name}={tmp_path / name}" for name in ("target", "drafter")]
    given += [f"--prompts={tmp_path / 'prompts.jsonl'}", "--parts"]
    program = (
        "import sys, measure_gpu; measure_gpu._LIMITS['A'] = 0.01; sys.exit(measure_gpu.main())"
    )
    for parts, code in ((["A"], 3), (["A", "B"], 1)):
        done = subprocess.run(
            [sys.executable, "-c", program, *given, *parts],
            env={**os.environ, "PYTHONPATH": f"{SCRIPT.parent}:{SCRIPT.parent.parent}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == code
        late = json.loads(done.stdout.splitlines()[0])
        assert (late["late"], late["error"]) == (True, "not done after 0.01 s")


def test_part_c_is_refused_where_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (22e9, 24e9))
    options = Options(tmp_path, tmp_path, tmp_path, "", True, False)
    with pytest.raises(ValueError, match="needs 55 GB of the GPU's memory, and 22 GB are free"):
        part_c(options, lambda result: None)


def test_a_step_is_replayed_alone() -> None:
    drafter = Drafter(ToyDrafterModel(), {0}, VOCAB, LOOKAHEAD, 4)  # type: ignore[arg-type]
    drafting = SimpleNamespace(source=SimpleNamespace(drafter=drafter))
    graphs = TapeGraphs()
    assert _gpu_graphs.facts(drafting)["recorded"] == 0
    assert _gpu_graphs.bare_replay(drafting, 1) is None
    support = GraphSupport(in_graph=True, several_tokens=True)
    drafter.record(graphs, [(size, width) for size in (1, 4) for width in (1, 8)], support)
    assert _gpu_graphs.facts(drafting)["recorded"] == 6
    assert _gpu_graphs.bare_replay(drafting, 5) is None
    for batch, width in ((1, 0), (3, 0), (1, 8)):
        replay = _gpu_graphs.bare_replay(drafting, batch, width)
        assert replay is not None
        before = graphs.replays
        for _ in range(2 * drafter.most_steps):  # more than a plan has lines
            replay()
        assert graphs.replays - before == 2 * drafter.most_steps


def test_acceptance_is_imposed_at_the_rate_that_is_printed() -> None:
    lesson = Lesson([], 0.71)
    right = sum(is_right(lesson, index, place) for index in range(40) for place in range(100))
    assert right / 4000 == pytest.approx(0.71, abs=0.03)
    assert is_right(lesson, 3, 7) == is_right(lesson, 3, 7)


def test_a_profile_tells_what_the_device_did() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("cpu_op", "aten::mm", 0, 5000),
        event("kernel", "gemm", 1000, 1000),
        event("kernel", "beside it", 1500, 1000),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 4000, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 900, 10),
        event("cuda_runtime", "cudaStreamSynchronize", 2000, 3000),
        {"ph": "M", "name": "process_name"},
    ]
    gpu = device_use(events, rounds=2)["gpu"]
    assert gpu["ms"] == 2.0
    assert gpu["idle"] == pytest.approx(1 - 2500 / 4000)
    assert gpu["kernels"] == 1
    assert gpu["copies"] == {"Memcpy HtoD (Pageable -> Device)": 0.5}
    assert gpu["calls"] == {"cudaLaunchKernel": 0.5, "cudaStreamSynchronize": 0.5}
    assert gpu["waited_ms"] == 1.5
    assert device_use(events[:1], rounds=2) == {"gpu": None}
