# SPDX-License-Identifier: Apache-2.0
"""Measures how many tokens the target keeps of chains and of trees, in engines: counts, no times.

Each shape of draft has an engine of its own with a fixed controller, so that all of it is drafted
whatever it costs, and serves the same prompts, few at a time: side paths need room in the target's
batch and KV cache. Greedy output is compared with the target's alone. Raced output is a function of
the seed, so that it is compared with that of a drafter of another kind: chains of one token.

Texts end where the target ends them. A round is an arrival of tokens behind those of the prompt and
of the step after it, for which nothing is drafted. Before it is measured, each half of the prompts
is preceded by the other: what values of nodes are learnt from.

    python scripts/measure_trees.py --target DIR --drafter DIR --prompts FILE.jsonl
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its engine is in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from rich.console import Console
from rich.progress import track

from vllm_hetero_spec.bench.figures import error_of_ratio
from vllm_hetero_spec.bench.load import Load, Sample
from vllm_hetero_spec.bench.tables import with_error
from vllm_hetero_spec.config import DEFAULT_TREE_WIDTH, ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts

GREEDY, RACE = "greedy", "race"
_UNDRAFTED = 2  # arrivals: of the prompt's step, and of the next one


@dataclass(frozen=True)
class Shape:
    """What drafts look like.

    Attributes:
        depth: Longest path, in target tokens; 0 is the target alone.
        nodes: Most tokens of a tree; 0 where drafts are chains.
    """

    depth: int
    nodes: int = 0

    def __str__(self) -> str:
        if self.nodes:
            return f"tree of {self.nodes}, {self.depth} deep"
        return f"chain of {self.depth}" if self.depth else "target alone"


def serve(arguments: argparse.Namespace, law: str, shape: Shape, load: Load) -> list[Sample]:
    """Both halves of a load in an engine of its own, in a process of its own."""
    from vllm import LLM

    from vllm_hetero_spec.bench.vllm_engine import Driver

    speculative: dict[str, Any] = {
        "method": arguments.method,
        "model": arguments.drafter,
        "num_speculative_tokens": shape.depth,
        "controller": "fixed",
        "tree_nodes": shape.nodes,
        **({"tree_width": arguments.width} if shape.nodes else {}),
        "verification": RACE if law == RACE else "token",
    }
    llm = LLM(
        arguments.target,
        speculative_config=speculative if shape.depth else None,
        max_num_seqs=48,  # side paths take places beside requests
        block_size=32,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        dtype="float32",
        enforce_eager=True,
        max_model_len=arguments.max_model_len,
    )
    driver, middle = Driver(llm), len(load.prompts) // 2
    first = replace(load, prompts=load.prompts[:middle])
    second = replace(load, prompts=load.prompts[middle:], seed=(load.seed or 0) + middle)
    if shape.nodes:
        driver.run(second)  # what is learnt of it is known to the first
    return [driver.run(half) for half in (first, second) if half.prompts]


def row(shape: Shape, samples: Sequence[Sample], expected: list[list[int]]) -> list[str]:
    """A line of the table.

    Args:
        shape: Of the drafts.
        samples: What was counted, of one part of the prompts each.
        expected: Token ids of each request.
    """
    traces = list(chain.from_iterable(sample.traces for sample in samples))
    same = sum(of.token_ids == ids for of, ids in zip(traces, expected, strict=True))
    rounds = [of.counts[_UNDRAFTED:] for of in traces if len(of.counts) > _UNDRAFTED]
    tokens, counts = [float(sum(of)) for of in rounds], [float(len(of)) for of in rounds]
    each, ones = [of / count for of, count in zip(tokens, counts, strict=True)], [1.0] * len(rounds)

    def of_draft(counter: str) -> float:
        drafts = sum(sample.worker["drafts"] for sample in samples)
        return sum(sample.worker[counter] for sample in samples) / max(1, drafts)

    return [
        str(shape),
        with_error(sum(tokens) / max(1.0, sum(counts)), error_of_ratio(tokens, counts)),
        with_error(sum(each) / max(1, len(each)), error_of_ratio(each, ones)),
        f"{of_draft('draft_tokens'):.1f}",
        f"{of_draft('trees'):.2f}",
        f"{of_draft('side_tokens_accepted'):.2f}",
        f"{same} of {len(expected)}",
    ]


def report(law: str, rows: Sequence[Sequence[str]]) -> str:
    """A table of all shapes."""
    columns = [law, "tokens per round", "mean of prompts", "nodes", "share of trees"]
    columns += ["accepted beside", "same tokens"]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--max-prompt-chars", type=int, default=sys.maxsize)
    parser.add_argument("--method", default="hetero")
    parser.add_argument("--laws", nargs="+", choices=(GREEDY, RACE), default=[GREEDY, RACE])
    parser.add_argument("--chains", type=int, nargs="*", default=[2, 4, 8], help="lookaheads")
    parser.add_argument("--trees", type=int, nargs="*", default=[4, 8, 16], help="nodes")
    parser.add_argument("--depth", type=int, default=8, help="of trees, at most")
    parser.add_argument("--width", type=int, default=DEFAULT_TREE_WIDTH, help="paths of a tree")
    parser.add_argument("--batch", type=int, default=2, help="requests in flight")
    parser.add_argument("--tokens", type=int, default=96, help="of each request")
    parser.add_argument("--max-model-len", type=int, default=1024)
    arguments = parser.parse_args()
    try:
        texts = load_prompts(arguments.prompts, sys.maxsize)
    except ConfigError as error:
        parser.error(str(error))
    prompts = [text[: arguments.max_prompt_chars] for text in texts]
    shapes = [Shape(k) for k in arguments.chains]
    shapes += [Shape(min(arguments.depth, nodes), nodes) for nodes in arguments.trees]
    context = multiprocessing.get_context("spawn")
    console = Console(stderr=True)
    for law in arguments.laws:
        load = Load(
            prompts, arguments.tokens, arguments.batch,
            temperature=float(law == RACE), seed=0,
        )  # fmt: skip
        rows, expected = [], list[list[int]]()
        first = Shape(int(law == RACE))
        for shape in track([first, *shapes], law, console=console, transient=True):
            with context.Pool(1) as pool:
                samples = pool.apply(serve, (arguments, law, shape, load))
            expected = expected or [of.token_ids for sample in samples for of in sample.traces]
            rows += [row(shape, samples, expected)] if shape.depth else []
        print(report(law, rows), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
