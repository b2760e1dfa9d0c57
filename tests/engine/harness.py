# SPDX-License-Identifier: Apache-2.0
"""Start vLLM engines for tests in this process, one at a time, and read their counters."""

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_hetero_spec

BASE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "disable_log_stats": False,
}
# `scripts/test_gpu.sh` sets this variable. Engines then run in float32 with CUDA graphs. They use a
# small part of the GPU memory, because several tests run at once. The block size is the one of a
# CPU, because scenarios count blocks.
if "HETERO_SPEC_ON_GPU" in os.environ:
    vllm_hetero_spec.register()  # in case the package is on the path but not installed
    BASE |= {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
        "attention_backend": "TRITON_ATTN",
        "block_size": 128,
        "gpu_memory_utilization": 0.03,
    }


HERE = Path(__file__).parent
CORE = max(os.sched_getaffinity(0))  # of a drafter process


def v2_environment(*first: Path) -> dict[str, str]:
    """Return the environment of engines on Model Runner V2; imports search `first` first."""
    tests = HERE.parent
    path = [HERE / "v2_on_cpu", *first, tests / "any_process", HERE, tests, tests.parent]
    own = {"VLLM_CACHE_ROOT": f"{first[0]}-cache"} if first else {}
    return (
        os.environ
        | own
        | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",  # it would try to compile for the simulated backend
        }
    )


@contextlib.contextmanager
def engine(model: Path, spec: dict[str, Any] | None = None, **changes: Any) -> Iterator[Any]:
    """A vLLM engine; leaving the context shuts it down and frees its memory."""
    from vllm import LLM

    gc.freeze()  # vLLM collects ten times at start-up; skip all imported objects each time
    llm = LLM(str(model), **(BASE | changes), speculative_config=spec)
    try:
        yield llm
    finally:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "collect", lambda *_: 0)  # vLLM collects twice; once below is enough
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def slem(drafter: Path, lookahead: int = 4, **changes: Any) -> dict[str, Any]:
    """Return a speculative configuration of the method `slem`."""
    return {
        "method": "slem",
        "model": str(drafter),
        "num_speculative_tokens": lookahead,
        "kv_cache_memory_bytes": 64 << 20,
        "controller": "fixed",  # with tiny targets, others disable speculation
    } | changes


def process(drafter: Path, lookahead: int = 4, **changes: Any) -> dict[str, Any]:
    """Return `slem` with a drafter process on the last core."""
    where = {"draft_ahead": True, "drafter_device": str(CORE)}
    return slem(drafter, lookahead, **(where | changes))


def with_config(model: Path, folder: Path, **changes: Any) -> Path:
    """Return a folder with the files of a model, whose config.json has some other values."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def proposer_of(llm: Any) -> Any:
    """Return the proposer of the worker in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.drafter


def patient(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step wait (at most 5 s) for its precomputed drafts, as if the target were slow."""
    drafting = proposer_of(llm).drafting
    source, ends = drafting.source, drafting.bridge.drafter_eos
    begin, wanted_of, wanted = source.begin, source._wanted, {}

    def ready(text: Any) -> bool:
        if source._process._process is None:  # the drafter process is about to restart
            return True
        missing = wanted.get(text.slot, 0) - len(text.drafted)
        found = source._process.table.read(text.slot)
        ids = found.ids if found is not None and found.serial == text.serial else []
        return not text.serial or len(ids) >= missing or bool(ids and ids[-1] in ends)

    def waits(tasks: Any, *args: Any) -> None:
        deadline = time.monotonic() + 5
        for task in tasks:
            while not ready(task.state.sequence.table) and time.monotonic() < deadline:
                time.sleep(0.001)
        begin(tasks, *args)

    def remembers(task: Any, drafts: int) -> int:
        slot, count = task.state.sequence.table.slot, wanted_of(task, drafts)
        wanted[slot] = max(count, wanted.get(slot, 0)) if drafts == 1 else count
        return count

    monkeypatch.setattr(source, "begin", waits)
    monkeypatch.setattr(source, "_wanted", remembers)


def drafted_ahead(llm: Any) -> dict[str, Any]:
    """Return the counters of a `patient` engine; assert that it used precomputed drafts."""
    from vllm_hetero_spec import read_stats

    stats, metrics = read_stats(llm), metrics_of(llm)
    assert stats["drafts_ahead"] >= stats["drafts"] > stats["drafts_guessed"] > 0
    assert stats["drafts"] >= 10
    assert metrics["num_accepted_tokens"] > 0
    assert set(stats["skipped"]) <= {"not_guessed", "not_ready", "catching_up"}
    assert stats["forwards"] > 20
    assert 0 < stats["kv_blocks_held"] <= stats["kv_blocks"]
    return stats


def profile(llm: Any) -> None:
    """Sample for dummy requests. vLLM does so at start-up, except for an eager engine on a CPU."""
    runner = proposer_of(llm).seam._runner
    runner._dummy_sampler_run(torch.zeros(5, runner.model_config.get_hidden_size()))


def metrics_of(llm: Any) -> dict[str, int]:
    """Return vLLM's counters of speculation and preemption, without the prefixes of their names."""
    return {
        m.name.removeprefix("vllm:").removeprefix("spec_decode_"): m.value
        for m in llm.get_metrics()
        if hasattr(m, "value") and ("spec_decode" in m.name or "preempt" in m.name)
    }


def warnings(log: pytest.LogCaptureFixture, reason: str) -> list[str]:
    """Return the log messages about requests without drafts that have this reason."""
    return [m for m in log.messages if f"({reason})" in m]
