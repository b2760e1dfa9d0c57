# SPDX-License-Identifier: Apache-2.0
"""Measures how the goodput controller follows a load that changes: few requests, many, few again.

The same load is served by the target alone, by fixed lookaheads and by goodput, one engine at a
time, each in a process of its own. In every phase requests are replaced as they end; a smaller
phase aborts those that are too many. A phase is judged after its first seconds, in which the
controller may still be finding out; how long that took is the second figure.

    python scripts/measure_regimes.py --target DIR --drafter DIR --prompts FILE.jsonl
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the proposer is in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from _markdown import markdown_table
from _pair import ENGINE, pair_parser, prompts_of
from rich.console import Console
from rich.progress import track


@dataclass(frozen=True)
class Step:
    """One step of an engine.

    Attributes:
        at: When it ended, in seconds from the start of its phase.
        tokens: Generated in it.
        regime: What the controller did; empty for the target alone.
    """

    at: float
    tokens: int
    regime: str


@dataclass(frozen=True)
class Phase:
    """What one engine did while so many requests were in flight.

    Attributes:
        batch: Requests.
        seconds: How long.
        steps: In order.
    """

    batch: int
    seconds: float
    steps: Sequence[Step]

    @property
    def settled(self) -> float:
        """Seconds until the first step with all requests in it: until then prompts are read."""
        return next((step.at for step in self.steps if step.tokens >= self.batch), 0.0)

    def rate(self, after: float) -> float:
        """Tokens per second, those of the first `after` seconds left out, or of longer reading."""
        start = next(step.at for step in self.steps if step.at >= max(after, self.settled))
        tokens = sum(step.tokens for step in self.steps if step.at > start)
        return tokens / (self.steps[-1].at - start)

    @property
    def followed(self) -> float:
        """Seconds from `settled` until the controller did what it did most of the later half.

        Steps count by the time they took.
        """
        spent: dict[str, float] = {}
        for before, step in itertools.pairwise(self.steps):
            if step.at > self.seconds / 2:
                spent[step.regime] = spent.get(step.regime, 0.0) + step.at - before.at
        usual = max(spent, key=lambda regime: spent[regime])
        found = next(step.at for step in self.steps if step.regime == usual)
        return max(0.0, found - self.settled)


def serve(engine: str, arguments: argparse.Namespace, prompts: Sequence[str]) -> list[Phase]:
    """Start an engine and lead it through all phases.

    Args:
        engine: "alone", "goodput" or a fixed lookahead such as "k4".
        arguments: Of the command line.
        prompts: Taken in turn.
    """
    from vllm import LLM

    most = max(arguments.batches)
    spec: dict[str, Any] | None = None
    if engine != "alone":
        spec = {"method": arguments.method, "model": str(arguments.drafter)}
        spec["num_speculative_tokens"] = 8 if engine == "goodput" else int(engine[1:])
        spec["controller"] = "goodput" if engine == "goodput" else "fixed"
    llm = LLM(
        str(arguments.target),
        speculative_config=spec,
        max_num_seqs=most,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **ENGINE,
    )
    load = _Load(llm, arguments, prompts)
    load.run(most, 3.0)  # warm
    load.run(arguments.batches[0], 3.0)
    return [load.run(batch, arguments.seconds) for batch in arguments.batches]


class _Load:
    """Requests that are replaced as they end."""

    def __init__(self, llm: Any, arguments: argparse.Namespace, prompts: Sequence[str]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = llm.llm_engine
        self._params = SamplingParams(
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._prompts, self._numbers = prompts, itertools.count()
        self._live: dict[str, None] = {}
        worker = self._engine.engine_core.engine_core.model_executor.driver_worker.worker
        self._drafter = getattr(worker.model_runner, "drafter", None)

    def run(self, batch: int, seconds: float) -> Phase:
        """Keep so many requests in flight for so long, every engine from the first prompt on."""
        surplus = list(self._live)[batch:]
        self._engine.abort_request(surplus)
        for request_id in surplus:
            del self._live[request_id]
        began = time.perf_counter()
        steps = list(self._steps(batch, began, seconds))
        return Phase(batch, time.perf_counter() - began, steps)

    def _steps(self, batch: int, began: float, seconds: float) -> Iterator[Step]:
        texts = itertools.cycle(self._prompts)
        while time.perf_counter() - began < seconds:
            while len(self._live) < batch:
                name = str(next(self._numbers))
                self._live[name] = None
                self._engine.add_request(name, next(texts), self._params)
            tokens = 0
            for output in self._engine.step():
                tokens += len(output.outputs[0].token_ids)
                if output.finished:
                    self._live.pop(output.request_id, None)
            regime = "" if self._drafter is None else self._drafter.regime
            yield Step(time.perf_counter() - began, tokens, regime)


def report(phases: dict[str, list[Phase]], after: float) -> str:
    """A table of all phases, each engine beside the best of those that never change."""
    rows = []
    for number in range(len(next(iter(phases.values())))):
        rates = {engine: found[number].rate(after) for engine, found in phases.items()}
        best = max(rate for engine, rate in rates.items() if engine != "goodput")
        for engine, rate in rates.items():
            phase = phases[engine][number]
            followed = f"{phase.followed:.2f} s" if engine == "goodput" else "-"
            rows.append(
                [
                    f"{number + 1}: {phase.batch}",
                    engine,
                    f"{rate:.1f}",
                    f"{rate / best:.3f}",
                    f"{rate / rates['alone']:.3f}",
                    followed,
                ]
            )
    head = ["phase: requests", "engine", "tok/s", "of the best", "of alone", "followed after"]
    return markdown_table(head, rows)


def main() -> int:
    parser = pair_parser(__doc__.split("\n")[0])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 1])
    parser.add_argument("--fixed", type=int, nargs="*", default=[2, 4, 8], help="lookaheads")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a phase")
    parser.add_argument("--after", type=float, default=2.0, help="seconds that are not judged")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    prompts = prompts_of(parser, arguments)
    engines = ["alone", *(f"k{k}" for k in arguments.fixed), "goodput"]
    context = multiprocessing.get_context("spawn")
    phases: dict[str, list[Phase]] = {}
    for engine in track(engines, "engines", console=Console(stderr=True), transient=True):
        with context.Pool(1) as pool:
            phases[engine] = pool.apply(serve, (engine, arguments, prompts))
    if arguments.json is not None:
        kept = {
            engine: [
                {"batch": phase.batch, "seconds": phase.seconds, "steps": phase.steps}
                for phase in found
            ]
            for engine, found in phases.items()
        }
        arguments.json.write_text(json.dumps(kept, default=vars), encoding="utf-8")
    print(report(phases, arguments.after))
    return 0


if __name__ == "__main__":
    sys.exit(main())
