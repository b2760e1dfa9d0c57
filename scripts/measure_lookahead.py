# SPDX-License-Identifier: Apache-2.0
"""Measures goodput beside fixed lookaheads and no drafts, all in the same engines.

Two engines that do the same work may differ by a quarter on a CPU, for as long as they live, which
hides what a controller gains. So here one engine serves the same requests under one controller
after the other, each in its turn the first of a round; the controllers that learn keep what they
learnt. Beside "goodput" there is "fresh", which begins each load with nothing but the costs.

    python scripts/measure_lookahead.py --target DIR --drafter DIR --prompts FILE.jsonl

With `--tree-nodes` it measures what it costs, or brings, that drafts may be trees: one goodput
controller that may draft "trees", and one that drafts "chains", as in an engine without trees. Two
that learn by themselves may differ by a tenth for many rounds where drafting hardly pays, since one
drafts and the other does not. So both begin each load with the same knowledge: what the first one
of the round before has learnt. Tokens are raced for: output is the same whatever is drafted. With
the demo pair, a quarter of an hour on two cores:

    python scripts/measure_lookahead.py --target $DEMO/target-wide --drafter $DEMO/drafter \\
        --prompts $DEMO/prompts.jsonl --max-prompt-chars 160 --method hetero --lookahead 4 \\
        --fixed --tree-nodes 8 --batches 1 4 8 16 --temperatures 0 1 --tokens 96 --longest 24 \\
        --engines 1 --unmeasured 2 --rounds 15
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the proposer is in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
from rich.console import Console
from rich.progress import track

from vllm_hetero_spec.bench.load import Load, Sample
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.lookahead.controllers import Controller, Fixed
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput

ALONE, GOODPUT, FRESH, CHAINS, TREES = "alone", "goodput", "fresh", "chains", "trees"
_DRAWN = 4000  # means, for an interval


@dataclass(frozen=True)
class Run:
    """One load under one controller.

    Attributes:
        batch: Requests in flight.
        temperature: Of all of them.
        number: Of the round, over all engines; its controllers all serve the same prompts.
        controller: "alone", "k4", "goodput" or "fresh"; or else "chains" or "trees".
        seconds: From the first request to the last token.
        tokens: Generated.
        drafted: Tokens verified.
        accepted: Of those.
        trees: Drafts that were trees.
        off: Share of the steps that were left to the target alone.
        proposing: Share of the time that went into proposing.
        same: Whether all tokens are those of the first controller: the target alone, or chains.
    """

    batch: int
    temperature: float
    number: int
    controller: str
    seconds: float
    tokens: int
    drafted: int
    accepted: int
    trees: int
    off: float
    proposing: float
    same: bool

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Bench:
    """One engine whose controller can be exchanged.

    Args:
        arguments: Of the command line.
        proposer: The engine's `HeteroProposer`.
        run: Serves a load.
    """

    def __init__(
        self, arguments: argparse.Namespace, proposer: Any, run: Callable[[Load], Sample]
    ) -> None:
        self._arguments, self._proposer, self._run = arguments, proposer, run
        goodput = proposer.controller
        positions = proposer.options.num_speculative_tokens
        # Of the pair, when a load begins: the costs, and what "chains" and "trees" have learnt.
        self._known = Estimates.of(copy.deepcopy(goodput.known.costs), positions)
        fixed = {f"k{k}": Fixed(k) for k in arguments.fixed}
        self._lasting: dict[str, Controller] = {ALONE: Fixed(0), **fixed, GOODPUT: goodput}

    @classmethod
    def start(cls, arguments: argparse.Namespace) -> "Bench":
        """Start an engine in this process."""
        from vllm import LLM

        from vllm_hetero_spec.bench.vllm_engine import Driver

        speculative: dict[str, Any] = {
            "method": arguments.method,
            "model": arguments.drafter,
            "num_speculative_tokens": max([arguments.lookahead, *arguments.fixed]),
        }
        engine: dict[str, Any] = {"kv_cache_memory_bytes": 512 << 20}
        if arguments.tree_nodes:
            speculative |= {"tree_nodes": arguments.tree_nodes, "verification": "race"}
            engine = {"kv_cache_memory_bytes": 1 << 30, "block_size": 32}
        llm = LLM(
            arguments.target,
            speculative_config=speculative,
            # Side paths of trees take places beside the requests'.
            max_num_seqs=max(arguments.batches) * (1 + arguments.tree_nodes),
            disable_log_stats=False,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            **engine,
        )
        core = llm.llm_engine.engine_core.engine_core
        proposer = core.model_executor.driver_worker.worker.model_runner.drafter
        return cls(arguments, proposer, Driver(llm).run)

    def rounds(self, first: int, prompts: Sequence[str]) -> list[Run]:
        """All rounds of all batch sizes; `first` is the number of the first."""
        given = self._arguments
        names = [CHAINS, TREES] if given.tree_nodes else [*self._lasting, FRESH]
        runs = []
        for batch, temperature in product(given.batches, given.temperatures):
            count = max(batch, given.tokens // given.longest)
            for number in range(first - given.unmeasured, first + given.rounds):
                texts = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
                load = Load(
                    prompts=texts,
                    max_tokens=given.longest,
                    batch_size=batch,
                    temperature=temperature,
                    seed=abs(number) * count,
                    ignore_eos=True,
                )
                samples = self._round(_in_turn(names, number), load)
                if number < first:
                    continue
                expected = _tokens(samples[names[0]])
                runs += [
                    Run(
                        batch, temperature, number, name, sample.seconds, sample.tokens,
                        sample.draft_tokens, sample.accepted_tokens, sample.worker["trees"],
                        sample.worker["off_steps"] / sample.worker["steps"],
                        sample.worker["propose_seconds"] / sample.seconds,
                        _tokens(sample) == expected,
                    )
                    for name, sample in samples.items()
                ]  # fmt: skip
        return runs

    def _round(self, names: Sequence[str], load: Load) -> dict[str, Sample]:
        """A load under one controller after the other."""
        samples, made = dict[str, Sample](), list[Goodput]()
        for name in names:
            if name not in self._lasting:
                made.append(self._made(name))
            self._proposer.controller = self._lasting.get(name) or made[-1]
            samples[name] = self._run(load)
        if self._arguments.tree_nodes:
            self._known = made[0].known
        return samples

    def _made(self, name: str) -> Goodput:
        """A controller of a load that begins: one that decides with what is known."""
        can_stop_early = self._proposer.drafting.control.can_stop_early
        width = self._proposer.options.tree_width if name == TREES else 0
        return Goodput(copy.deepcopy(self._known), can_stop_early=can_stop_early, width=width)


def _in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: in as many rounds as there are names, each has each place once."""
    by = number % len(names)
    turned = [*names[by:], *names[:by]]
    return turned[::-1] if number // len(names) % 2 else turned


