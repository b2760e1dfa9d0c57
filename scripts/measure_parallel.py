# SPDX-License-Identifier: Apache-2.0
"""Measures drafting in a process of its own beside drafting between the target's steps.

Both models are timed: a forward of the target takes 40 ms, and one of the drafter 5 ms, in all
engines alike, asleep once they are done, as if each had a device of its own. So two cores show what
the schedule gives, and nothing of what models cost. Engines serve the same prompts in turn, one
request at a time: the target alone and with a drafter in its process, on two cores; the same on
one core, which is to be compared with a drafter in a process of its own on the other core; and with
`--goodput` that with the controller, also for a drafter that knows nothing, whose engine is beside
the target alone on one core, too.

    python scripts/measure_parallel.py --target DIR --drafter DIR --prompts FILE.jsonl
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are taken in the processes made here
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # each process has cores of its own

from _parallel_model import Step, ahead_speed, serial_speed
from _parallel_options import pair_parser, parsed
from rich.console import Console
from rich.progress import Progress

from vllm_hetero_spec.bench.load import Load, Sample

ALONE, SERIAL, PARALLEL = "target alone", "serial, one core", "parallel, one core each"
ALONE_THERE = "target alone, one core"
GOODPUT = "goodput: "
USELESS = GOODPUT + "useless drafter"
COMPARED = (
    (PARALLEL, SERIAL), (GOODPUT + PARALLEL, GOODPUT + SERIAL),
    (USELESS, ALONE), (USELESS, ALONE_THERE),
)  # fmt: skip
COLUMNS = (
    "engine", "tok/s", "of alone", "tokens per draft", "drafted steps", "hits behind a draft",
    "hits behind none", "waits per step", "t_D (ms)", "t_V (ms)", "plugin (ms)", "of the formula",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """An engine.

    Attributes:
        name: Of it.
        cores: Of its process.
        speculative: Its speculative configuration, if any.
    """

    name: str
    cores: tuple[int, ...]
    speculative: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """What an engine did with a load.

    Attributes:
        sample: As clients saw it.
        steps: The target's.
    """

    sample: Sample
    steps: Sequence[Step]

    @property
    def rate(self) -> float:
        """Tokens per second behind the first ones, of one request at a time."""
        traces = self.sample.traces
        seconds = sum(trace.times[-1] - trace.times[0] for trace in traces)
        return sum(sum(trace.counts[1:]) for trace in traces) / seconds

    def found(self, *, drafted: bool) -> tuple[int, int, int]:
        """Look-ups that found a draft, waited for one, or did neither: after steps with a draft
        or without."""
        behind = [(a, b) for a, b in pairwise(self.steps) if (a.drafted > 0) == drafted]
        hits, waited, missed = (sum(b[place] - a[place] for a, b in behind) for place in (1, 2, 3))
        return hits, waited, missed


_engine: Any = None  # of this process: its driver and vLLM's own


def begin(kind: Kind, options: argparse.Namespace, cache: str) -> None:
    """Start an engine, in a process of its own."""
    os.environ |= {"OMP_NUM_THREADS": str(len(kind.cores)), "XDG_CACHE_HOME": cache}
    os.sched_setaffinity(0, kind.cores)  # before torch counts them
    from _parallel_timed import timed
    from vllm import LLM

    from vllm_hetero_spec.bench.vllm_engine import Driver

    global _engine
    llm = LLM(
        options.target,
        speculative_config=kind.speculative,
        max_num_seqs=max([4, *options.lookups]),
        disable_log_stats=False,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=512 << 20,
        **timed(options.target_ms / 1e3, options.drafter_ms / 1e3),
    )
    _engine = Driver(llm), llm


def run(load: Load) -> Run:
    """A load, in the engine of this process."""
    driver, llm = _engine
    driver.warm_up(load)
    llm.collective_rpc("steps_taken")
    sample = driver.run(load)
    return Run(sample, llm.collective_rpc("steps_taken")[0])


def know_nothing(drafter: str, folder: str) -> None:
    """A drafter of the same size and tokenizer, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(drafter)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(drafter).save_pretrained(folder)


def kinds(options: argparse.Namespace, nothing: str) -> list[Kind]:
    """All engines; `nothing` is a drafter that knows nothing."""
    first, second = options.cores
    serial = {
        "method": "slem", "model": options.drafter, "num_speculative_tokens": options.lookahead,
        "controller": "fixed", "kv_cache_memory_bytes": 128 << 20,
    }  # fmt: skip
    parallel = serial | {"parallel": "process", "drafter_device": str(second)}
    found = [
        Kind(ALONE, (first, second)),
        Kind("serial, two cores", (first, second), serial),
        Kind(SERIAL, (first,), serial),
        Kind(PARALLEL, (first,), parallel),
    ]
    goodput = {"controller": "goodput"}
    if options.goodput:
        found += [
            Kind(ALONE_THERE, (first,)),
            Kind(GOODPUT + SERIAL, (first,), serial | goodput),
            Kind(GOODPUT + PARALLEL, (first,), parallel | goodput),
            Kind(USELESS, (first,), parallel | goodput | {"model": nothing}),
        ]
    return found


