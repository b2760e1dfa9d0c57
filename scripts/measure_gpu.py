# SPDX-License-Identifier: Apache-2.0
"""Check correctness and speed of drafting on this GPU; each result is a line of JSON.

    python scripts/measure_gpu.py --minutes 9     # all parts, in 80 GB of the GPU's memory
    python scripts/measure_gpu.py --parts 0 A     # correctness only

0: versions, clocks, basic operations. A: tokens and acceptance rates in float32, by setup. B:
forwards of the drafter, by variant. C: tokens per second compared with the target alone and with
vLLM's `draft_model`, in interleaved rounds. D: profiles, whose traces are kept. S: sampled
requests. A part that exceeds its time ends, and the next begins.

Part A runs a small trained pair. Other models have real shapes, repeat a chain of tokens, and share
a tokenizer; our drafter still translates through text. An acceptance "length" is imposed on all
engines by vLLM's synthetic rates, so that the output is not the target's own. Without a GPU the
shapes are small: counts are valid, times are not.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import product
from operator import eq
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from _gpu_worker import milliseconds
from tokenizers import Tokenizer

from vllm_hetero_spec.bench.child_process import EngineProcess
from vllm_hetero_spec.bench.load import Load, MeasurementError, Sample
from vllm_hetero_spec.bench.vllm_engine import EngineSpec
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.machine import provenance
from vllm_hetero_spec.paths import demo_folder
from vllm_hetero_spec.staging import Sender

GPU = torch.cuda.is_available()
LOOKAHEAD = 5
# Rate a of each draft token by acceptance length, which is 1 + a + ... + a^LOOKAHEAD.
RATES = {1: 0.0, 2: 0.50866, 3: 0.70901, 4: 0.83432}
_LATE = 3  # exit code if a part was late and nothing was wrong
_FAULTS = ("drafter_error", "backing_off", "nan_logits")
_FAILED = (ConfigError, MeasurementError)

_SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
_SIZES += ["num_key_value_heads", "head_dim", "vocab_size"]
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _shape(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return entries of a config.json; untied heads, because a step then reads as many bytes."""
    more |= {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    return dict(zip(_SIZES, sizes, strict=True)) | more


SHAPES = {
    "8B": _shape(4096, 14336, 32, 32, 8, 128, 128256),
    "0.5B": _shape(896, 4864, 24, 14, 2, 64, 151936, **_QWEN),
    "0.5B of the target": _shape(896, 4864, 24, 14, 2, 64, 128256, **_QWEN),
    "1B": _shape(2048, 8192, 16, 32, 8, 64, 128256),
    "tiny": _shape(128, 256, 2, 4, 2, 32, 6144),
}
TARGET, DRAFTER, PEER = ("8B", "0.5B", "0.5B of the target") if GPU else ("tiny",) * 3

# Setups of part A: options of our method, and arguments of the engine. Without a GPU only three.
_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} if GPU else {}
A: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "alone": (None, _GRAPHS),
    "eager": ({"enforce_eager": True}, _GRAPHS),
    "itself": ({}, _GRAPHS),  # the target is the drafter
    "graphs": ({}, _GRAPHS),
    "compiled": ({"enforce_eager": False}, {}),
    "stopping": ({"controller": "confidence"}, _GRAPHS),
    "trees": ({"tree_nodes": 8}, _GRAPHS),
    "in turn": ({}, {**_GRAPHS, "async_scheduling": False}),
}
# Variants of part B: shape of the drafter, and options of our method. Without a GPU only one.
B: dict[str, tuple[str, dict[str, Any]]] = {
    "today": (DRAFTER, {}),
    "compiled": (DRAFTER, {"enforce_eager": False}),
    "fp8": (DRAFTER, {"enforce_eager": False, "quantization": "fp8"}),
    "1B": ("1B", {}),
    "1B, compiled": ("1B", {"enforce_eager": False}),
}
# CUDA graph sizes and KV of the target in parts C to S.
_ROWS = {"cudagraph_capture_sizes": [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]}
_SERVED = {"compilation_config": _ROWS, "kv_cache_memory_bytes": 6 << 30} if GPU else {}


class Cell(NamedTuple):
    """A load; the draft length is LOOKAHEAD, or chosen by `goodput` if nothing is accepted."""

    batch: int
    length: int | None  # imposed acceptance length; None: real verification
    temperature: float = 0.0


C = [Cell(1, 3), Cell(8, 3), Cell(1, 1), Cell(8, 1), Cell(32, 3), Cell(1, 2), Cell(1, 4)]
C += [Cell(8, 2), Cell(8, 4), Cell(32, 2), Cell(32, 4), Cell(32, 1)]
_ROUNDS, _CELLS = (100, len(C)) if GPU else (1, 4)


