# SPDX-License-Identifier: Apache-2.0
"""Measures goodput beside fixed lookaheads and no drafts, all in the same engines.

Two engines that do the same work may differ by a quarter on a CPU, for as long as they live, which
hides what a controller gains. So here one engine serves the same requests under one controller
after the other, each in its turn the first of a round; the controllers that learn keep what they
learnt. Beside "goodput" there is "fresh", which begins each load with nothing but the costs.

    python scripts/measure_lookahead.py --target DIR --drafter DIR --prompts FILE.jsonl
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the proposer is in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from rich.console import Console
from rich.progress import track

from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.lookahead.controllers import Controller, Fixed
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.measure.load import Load, Sample

ALONE, GOODPUT, FRESH = "alone", "goodput", "fresh"


@dataclass(frozen=True)
class Run:
    """One load under one controller.

    Attributes:
        batch: Requests in flight.
        number: Of the round, over all engines; its controllers all serve the same prompts.
        controller: "alone", "k4", "goodput" or "fresh".
        seconds: From the first request to the last token.
        tokens: Generated.
        drafted: Tokens verified.
        accepted: Of those.
        proposing: Share of the time that went into proposing.
        same: Whether all tokens are those of the target alone.
    """

    batch: int
    number: int
    controller: str
    seconds: float
    tokens: int
    drafted: int
    accepted: int
    proposing: float
    same: bool

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Bench:
    """One engine whose controller can be exchanged."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm import LLM

        from vllm_hetero_spec.measure.vllm_driver import Driver

        self._arguments = arguments
        llm = LLM(
            arguments.target,
            speculative_config={
                "method": arguments.method,
                "model": arguments.drafter,
                "num_speculative_tokens": max([arguments.lookahead, *arguments.fixed]),
            },
            max_num_seqs=max(arguments.batches),
            disable_log_stats=False,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            kv_cache_memory_bytes=512 << 20,
        )
        core = llm.llm_engine.engine_core.engine_core
        self._proposer = core.model_executor.driver_worker.worker.model_runner.drafter
        self._driver = Driver(llm)
        goodput = self._proposer.controller
        self._costs = copy.deepcopy(goodput.known.costs)
        self._controllers: dict[str, Controller] = {
            ALONE: Fixed(0),
            **{f"k{k}": Fixed(k) for k in arguments.fixed},
            GOODPUT: goodput,
        }

    def rounds(self, first: int, prompts: Sequence[str]) -> list[Run]:
        """All rounds of all batch sizes; `first` is the number of the first."""
        names = [*self._controllers, FRESH]
        runs = []
        for batch in self._arguments.batches:
            count = max(batch, self._arguments.tokens // self._arguments.longest)
            for number in range(first, first + self._arguments.rounds):
                texts = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
                load = Load(
                    prompts=texts,
                    max_tokens=min(self._arguments.tokens // count, self._arguments.longest),
                    batch_size=batch,
                    ignore_eos=True,
                )
                samples = {name: self._serve(name, load) for name in _in_turn(names, number)}
                alone = _tokens(samples[ALONE])
                runs += [
                    Run(
                        batch, number, name, sample.seconds, sample.tokens, sample.draft_tokens,
                        sample.accepted_tokens, sample.worker["propose_seconds"] / sample.seconds,
                        _tokens(sample) == alone,
                    )
                    for name, sample in samples.items()
                ]  # fmt: skip
        return runs

    def _serve(self, name: str, load: Load) -> Sample:
        """A load under one controller."""
        self._proposer.controller = self._controllers.get(name) or self._fresh()
        return self._driver.run(load)

    def _fresh(self) -> Goodput:
        """As "goodput", without what was learnt of drafts."""
        positions = self._proposer.options.num_speculative_tokens
        can_stop_early = self._proposer.drafting.control.can_stop_early
        known = Estimates.of(copy.deepcopy(self._costs), positions)
        return Goodput(known, can_stop_early=can_stop_early)


def _in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: in as many rounds as there are names, each has each place once."""
    by = number % len(names)
    turned = [*names[by:], *names[:by]]
    return turned[::-1] if number // len(names) % 2 else turned


def _tokens(sample: Sample) -> list[list[int]]:
    return [trace.token_ids for trace in sample.traces]


def serve(arguments: argparse.Namespace, first: int, prompts: Sequence[str]) -> list[Run]:
    """Start an engine and run its rounds, in a process of its own."""
    return Bench(arguments).rounds(first, prompts)


def report(runs: Sequence[Run]) -> str:
    """A table of all batch sizes and controllers, each beside the others of its rounds."""
    rows = []
    for batch in sorted({run.batch for run in runs}):
        found: dict[str, dict[int, Run]] = {}
        for run in runs:
            if run.batch == batch:
                found.setdefault(run.controller, {})[run.number] = run
        fixed = [name for name in found if name not in (GOODPUT, FRESH)]
        best = max(fixed, key=lambda name: _ratio(found[name], found[ALONE])[0])
        for name in sorted(found, key=lambda name: (name[1:].isalpha(), name)):
            of = list(found[name].values())
            rows.append(
                [
                    str(batch),
                    name,
                    f"{statistics.mean(run.rate for run in of):.1f}",
                    "{:.3f} ±{:.3f}".format(*_ratio(found[name], found[ALONE])),
                    "{:.3f} ±{:.3f}".format(*_ratio(found[name], found[best])),
                    f"{sum(run.drafted for run in of) / sum(run.tokens for run in of):.2f}",
                    f"{sum(run.accepted for run in of) / sum(run.tokens for run in of):.2f}",
                    f"{statistics.mean(run.proposing for run in of):.3f}",
                    f"{sum(run.same for run in of)} of {len(of)}",
                ]
            )
    columns = [
        "batch", "controller", "tok/s", "of alone", "of the best that is fixed",
        "drafted per token", "accepted per token", "proposing", "same tokens",
    ]  # fmt: skip
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ratio(runs: dict[int, Run], others: dict[int, Run]) -> tuple[float, float]:
    """Geometric mean of the ratio of rates in the same rounds, and its standard error."""
    logs = [math.log(run.rate / others[number].rate) for number, run in runs.items()]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    mean = math.exp(statistics.mean(logs))
    return mean, mean * error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--max-prompt-chars", type=int, default=300)
    parser.add_argument("--method", default="slem")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep everything measured")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 4, 8], help="lookaheads")
    parser.add_argument("--lookahead", type=int, default=8, help="of goodput, at most")
    parser.add_argument("--engines", type=int, default=2, help="one after the other")
    parser.add_argument("--rounds", type=int, default=2, help="of each engine and batch size")
    parser.add_argument("--tokens", type=int, default=512, help="of a load, about")
    parser.add_argument("--longest", type=int, default=64, help="tokens of a request, at most")
    arguments = parser.parse_args()
    try:
        texts = load_prompts(arguments.prompts, sys.maxsize)
    except ConfigError as error:
        parser.error(str(error))
    prompts = [text[: arguments.max_prompt_chars] for text in texts]
    context = multiprocessing.get_context("spawn")
    runs: list[Run] = []
    engines = range(arguments.engines)
    for engine in track(engines, "engines", console=Console(stderr=True), transient=True):
        with context.Pool(1) as pool:
            runs += pool.apply(serve, (arguments, engine * arguments.rounds, prompts))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([vars(run) for run in runs]), encoding="utf-8")
    print(report(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