def _tokens(sample: Sample) -> list[list[int]]:
    return [trace.token_ids for trace in sample.traces]


def serve(arguments: argparse.Namespace, first: int, prompts: Sequence[str]) -> list[Run]:
    """Start an engine and run its rounds, in a process of its own."""
    return Bench.start(arguments).rounds(first, prompts)


def report(runs: Sequence[Run]) -> str:
    """A table of all loads and controllers, each beside the others of its rounds."""
    base = next(name for name in (ALONE, CHAINS) if any(run.controller == name for run in runs))
    rows = []
    for cell in sorted({(run.batch, run.temperature) for run in runs}):
        found: dict[str, dict[int, Run]] = {}
        for run in runs:
            if (run.batch, run.temperature) == cell:
                found.setdefault(run.controller, {})[run.number] = run
        fixed = [name for name in found if name not in (GOODPUT, FRESH, TREES)]
        best = max(fixed, key=lambda name: _ratio(found[name], found[base]).mean)
        for name in sorted(found, key=lambda name: (name[1:].isalpha(), name)):
            of = list(found[name].values())
            tokens, ratio = sum(run.tokens for run in of), _ratio(found[name], found[base])
            row = {
                "batch": str(cell[0]),
                "temperature": str(cell[1]),
                "controller": name,
                "tok/s": f"{statistics.mean(run.rate for run in of):.1f}",
                f"of {base}": f"{ratio.mean:.3f} ±{ratio.error:.3f}",
                "95 %": f"{ratio.low:.3f} to {ratio.high:.3f}",
            }
            if base == ALONE:
                ratio = _ratio(found[name], found[best])
                row["of the best that is fixed"] = f"{ratio.mean:.3f} ±{ratio.error:.3f}"
            row |= {
                "drafted per token": f"{sum(run.drafted for run in of) / tokens:.2f}",
                "accepted per token": f"{sum(run.accepted for run in of) / tokens:.2f}",
                "trees": str(sum(run.trees for run in of)),
                "left alone": f"{statistics.mean(run.off for run in of):.2f}",
                "proposing": f"{statistics.mean(run.proposing for run in of):.3f}",
                "same tokens": f"{sum(run.same for run in of)} of {len(of)}",
            }
            rows.append(row)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Ratio(NamedTuple):
    """A ratio of rates in the same rounds.

    Attributes:
        mean: Geometric.
        error: Its standard error.
        low, high: Where 95 % of the means of as many rounds lie that are drawn from these.
    """

    mean: float
    error: float
    low: float
    high: float


def _ratio(runs: dict[int, Run], others: dict[int, Run]) -> Ratio:
    logs = np.log([run.rate / others[number].rate for number, run in runs.items()])
    mean = float(np.exp(logs.mean()))
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    drawn = np.random.default_rng(0).choice(logs, (_DRAWN, len(logs))).mean(1)
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975])).tolist()
    return Ratio(mean, mean * error, low, high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--max-prompt-chars", type=int, default=300)
    parser.add_argument("--method", default="slem")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep everything measured")
    parser.add_argument("--tree-nodes", type=int, default=0, help="compare chains with trees")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 4, 8], help="lookaheads")
    parser.add_argument("--lookahead", type=int, default=8, help="of goodput, at most")
    parser.add_argument("--engines", type=int, default=2, help="one after the other")
    parser.add_argument("--rounds", type=int, default=2, help="of each engine and batch size")
    parser.add_argument("--unmeasured", type=int, default=0, help="rounds before these")
    parser.add_argument("--tokens", type=int, default=512, help="of a load, or more")
    parser.add_argument("--longest", type=int, default=64, help="tokens of a request")
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