class Engine(EngineProcess):
    """An engine that also runs methods of its worker."""

    program = "_gpu_worker"

    def ask(self, question: Load | Sequence[Any], until: float) -> Any:
        """Return the `Sample` of a load, or the result of a method: (name, *arguments)."""
        return self._ask(question, max(0.0, until - time.monotonic()))


class Run:
    """Deadlines, output and engines of a run."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self._folder, self._lock = given, folder, Lock()
        self._began = time.monotonic()
        # Ends of the current part and of the run, in seconds of the monotonic clock.
        self.until = self.end = self._began + 60 * given.minutes
        self.texts = [text[:300] for text in load_prompts(given.prompts, 32)]
        self.served: dict[str, Future[Engine]] = {}  # for parts C to S; start in the background
        # The chain of tokens that models repeat: words of one token each, separated by spaces.
        words = [f" {word}" for word in dict.fromkeys(" ".join(self.texts).split())]
        tokenizer = Tokenizer.from_file(str(given.target / "tokenizer.json"))
        encoded = [each.ids for each in tokenizer.encode_batch(words, add_special_tokens=False)]
        self._recited = [ids[0] for ids in encoded if len(ids) == 1]

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def line(self, part: str, **found: Any) -> None:
        """Print a result and append it to the file."""
        text = json.dumps({"part": part, "at": round(time.monotonic() - self._began, 1), **found})
        with self._lock, self.given.out.open("a") as file:
            print(text, flush=True)
            file.write(text + "\n")

    def model(self, shape: str) -> str:
        """Return a copy of the target's folder with another shape and without weights."""
        out, source = self._folder / shape, self.given.target
        with self._lock:
            if not out.exists():
                shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
                config = json.loads((source / "config.json").read_text()) | SHAPES[shape]
                (out / "config.json").write_text(json.dumps(config | {"recited": self._recited}))
        return str(out)

    def start(self, target: str, drafts: Mapping[str, Any], until: float, **engine: Any) -> Engine:
        spec = {"num_speculative_tokens": LOOKAHEAD, **drafts} if drafts else None
        engine = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28, **engine}
        engine["worker_extension_cls"] = "_gpu_worker.GpuWorker"
        if GPU:
            engine["gpu_memory_utilization"] = 0.05  # vLLM requires this share to be free
        limits = {"verbose": self.given.verbose, "start_timeout": max(0, until - time.monotonic())}
        return Engine(EngineSpec(target, spec, 32, engine), **limits)

    def ours(self, shape: str, **options: Any) -> dict[str, Any]:
        """Return our options: no calibration beside busy engines, no copies of imposed tokens."""
        debug = {"translation": "text", "calibrate": False, "copies": False}
        return {"method": "hetero", "model": self.model(shape), "debug": debug, **options}

    def serve(self) -> None:
        """Start the engines of part C in the background."""
        drafts: dict[str, dict[str, Any]] = {"alone": {}, "ours": self.ours(DRAFTER)}
        drafts["draft_model"] = {"method": "draft_model", "model": self.model(PEER)}

        def started(of: Mapping[str, Any]) -> Engine:
            return self.start(self.model(TARGET), of, self.end, load_format="reciting", **_SERVED)

        pool = ThreadPoolExecutor(len(drafts) if GPU else 1)
        self.served = {name: pool.submit(started, of) for name, of in drafts.items()}

    def up(self, part: str, names: Sequence[str]) -> dict[str, Engine]:
        """Return those of the served engines that are up before the current part ends."""
        found = {}
        for name in names:
            try:
                found[name] = self.served[name].result(max(0.0, self.left))
            except (*_FAILED, TimeoutError) as error:
                self.line(part, engine=name, error=str(error) or "it has not started yet")
        return found

    def play(self, engine: Engine, cell: Cell, tokens: int = 0) -> Sample:
        rates = None if cell.length is None else [RATES[cell.length]] * LOOKAHEAD
        lookahead = 0 if cell.length == 1 else LOOKAHEAD
        engine.ask(["gpu_set", rates, lookahead], self.end)
        tokens = tokens or (128 if cell.batch == 1 else 96 if cell.batch == 8 else 64)
        tokens, top_p = tokens if GPU else min(tokens, 12), 0.9 if cell.temperature else 1.0
        texts, heat = self.texts[: cell.batch], cell.temperature
        load = Load(texts, tokens, cell.batch, heat, top_p, seed=0, ignore_eos=True)
        sample: Sample = engine.ask(load, self.end)
        return sample


