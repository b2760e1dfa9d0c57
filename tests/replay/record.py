# SPDX-License-Identifier: Apache-2.0
"""Record a real pair on this machine, for `bench.py`. Costs take two minutes on two cores.

    export PYTHONPATH=.:tests/engine:tests/replay VLLM_CPU_OMP_THREADS_BIND=0-1
    python tests/replay/record.py OUT.json TARGET DRAFTER \
        --prompts humaneval=humaneval.jsonl --prompts mt_bench=mt_bench.jsonl

A recording has costs of steps, confidences and acceptance, but no text. `recordings.py` describes
its format. Seconds are CPU time of the thread that runs the steps, so that other processes of the
machine disturb them less.
"""

import argparse
import itertools
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker runs in this thread
time.perf_counter = time.thread_time  # the clock of the package

from harness import engine, proposer_of  # noqa: E402
from recordings import LONGEST, Recording  # noqa: E402

from vllm_hetero_spec.bench.datasets import (  # noqa: E402
    Dataset,
    in_chat_template,
    load_dataset,
)
from vllm_hetero_spec.engine import step_timing  # noqa: E402
from vllm_hetero_spec.lookahead.controllers import Fixed, LookaheadPlan  # noqa: E402

_BATCHES = (1, 2, 4, 8, 16, 32)
_TOGETHER = 8  # requests at a time while texts are recorded
_CYCLES = 3  # rounds with each draft length while costs are recorded
_TEMPLATES = {  # the ones of examples/bench/real.yaml
    "humaneval": "Complete this Python function:\n\n```python\n{prompt}```",
    "mt_bench": "{turns[0]}",
}


class Cycle(Fixed):
    """Plans draft lengths in turn."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(max(lengths))
        self._lengths = itertools.cycle(lengths)

    def plan(self, batch: int, limits: Any, *_: Any) -> LookaheadPlan:
        length = next(self._lengths)
        return LookaheadPlan(tuple(min(limit, length) for limit in limits))


class Recorder:
    """Notes what the `LookaheadControl` of an engine reports to its controller."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self._observe, self._note_timing = control.observe, control.note_timing
        control.observe, control.note_timing = self.observe, self.note_timing
        self.clear()

    def clear(self) -> None:
        self.texts: dict[str, list[list[float]]] = {}  # rounds by request
        self.steps: list[list[float]] = []
        self.rounds: list[list[float]] = []

    def observe(self, step: Any) -> None:
        for request in step.requests:
            draft = self._control.pending.get(request.req_id)
            if draft is not None and request.new_tokens:
                accepted = draft.accepted(request)[1]
                confidences = [round(float(c), 4) for c in draft.confidences]
                self.texts.setdefault(request.req_id, []).append([accepted, *confidences])
        if step.decodes_only and step.target_seconds is not None:
            self.steps.append([len(step.requests), step.num_rows, round(step.target_seconds, 6)])
        self._observe(step)

    def note_timing(self, timing: Any, longest: int) -> None:
        if timing.forwards:
            overhead = timing.overhead + self._control.prepared
            batch = round(timing.picked / timing.forwards, 2)
            seconds = round(timing.seconds, 6), round(overhead, 6)
            self.rounds.append([batch, timing.forwards, longest, *seconds, timing.caught_up])
        self._note_timing(timing, longest)


def prompts_of(given: str, count: int, model: str, chat: bool) -> tuple[str, tuple[str, ...]]:
    """Return the name and the prompts of NAME=FILE."""
    name, file = given.split("=")
    dataset = Dataset(file=file, prompt=_TEMPLATES.get(name, "{prompt}"), count=count)
    prompts = load_dataset(dataset, name)
    return name, in_chat_template(prompts, model, {}) if chat else tuple(prompts)


def calibration(llm: Any) -> dict[str, Any]:
    """Return what an engine times at its start."""
    proposer = proposer_of(llm)
    source = proposer.drafting.source
    steps = step_timing.time_steps(source.step, _BATCHES[-1])
    return {
        "target": step_timing.time_steps(proposer.seam.target_forward, _BATCHES[-1] * LONGEST),
        "drafter": steps,
        "catch_up": step_timing.time_catch_up(source.read, 128, steps[0][1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--prompts", action="append", required=True, help="NAME=FILE")
    parser.add_argument("--count", type=int, default=24, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-chat-template", action="store_true")
    parser.add_argument("--costs", action="store_true", help="keep the texts of OUT")
    arguments = parser.parse_args()
    from vllm import SamplingParams

    chat = not arguments.no_chat_template
    sets = [
        prompts_of(given, arguments.count, arguments.target, chat) for given in arguments.prompts
    ]
    spec = {
        "method": "hetero",
        "model": arguments.drafter,
        "num_speculative_tokens": LONGEST,
        "debug": {"calibrate": False, "copies": False},
    }
    sizes = {"dtype": arguments.dtype, "max_model_len": 2048, "kv_cache_memory_bytes": 2 << 30}
    texts, steps, rounds = {}, {}, {}
    began = time.monotonic()
    with engine(arguments.target, spec, **sizes) as llm:
        proposer = proposer_of(llm)
        recorder = Recorder(proposer.drafting.control)
        for temperature in (0, 1):
            for name, prompts in sets if not arguments.costs else ():
                proposer.drafting.control.controller = Cycle(LONGEST)
                recorder.clear()
                for first in range(0, len(prompts), _TOGETHER):
                    sampling = SamplingParams(
                        temperature=temperature, seed=1, max_tokens=arguments.max_tokens
                    )
                    llm.generate(prompts[first : first + _TOGETHER], sampling, use_tqdm=False)
                texts[f"{name} {temperature}"] = list(recorder.texts.values())
                print(f"{time.monotonic() - began:.0f} s: texts of {name}, {temperature}")
            recorder.clear()
            short = sorted((text for _, prompts in sets for text in prompts), key=len)
            for batch in _BATCHES:
                cycles = 1 if batch >= 16 else _CYCLES
                lengths = [length for length in range(LONGEST + 1) for _ in range(cycles)]
                proposer.drafting.control.controller = Cycle(*lengths)
                sampling = SamplingParams(
                    temperature=temperature, max_tokens=2 * len(lengths), ignore_eos=True
                )
                batched = list(itertools.islice(itertools.cycle(short), batch))
                llm.generate(batched, sampling, use_tqdm=False)
                print(f"{time.monotonic() - began:.0f} s: costs of batch {batch}, {temperature}")
            steps[str(temperature)], rounds[str(temperature)] = recorder.steps, recorder.rounds
        known = calibration(llm)
    about = {
        "pair": f"{Path(arguments.target).name} / {Path(arguments.drafter).name}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }
    if arguments.costs:
        texts = json.loads(arguments.out.read_text(encoding="utf-8"))["texts"]
    Recording(about, known, texts, steps, rounds).write(arguments.out)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