def row(name: str, runs: Sequence[Run], alone: Sequence[Run], serial: Sequence[Run]) -> list[str]:
    """A line of the table, over all rounds."""
    samples, serials = [run.sample for run in runs], [run.sample for run in serial]
    rates = [run.rate for run in runs]
    rate = statistics.median(rates)
    ratio = statistics.median(a / b.rate for a, b in zip(rates, alone, strict=True))
    steps = sum(len(run.steps) for run in runs)
    drafts = sum(sample.drafts for sample in samples)
    counted = {
        of: sum(sample.worker.get(of, 0) for sample in samples)
        for of in ("propose_seconds", "wait_seconds", "forward_seconds", "forwards", "drafts_ahead")
    }
    target = (sum(sample.seconds for sample in samples) - counted["propose_seconds"]) / steps
    cells = [name, f"{rate:.1f}", f"{ratio:.2f}x"]
    if not drafts:
        return [*cells, *["-"] * (len(COLUMNS) - 6), f"{1e3 * target:.1f}", "-", "-"]
    forward = counted["forward_seconds"] / counted["forwards"]
    tokens = 1 + sum(of.accepted_tokens for of in serials) / sum(of.drafts for of in serials)
    made = sum(of.worker["forwards"] for of in serials) / sum(of.drafts for of in serials)
    ahead = counted["drafts_ahead"] > 0
    host = counted["propose_seconds"] - counted["wait_seconds" if ahead else "forward_seconds"]
    found = ["-"] * 3
    foreseen = serial_speed(tokens, made * forward, target)
    if ahead:
        behind, anew = (
            [sum(of) for of in zip(*(run.found(drafted=is_so) for run in runs), strict=True)]
            for is_so in (True, False)
        )
        hits = behind[0] / max(1, sum(behind)), anew[0] / max(1, sum(anew))
        waits = behind[1] + anew[1]
        waited = waits / max(1, waits + behind[2] + anew[2])
        foreseen = ahead_speed(tokens, made * forward, target, forward, *hits, waited)
        found = [*(f"{hit:.2f}" for hit in hits), f"{waits / steps:.2f}"]
    return [
        *cells,
        f"{1 + sum(sample.accepted_tokens for sample in samples) / drafts:.2f}",
        f"{drafts / steps:.2f}", *found, f"{1e3 * forward:.1f}", f"{1e3 * target:.1f}",
        f"{1e3 * host / steps:.2f}", "-" if name.startswith(GOODPUT) else f"{rate / foreseen:.2f}",
    ]  # fmt: skip


def ratio(runs: Sequence[Run], others: Sequence[Run]) -> str:
    """Speed beside another engine's in the same rounds: the median, and the range."""
    ratios = [run.rate / other.rate for run, other in zip(runs, others, strict=True)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


def report(runs: dict[str, list[Run]]) -> str:
    """A table of all engines, and how those compare that are to be compared."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    lines += [row(name, of, runs[ALONE], runs[SERIAL]) for name, of in runs.items()]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    texts = [[trace.token_ids for run in of for trace in run.sample.traces] for of in runs.values()]
    same = sum(ids == texts[0] for ids in texts)
    told = [f"{a} / {b}: {ratio(runs[a], runs[b])}" for a, b in COMPARED if a in runs]
    return "\n".join([table, "", *told, f"same tokens: {same} of {len(texts)} engines"])


def look_up(batch: int, found: Run) -> str:
    """What a step with look-ups takes on the target's host, beside waits."""
    counted, steps = found.sample.worker, len(found.steps)
    host = 1e3 * (counted["propose_seconds"] - counted["wait_seconds"]) / steps
    hits = counted["drafts_ahead"] / steps
    return f"look-ups at batch {batch}: {host:.2f} ms per step, {hits:.1f} hits each"


def main() -> int:
    parser = pair_parser(__doc__)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--goodput", action="store_true", help="engines with the controller too")
    parser.add_argument("--lookups", type=int, nargs="*", default=[], help="batches to time")
    parser.add_argument("--rounds", type=int, default=3)
    options, prompts = parsed(parser, sys.maxsize)
    spawn = multiprocessing.get_context("spawn")
    runs: dict[str, list[Run]] = {}
    timings = []
    with ExitStack() as stack:
        folder, cache = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        if options.goodput:
            with ProcessPoolExecutor(1, spawn) as pool:
                pool.submit(know_nothing, options.drafter, folder).result()
        engines = {}
        for kind in progress.track(kinds(options, folder), description="engines"):
            work = (kind, options, cache)
            pool = ProcessPoolExecutor(1, spawn, initializer=begin, initargs=work)
            engines[kind.name] = stack.enter_context(pool)
            pool.submit(os.getpid).result()  # it is up
        for number in progress.track(range(options.rounds), description="rounds"):
            count = options.requests
            chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
            load = Load(chosen, options.tokens, ignore_eos=True)
            for name, pool in engines.items():
                runs.setdefault(name, []).append(pool.submit(run, load).result())
        for batch in options.lookups:
            chosen = [prompts[i % len(prompts)] for i in range(batch)]
            load = Load(chosen, options.tokens, batch, ignore_eos=True)
            timings.append(look_up(batch, engines[PARALLEL].submit(run, load).result()))
    print(report(runs), *timings, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