def figures(sample: Sample) -> dict[str, Any]:
    """Return the figures of a load; without drafts, rounds are arrivals of the longest request."""
    worker, longest = sample.worker, max(len(trace.times) for trace in sample.traces)
    rounds, speed = worker.get("steps") or longest, round(sample.tokens_per_second, 1)
    found = {"rounds": rounds, "ms_a_round": round(1e3 * sample.seconds / rounds, 3)}
    found |= {"tokens_per_second": speed, "length": sample.acceptance_length}
    found |= {"drafts": sample.drafts, "draft_tokens": sample.draft_tokens}
    return found | {name: worker[name] for name in ("forwards", "skipped") if name in worker}


def faults(sample: Sample) -> int:
    """Return the number of missing drafts that faults of the drafter caused."""
    return sum(sample.worker.get("skipped", {}).get(reason, 0) for reason in _FAULTS)


def side_by_side(
    run: Run, part: str, names: Sequence[str], job: Callable[[str], Any]
) -> Iterator[tuple[str, Any]]:
    """Run a job for each name in parallel; yield results, and write failures as lines."""
    with ThreadPoolExecutor(len(names) if GPU else 1) as pool:
        jobs = {pool.submit(job, name): name for name in names}
        for done in as_completed(jobs):
            try:
                found = done.result()
            except _FAILED as error:
                run.line(part, setup=jobs[done], error=str(error))
                continue
            run.line(part, setup=jobs[done], **(figures(found) if part == "A" else found))
            yield jobs[done], found


def part_0(run: Run) -> bool:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    clocks = subprocess.run(query, capture_output=True, text=True).stdout.strip() if GPU else ""
    device, bytes_ = torch.device("cuda" if GPU else "cpu"), 1 << (30 if GPU else 24)
    source = torch.zeros(bytes_, dtype=torch.uint8, device=device)
    there, send, numbers = source.clone(), Sender(device).send, np.zeros(512, np.int64)
    took = {"copy": milliseconds(lambda: there.copy_(source), 4)}
    took["packet"] = milliseconds(lambda: send(numbers))
    if GPU:
        graph, event = torch.cuda.CUDAGraph(), torch.cuda.Event()
        with torch.cuda.graph(graph):
            for _ in range(300):
                source[:1].add_(1)
        took["300 kernels"] = milliseconds(graph.replay)
        took["event"] = milliseconds(lambda: (event.record(), event.synchronize()))
    bandwidth = round(2e-6 * bytes_ / took["copy"], 1)
    run.line("0", **provenance(), clocks=clocks, milliseconds=took, gb_per_s=bandwidth)
    return True


def part_a(run: Run) -> bool:
    """Compare tokens with those of the target alone, and acceptance rates with each other."""
    given, texts, wanted = run.given, run.texts[: 16 if GPU else 4], list(A)[: None if GPU else 3]
    load = Load(texts, 48 if GPU else 16, batch_size=8, ignore_eos=True)
    exact = {"dtype": "float32", "attention_backend": "TRITON_ATTN"} if GPU else {}

    def serve(name: str) -> Sample:
        options, more = A[name]
        if options is not None:
            drafter = given.target if name == "itself" else given.drafter
            options = {"method": "hetero", "model": str(drafter), "controller": "fixed", **options}
        with run.start(str(given.target), options or {}, run.until, **exact, **more) as engine:
            return engine.ask(load, run.until)

    found: dict[str, Sample] = dict(side_by_side(run, "A", wanted, serve))
    ids = {name: [trace.token_ids for trace in of.traces] for name, of in found.items()}
    same = {name: sum(map(eq, of, ids.get("alone", ()))) for name, of in ids.items()}
    shares = {name: of.accepted_tokens / of.draft_tokens for name, of in found.items() if of.drafts}
    run.line("A", texts=len(texts), same=same, accepted=shares)
    alike = [shares[name] for name in ("eager", "graphs", "compiled", "in turn") if name in shares]
    good = same == dict.fromkeys(wanted, len(texts)) and not any(map(faults, found.values()))
    # CUDA graphs and compiled models round differently, so rates may differ slightly.
    return good and shares["itself"] == 1 and max(alike) - min(alike) <= 0.01


