# SPDX-License-Identifier: Apache-2.0
"""Child process of an engine of `measure_gpu.py`: runs loads and methods of `GpuWorker`."""

import functools
import gzip
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from _host_sections import device_use, wrap_sections, wrapped
from torch.profiler import profile, record_function

import vllm_hetero_spec
from vllm_hetero_spec.bench import vllm_engine
from vllm_hetero_spec.bench.child_process import serve
from vllm_hetero_spec.bench.load import Load
from vllm_hetero_spec.bench.vllm_engine import EngineSpec
from vllm_hetero_spec.lookahead.controllers import Fixed


class GpuWorker:
    """Worker extension; vLLM mixes it into the class of the worker."""

    model_runner: Any
    gpu_profiler: Any = None

    def gpu_set(self, rates: list[float] | None, lookahead: int) -> None:
        """Set verification and drafting of the next loads.

        `rates` are imposed conditional acceptance rates of each draft token; None verifies. With
        `lookahead` 0 the engine's own controller chooses draft lengths.
        """
        runner, proposer = self.model_runner, getattr(self.model_runner, "drafter", None)
        if (sampler := runner.rejection_sampler) is not None:
            given = None if rates is None else torch.tensor(rates, device=runner.device)
            sampler.synthetic_conditional_rates = given
        if proposer is None:
            return
        control = proposer.drafting.control
        if "_verify" not in vars(sampler):
            impose(sampler)
            self.gpu_controller = control.controller
        control.controller = Fixed(lookahead) if lookahead else self.gpu_controller

    def gpu_forwards(self, batches: list[int], contexts: list[int]) -> dict[str, float]:
        """Return milliseconds of the drafter's steps, and of replays of its CUDA graphs.

        Replays run with each context length in tokens. Width 4 is a catch-up.
        """
        source = self.model_runner.drafter.drafting.source
        steps, times = source.drafter.steps, dict[str, float]()
        for batch in batches:
            times[f"step, batch {batch}"] = milliseconds(functools.partial(source.step, batch))
        for (batch, width, trees), recording in getattr(steps, "_recordings", {}).items():
            if batch not in batches or width not in (0, 4) or trees:
                continue

            def replayed(replay: Callable[[], object] = recording.replay) -> None:
                steps.again()  # otherwise its counter would leave the plan
                replay()

            table = steps._on.table
            blocks = torch.arange(table.numel(), device=table.device) % source.pool.capacity
            table.copy_(blocks.view_as(table))
            for context in contexts:
                steps._on.plan_lengths.fill_(context)
                times[f"batch {batch}, width {width}, {context} tokens"] = milliseconds(replayed)
        return times

    def gpu_profile(self) -> None:
        """Begin a profile; named ranges are the sections of a round."""
        if self.gpu_profiler is None:
            from vllm_hetero_spec.staging import Fetched

            wrap_sections(record_function)
            runner = type(self.model_runner)
            places = ((Fetched, "wait"), (runner, "execute_model"), (runner, "sample_tokens"))
            for cls, name in places:
                setattr(cls, name, wrapped(name, getattr(cls, name), record_function))
        self.gpu_profiler = profile()
        self.gpu_profiler.start()

    def gpu_profiled(self, rounds: int, trace: str) -> dict[str, Any]:
        """End the profile of a number of rounds, save it to a file, return its `device_use`."""
        self.gpu_profiler.stop()
        self.gpu_profiler.export_chrome_trace(trace)
        with gzip.open(trace) as file:
            return device_use(json.load(file)["traceEvents"], rounds)


def recite(_: object, model: torch.nn.Module, config: Any) -> None:
    """Set weights with which the model repeats the `recited` ids of its config.json in order."""
    ids, weights = torch.tensor(config.hf_config.recited), dict(model.named_parameters())
    for name, weight in weights.items():
        weight.data.fill_(float("norm" in name))
    known, head = weights["model.embed_tokens.weight"].data, weights["lm_head.weight"].data
    noise = torch.randn(len(ids), known.shape[1]).to(known)
    known.copy_(noise[-1:].expand_as(known))  # after any other id follows the first one
    known[ids], head[ids.roll(-1)] = noise, noise


def impose(sampler: Any) -> None:
    """Replace the verdict of our sampler, after its work, by vLLM's synthetic acceptance.

    Padding is marked -1, which vLLM rejects.
    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    verify = sampler._verify

    def verified(*args: Any) -> Any:
        begin = sampler._verified
        verdict, (*others, ids) = verify(*args), args
        if sampler.synthetic_conditional_rates is None:
            return verdict
        part = slice(begin, sampler._verified)
        first, lengths = sampler._first(part)[:-1], sampler._view.lengths[part]
        ranges = [np.arange(at + 1, at + 1 + n) for at, n in zip(first, lengths, strict=True)]
        (places,) = sampler._send(np.concatenate(ranges))
        real = torch.full_like(ids, -1).index_copy_(0, places, ids[places])
        return RejectionSampler._verify(sampler, *others, real)

    sampler._verify = verified


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return milliseconds per call when several calls are queued; the best of three rounds."""
    times, there = [], torch.accelerator.is_available()
    wait = torch.accelerator.synchronize if there else bool
    for count in (3, repeats, repeats, repeats):  # the first round is a warm-up
        wait()
        began = time.perf_counter()
        for _ in range(count):
            work()
        wait()
        times.append(1e3 * (time.perf_counter() - began) / count)
    return round(min(times[1:]), 4)


def build(spec: EngineSpec) -> Callable[[Any], Any]:
    """Start vLLM; return the function that runs loads and calls."""
    vllm_hetero_spec.register()  # the package may be on the path without being installed
    vllm_engine.REST = 0.0  # this machine has enough cores for polling engines
    llm = vllm_engine.start(spec)
    driver = vllm_engine.Driver(llm)

    def answer(question: Load | Sequence[Any]) -> Any:
        if isinstance(question, Load):
            return driver.run(question)
        return llm.collective_rpc(question[0], args=tuple(question[1:]))[0]

    return answer


if __name__ == "__main__":
    serve(build)
elif "vllm" in sys.modules:  # in a worker
    from vllm.model_executor.model_loader import dummy_loader, register_model_loader

    loader = type("Reciting", (dummy_loader.DummyModelLoader,), {"load_weights": recite})
    register_model_loader("reciting")(loader)
