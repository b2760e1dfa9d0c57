# SPDX-License-Identifier: Apache-2.0
"""Compare a drafter in a process of its own with one that drafts between the target's steps.

In all engines a forward of the target takes 40 ms and one of the drafter 5 ms, as if each had a
device of its own. So two cores are enough to compare the schedules. Engines serve the same prompts
in turn, one request at a time. `--dsi` simulates distributed speculative inference on the same
texts, from the drafts of an engine with a long lookahead.

    python scripts/measure_draft_ahead.py --target DIR --drafter DIR --prompts FILE.jsonl
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from _draft_ahead_model import dsi_time, runs_of, serial_time
from rich.console import Console
from rich.progress import Progress

from vllm_hetero_spec.bench.load import Load, Sample
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts

ALONE, SERIAL, AHEAD = "target alone", "serial, one core", "ahead, one core each"
LONG = "serial, long drafts"
COLUMNS = ("engine", "tok/s", "of alone", "tokens per draft", "hits behind a draft")
_PROMPT_CHARACTERS = 400
_LONG = 16  # target tokens per draft of the engine from which DSI is simulated
_UNDRAFTED = 2  # first steps of a request without drafts


class Run(NamedTuple):
    """Result of a load in an engine."""

    sample: Sample
    steps: Sequence[tuple[int, ...]]  # result of `TimedWorker.steps_taken`

    @property
    def rate(self) -> float:
        """Tokens per second after the first arrival of each request."""
        traces = self.sample.traces
        seconds = sum(trace.times[-1] - trace.times[0] for trace in traces)
        return sum(sum(trace.counts[1:]) for trace in traces) / seconds

    def look_ups(self) -> tuple[int, int]:
        """Numbers of hits and of all look-ups of precomputed drafts, after steps with a draft."""
        behind = [(a, b) for a, b in pairwise(self.steps) if a[0] > 0]
        return sum(b[1] - a[1] for a, b in behind), sum(sum(b[1:]) - sum(a[1:]) for a, b in behind)


Engine = tuple[Sequence[int], dict[str, Any] | None]  # cores, and speculative configuration
_engine: Any = None  # this process's `Driver` and `vllm.LLM`


def begin(engine: Engine, options: argparse.Namespace, cache: str) -> None:
    """Start the engine of this process; the initializer of its pool."""
    cores, speculative = engine
    os.environ |= {"OMP_NUM_THREADS": str(len(cores)), "XDG_CACHE_HOME": cache}
    os.sched_setaffinity(0, cores)  # before torch counts them
    from _timed_worker import timed
    from vllm import LLM

    from vllm_hetero_spec.bench.vllm_engine import Driver

    global _engine
    llm = LLM(
        options.target, speculative_config=speculative, max_num_seqs=4, disable_log_stats=False,
        dtype="float32", enforce_eager=True, max_model_len=1024, kv_cache_memory_bytes=512 << 20,
        **timed(options.target_ms / 1e3, options.drafter_ms / 1e3),
    )  # fmt: skip
    _engine = Driver(llm), llm


def run(load: Load) -> Run:
    """Run a load in the engine of this process."""
    driver, llm = _engine
    driver.warm_up(load)
    llm.collective_rpc("steps_taken")
    sample = driver.run(load)
    return Run(sample, llm.collective_rpc("steps_taken")[0])


def engines(options: argparse.Namespace) -> dict[str, Engine]:
    """All engines by name."""
    first, second = options.cores
    serial = {
        "method": "slem", "model": options.drafter, "num_speculative_tokens": options.lookahead,
        "controller": "fixed", "kv_cache_memory_bytes": 128 << 20,
    }  # fmt: skip
    ahead = serial | {"draft_ahead": True, "drafter_device": str(second)}
    found: dict[str, Engine] = {
        ALONE: ((first, second), None),
        "serial, two cores": ((first, second), serial),
        SERIAL: ((first,), serial),
        AHEAD: ((first,), ahead),
    }
    if options.dsi:
        found[LONG] = (first, second), serial | {"num_speculative_tokens": _LONG}
    return found


def row(name: str, runs: dict[str, list[Run]]) -> list[str]:
    """Line of the table for an engine, over all rounds."""
    rate = statistics.median(run.rate for run in runs[name])
    cells = [name, f"{rate:.1f}", ratio(runs[name], runs[ALONE]).partition(" ")[0]]
    drafts = sum(run.sample.drafts for run in runs[name])
    accepted = sum(run.sample.accepted_tokens for run in runs[name])
    hits, all_of = (sum(of) for of in zip(*(run.look_ups() for run in runs[name]), strict=True))
    length, share = f"{1 + accepted / max(1, drafts):.2f}", f"{hits / max(1, all_of):.2f}"
    return [*cells, length if drafts else "", share if all_of else ""]


def ratio(runs: Sequence[Run], others: Sequence[Run]) -> str:
    """Median and range of the speed ratio to another engine in the same rounds."""
    ratios = [run.rate / other.rate for run, other in zip(runs, others, strict=True)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


def simulated(runs: dict[str, list[Run]], options: argparse.Namespace) -> Iterator[str]:
    """Yield lines with simulated tokens per second of schedules, from the engine `LONG`."""
    samples = [run.sample for run in runs[SERIAL]]
    seconds = sum(sample.worker["forward_seconds"] for sample in samples)
    token = seconds / sum(sample.drafts for sample in samples) / options.lookahead
    target = options.target_ms / 1e3
    traces = [trace for run in runs[LONG] for trace in run.sample.traces]
    texts = [list(runs_of(trace.counts[_UNDRAFTED:], _LONG)) for trace in traces]
    tokens = sum(sum(text) + len(text) for text in texts)
    for k in (2, 4, 8):
        times = {"serial": sum(serial_time(text, k, target, token) for text in texts)}
        for count in options.dsi:
            name = f"DSI, {count} target{'s' * (count > 1)}"
            times[name] = sum(dsi_time(text, k, count, target, token) for text in texts)
        rates = [f"{name} {tokens / took:.1f}" for name, took in times.items()]
        yield f"simulated, drafts of {k}: {', '.join(rates)} tok/s"


def report(runs: dict[str, list[Run]]) -> str:
    """Table of all engines, with the ratio of the two ways to draft."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *(row(name, runs) for name in runs)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    texts = [[trace.token_ids for run in of for trace in run.sample.traces] for of in runs.values()]
    same = sum(ids == texts[0] for ids in texts)
    compared = f"{AHEAD} / {SERIAL}: {ratio(runs[AHEAD], runs[SERIAL])}"
    return "\n".join([table, "", compared, f"same tokens: {same} of {len(texts)} engines"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=os.path.abspath, required=True)
    parser.add_argument("--drafter", type=os.path.abspath, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--target-ms", type=float, default=40.0, help="a step of the target")
    parser.add_argument("--drafter-ms", type=float, default=5.0, help="a forward, at least")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="ours, the drafter's")
    parser.add_argument("--requests", type=int, default=4, help="of a round, each its own prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--dsi", type=int, nargs="*", default=[], help="numbers of targets")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps run in the processes made here
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # each process has cores of its own
    try:
        texts = load_prompts(options.prompts)
    except ConfigError as error:
        parser.error(str(error))
    prompts = [text[:_PROMPT_CHARACTERS] for text in texts]
    spawn = multiprocessing.get_context("spawn")
    runs: dict[str, list[Run]] = {}
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        pools = {}
        for name, engine in progress.track(engines(options).items()):
            work = (engine, options, cache)
            pool = ProcessPoolExecutor(1, spawn, initializer=begin, initargs=work)
            pools[name] = stack.enter_context(pool)
            pool.submit(os.getpid).result()  # it is up
        for number in progress.track(range(options.rounds), description="rounds"):
            count = options.requests
            chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
            load = Load(chosen, options.tokens, ignore_eos=True)
            for name, pool in pools.items():
                runs.setdefault(name, []).append(pool.submit(run, load).result())
    print(report(runs))
    if options.dsi:
        print(*simulated(runs, options), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