def part_b(run: Run) -> bool:
    """Time the drafter's forwards, with a tiny target; timings do not overlap."""
    alone, wanted = Lock(), list(B)[: None if GPU else 1]
    batches, contexts = ([1, 8, 32], [256, 3000]) if GPU else ([1, 2], [])
    room = {"context": 4096, "kv_cache_memory_bytes": 1 << 30} if GPU else {}

    def measure(name: str) -> Any:
        shape, options = B[name]
        tiny, drafts = run.model("tiny"), run.ours(shape, **room, **options)
        more = {"load_format": "reciting", **({} if options else _GRAPHS)}
        with run.start(tiny, drafts, run.until, **more) as engine, alone:
            return engine.ask(["gpu_forwards", batches, contexts], run.until)

    return "today" in dict(side_by_side(run, "B", wanted, measure))


def rounds(run: Run, part: str, players: Sequence[str], cells: Sequence[Cell], most: int) -> bool:
    """Run the served engines of these names in turn in all cells, until the part ends."""
    engines = run.up(part, players)
    playing = list(engines)
    ratios: dict[tuple[Cell, str], list[float]] = defaultdict(list)
    took, good = dict[Cell, float](), len(playing) == len(players)
    for number, cell in product(range(most if playing else 0), cells):
        began, turn, found = time.monotonic(), number % len(playing), dict[str, Sample]()
        if run.left <= took.get(cell, 0.0):
            break
        for name in playing[turn:] + playing[:turn]:
            found[name] = run.play(engines[name], cell)
            good &= not faults(found[name])
        took[cell] = time.monotonic() - began
        run.line(part, round=number, cell=cell._asdict(), **{n: figures(found[n]) for n in playing})
        for name in playing[1:]:
            speeds = found[name].tokens_per_second, found[playing[0]].tokens_per_second
            ratios[cell, name].append(round(speeds[0] / speeds[1], 3))
    for (cell, name), of in ratios.items():
        run.line(part, cell=cell._asdict(), player=name, ratio=median(of), of=of)
    return good and bool(took)


def part_d(run: Run) -> bool:
    """Profile a dozen rounds of our engine, and as many steps of the target alone."""
    found = []
    for name, engine in run.up("D", ["ours", "alone"]).items():
        for cell in (Cell(1, 3), Cell(8, 3), Cell(1, 1)):
            trace = run.given.out.with_suffix(f".{name}-{cell.batch}-{cell.length}.json.gz")
            tokens = 36 if name == "ours" and cell.length == 3 else 12
            run.play(engine, cell, tokens=tokens)  # a warm-up
            engine.ask(["gpu_profile"], run.end)
            rounds = figures(run.play(engine, cell, tokens=tokens))["rounds"]
            found.append(engine.ask(["gpu_profiled", rounds, str(trace.absolute())], run.end))
            run.line("D", engine=name, cell=cell._asdict(), rounds=rounds, **found[-1])
    return len(found) == 6


_ALL = ("alone", "ours", "draft_model")
_SAMPLED = [Cell(1, None, 0.7), Cell(8, None, 0.7)]
# Function of each part, and the share of the time at which it ends.
PARTS: dict[str, tuple[Callable[[Run], bool], float]] = {
    "0": (part_0, 0.04),
    "A": (part_a, 0.22),
    "B": (part_b, 0.36),
    "C": (lambda run: rounds(run, "C", _ALL, C[:_CELLS], _ROUNDS), 0.87),
    "D": (part_d, 0.96),
    "S": (lambda run: rounds(run, "S", _ALL[:2], _SAMPLED, 1), 1.0),
}


def main() -> int:
    demo = demo_folder()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--target", type=Path, default=demo / "target", help="a small model")
    parser.add_argument("--drafter", type=Path, default=demo / "drafter", help="another")
    parser.add_argument("--prompts", type=Path, default=demo / "prompts.jsonl")
    parser.add_argument("--out", type=Path, default=Path("measure_gpu.jsonl"), help="%(default)s")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    given = parser.parse_args()
    for path in (given.target, given.drafter, given.prompts):
        if not path.exists():
            parser.error(f"{path} does not exist; scripts/make_demo.py makes the demo pair.")
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        run = Run(given, Path(folder))
        if set(given.parts) - {"0", "A", "B"}:
            run.serve()
        for name in given.parts:
            work, share = PARTS[name]
            share = 1.0 if name == given.parts[-1] else share
            run.until = run.end - (1 - share) * 60 * given.minutes
            try:
                good, error = work(run), ""
            except Exception as raised:
                good, error = False, f"{type(raised).__name__}: {raised}"
            late = not good and run.left <= 0
            run.line(name, ok=good, late=late, error=error)
            if not good:
                code = _LATE if late and code in (0, _LATE) else 1
        for engine in run.served.values():
            with contextlib.suppress(*_FAILED):
                engine.result().close()
    return code


if __name__ == "__main__":
    path = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)  # the engines' program is beside this file
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # otherwise float32 is multiplied as TF32
    sys.exit(main())
