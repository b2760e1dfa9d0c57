# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests: one at a time, in this process, each used for much."""

import contextlib
import gc
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
# On a GPU, where `scripts/test_gpu.sh` says so: in float32 too, with CUDA graphs, in a small part
# of its memory, as others run beside; blocks are as on a CPU, for scenarios that count them.
if "HETERO_SPEC_ON_GPU" in os.environ:
    vllm_hetero_spec.register()  # also where the package is on the path alone
    BASE |= {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
        "attention_backend": "TRITON_ATTN",
        "block_size": 128,
        "gpu_memory_utilization": 0.03,
    }


HERE = Path(__file__).parent


def v2_environment(*first: Path) -> dict[str, str]:
    """Of a process whose engines run on Model Runner V2.

    Args:
        first: Folders to import from before all others, such as another release of vLLM.
    """
    tests = HERE.parent
    path = [HERE / "v2_on_cpu", *first, tests / "any_process", HERE, tests, tests.parent]
    own = {"VLLM_CACHE_ROOT": f"{first[0]}-cache"} if first else {}
    return (
        os.environ
        | own
        | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",  # takes the stand-in for a backend that it can compile for
        }
    )


@contextlib.contextmanager
def engine(model: Path, spec: dict[str, Any] | None = None, **changes: Any) -> Iterator[Any]:
    """A vLLM engine that is gone afterwards."""
    from vllm import LLM

    gc.freeze()  # vLLM collects ten times on the way: each would walk all that is imported
    llm = LLM(str(model), **(BASE | changes), speculative_config=spec)
    try:
        yield llm
    finally:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "collect", lambda *_: 0)  # vLLM does so twice: once behind it will do
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def slem(drafter: Path, lookahead: int = 4, **changes: Any) -> dict[str, Any]:
    """A speculative configuration."""
    return {
        "method": "slem",
        "model": str(drafter),
        "num_speculative_tokens": lookahead,
        "kv_cache_memory_bytes": 64 << 20,
        "controller": "fixed",  # tiny targets are too fast for a drafter to pay
    } | changes


def proposer_of(llm: Any) -> Any:
    """The proposer in this process's worker."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.drafter


def patient(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step find all that its drafter is going to draft, as behind a slow target."""
    drafting = proposer_of(llm).drafting
    source, ends = drafting.source, drafting.bridge.drafter_eos
    begin, wanted_of, wanted = source.begin, source._wanted, {}

    def ready(text: Any) -> bool:
        if source._process._process is None:  # it is about to be started again
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


def profile(llm: Any, requests: int = 5) -> None:
    """Sample for requests that do not exist, as vLLM does at start-up unless eager on a CPU."""
    runner = proposer_of(llm).seam._runner
    runner._dummy_sampler_run(torch.zeros(requests, runner.model_config.get_hidden_size()))


def metrics_of(llm: Any) -> dict[str, int]:
    """vLLM's own counters of speculation and preemption, without the prefix `vllm:`."""
    return {
        m.name.removeprefix("vllm:").removeprefix("spec_decode_"): m.value
        for m in llm.get_metrics()
        if hasattr(m, "value") and ("spec_decode" in m.name or "preempt" in m.name)
    }


def warnings(log: pytest.LogCaptureFixture, reason: str) -> list[str]:
    """What was logged about undrafted requests of one reason."""
    return [m for m in log.messages if f"({reason})" in m]
