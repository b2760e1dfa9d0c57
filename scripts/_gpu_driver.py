# SPDX-License-Identifier: Apache-2.0
"""The program of a `GpuEngine`: vLLM with its worker in this process, asked one thing at a time."""

import cProfile
import gzip
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import _gpu_graphs
from _gpu_engine import (
    Continuation,
    Facts,
    Outcome,
    Profile,
    Record,
    Setup,
    StepTimes,
    Task,
)
from _gpu_profile import device_use, host_use

import vllm_hetero_spec
from vllm_hetero_spec.bench.child_process import serve
from vllm_hetero_spec.bench.vllm_engine import Driver, start

_WARM_UPS, _REPEATS = 3, 20


class Answers:
    """An engine in this process.

    Args:
        setup: What to start.
    """

    def __init__(self, setup: Setup) -> None:
        self._said: list[str] = []
        vllm_hetero_spec.register()  # also where the package is not installed, only on the path
        logger = logging.getLogger("vllm.hetero_spec")  # vLLM has set up its own by now
        logger.setLevel(logging.INFO)
        logger.addHandler(_Kept(self._said))
        self._llm = start(setup)
        self._driver = Driver(self._llm)
        self._proposer: Any = None
        if not setup.watched:
            return
        core = self._llm.llm_engine.engine_core.engine_core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        if hasattr(self._llm.llm_engine.vllm_config.speculative_config, "hetero"):
            from _gpu_watch import Watch

            self._proposer = self._runner.drafter
            self._own = self._proposer.controller
            vocabulary = len(self._llm.get_tokenizer())
            self._watch = Watch(self._proposer, self._runner.rejection_sampler, vocabulary)

    def answer(self, question: Any) -> Any:
        """The answer to a question of `_gpu_engine`."""
        answers: dict[type, Callable[[Any], Any]] = {
            Task: self._run,
            Record: self._record,
            StepTimes: self._step_times,
            Profile: self._profile,
            Facts: self._facts,
        }
        return answers[type(question)](question)

    def _run(self, task: Task) -> Outcome:
        self._driver.warm_up(task)
        if self._proposer is None:
            return Outcome(**vars(self._driver.run(task)))
        from vllm_hetero_spec.lookahead.controllers import Fixed

        far = task.lookahead
        self._proposer.controller = self._own if far is None else Fixed(far)
        watch = self._watch
        watch.begin(task.lesson, watched=task.watched)
        try:
            sample = self._driver.run(task)
        finally:
            made, waits, taught = watch.end()
        drafts = [made.get(index, []) for index in range(len(task.prompts))] if made else []
        return Outcome(**vars(sample), made=drafts, waits=waits, taught=taught)

    def _record(self, record: Record) -> list[Continuation]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=record.max_tokens, ignore_eos=True, logprobs=2
        )
        found = []
        for prompt in record.prompts:
            (output,) = self._llm.generate([prompt], params, use_tqdm=False)
            said = output.outputs[0]
            gaps = []
            for rows in said.logprobs:
                first, second, *_ = sorted((row.logprob for row in rows.values()), reverse=True)
                gaps.append(first - second)
            found.append(Continuation(list(said.token_ids), gaps))
        return found

    def _step_times(self, wanted: StepTimes) -> dict[str, Any]:
        drafting, seam = self._proposer.drafting, self._proposer.seam
        times: dict[str, dict[int, Any]] = {
            name: {} for name in ("step", "step_replay", "read", "read_replay", "target")
        }
        for batch in wanted.batches:
            times["step"][batch] = _timed(lambda: drafting.source.step(batch))  # noqa: B023
            times["step_replay"][batch] = _timed(_gpu_graphs.bare_replay(drafting, batch))
            times["target"][batch] = _timed(lambda: seam.target_forward(batch))  # noqa: B023
        for width in wanted.widths:
            times["read"][width] = _timed(lambda: drafting.source.read(width))  # noqa: B023
            times["read_replay"][width] = _timed(_gpu_graphs.bare_replay(drafting, 1, width))
        return {**times, "transfer": _transfers(self._runner.device)}

    def _profile(self, profile: Profile) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiled

        self._run(profile.task)
        activities = [ProfilerActivity.CPU]
        if self._runner.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with tempfile.TemporaryDirectory() as folder:
            with profiled(activities=activities) as profiler:
                outcome = self._run(profile.task)
            name = f"batch-{profile.task.batch_size}"
            trace = Path(profile.kept or folder, f"{name}.json.gz")
            trace.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            with gzip.open(trace) as file:
                events = json.load(file)["traceEvents"]
            with cProfile.Profile() as host:
                again = self._run(profile.task)
            host.dump_stats(trace.with_name(f"{name}.pstats"))
        return {
            "rounds": outcome.rounds,
            "seconds": outcome.seconds,
            **device_use(events, outcome.rounds),
            "host_ms": host_use(host, again.rounds),
        }

    def _facts(self, _: Facts) -> dict[str, Any]:
        import torch

        groups = getattr(self._runner, "attn_groups", None)
        backends = {group.backend.get_name() for of in groups or () for group in of}
        file = type(self._runner).__module__.rpartition(".")[2]  # V1's is gpu_model_runner
        facts: dict[str, Any] = {
            "runner": "V2" if file == "model_runner" else "V1",
            "device": str(self._runner.device),
            "dtype": str(self._llm.llm_engine.vllm_config.model_config.dtype),
            "attention": sorted(backends),
        }
        if self._runner.device.type == "cuda":
            facts["allocated_mib"] = torch.cuda.memory_allocated() >> 20
            facts["reserved_mib"] = torch.cuda.memory_reserved() >> 20
        if self._proposer is not None:
            facts["graphs"] = _gpu_graphs.facts(self._proposer.drafting)
            facts["said"] = self._said
        return facts


class _Kept(logging.Handler):
    """Keeps what our part of the engine logs, as why there are no graphs."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _timed(work: Callable[[], Any] | None) -> dict[str, float] | None:
    """Milliseconds until a call returns, and until the device has done what it queued; medians.

    None of nothing.
    """
    import torch

    if work is None:
        return None

    returned, done = [], []
    for _ in range(_WARM_UPS):
        work()
    for _ in range(_REPEATS):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        work()
        returned.append(time.perf_counter() - began)
        torch.accelerator.synchronize()
        done.append(time.perf_counter() - began)
    return {"returned_ms": _ms(returned), "done_ms": _ms(done)}


def _transfers(device: Any) -> dict[str, Any]:
    """The arrays of a round to the device: one after the other, and in one packet."""
    import numpy as np
    import torch

    from vllm_hetero_spec.staging import Sender

    arrays = [np.zeros(64, kind) for kind in (np.int64, np.int64, *[np.int32] * 5)]
    sender = Sender(device)

    def one_by_one() -> None:
        for array in arrays:
            torch.tensor(array, device=device)

    return {"arrays": _timed(one_by_one), "packet": _timed(lambda: sender.send(*arrays))}


def _ms(seconds: list[float]) -> float:
    return round(1e3 * median(seconds), 4)


def build(setup: Setup) -> Callable[[Any], Any]:
    """Start vLLM.

    Raises:
        ConfigError: vLLM or the plugin refused the models or the configuration.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = setup.runner
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not setup.watched))
    return Answers(setup).answer


if __name__ == "__main__":
    serve(build)
