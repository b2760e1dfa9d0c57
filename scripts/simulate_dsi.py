# SPDX-License-Identifier: Apache-2.0
"""Distributed speculative inference as its authors measured it, beside drafts that are made ahead.

The drafter is real, in a process of its own. Targets are waits of one length each, that answer from
a greedy continuation computed before. Several of them verify one text at a time, a stretch each,
while the drafter goes on (arXiv 2405.14105); with one there are drafts by turns, and this package's
drafts behind guesses of where the target leaves the drafter. Beside each speed stands what its
schedule gives on paper, from what the drafter says behind each place of the same texts.

    python scripts/simulate_dsi.py --target DIR --drafter DIR --prompts FILE.jsonl
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines are in the processes made here
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # each process has cores of its own

from _parallel_model import ahead_speed, dsi_time, serial_time
from _parallel_options import pair_parser, parsed

if TYPE_CHECKING:
    from _parallel_schedules import Text, Written

COLUMNS = (
    "lookahead", "schedule", "tok/s", "over serial", "steps", "void", "drafted steps",
    "hits behind a draft", "hits behind none", "of the schedule on paper", "same tokens",
)  # fmt: skip
SERIAL = "serial"
_CHAIN = 16  # target tokens behind each place that the schedules on paper know


def continuations(options: argparse.Namespace, prompts: Sequence[str]) -> "list[Text]":
    """What the target writes behind prompts; in a process of its own."""
    from _parallel_schedules import Text
    from vllm import LLM, SamplingParams

    llm = LLM(
        options.target, dtype="float32", enforce_eager=True, max_model_len=1024,
        kv_cache_memory_bytes=256 << 20, max_num_seqs=16,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    outputs = llm.generate(list(prompts), greedy, use_tqdm=False)
    return [Text(list(of.prompt_token_ids), list(of.outputs[0].token_ids)) for of in outputs]


class Table:
    """What was measured.

    Args:
        texts: That were written.
    """

    def __init__(self, texts: "Sequence[Text]") -> None:
        self._texts, self._serial = texts, 0.0
        self._tokens = sum(len(text.ids) for text in texts)
        self.lines = [list(COLUMNS), ["---"] * len(COLUMNS)]

    def write(self, write: "Callable[[Text, Written], list[int]]") -> "tuple[Written, int]":
        """All texts; what it took, and how many are the target's own."""
        from _parallel_schedules import Written

        took = Written()
        return took, sum(write(text, took) == text.ids for text in self._texts)

    def add(self, lookahead: int, name: str, of: "tuple[Written, int]", paper: float) -> None:
        """A line; the first of each lookahead is what the others are compared with.

        Args:
            lookahead: Of drafts.
            name: Of the schedule.
            of: From `write`.
            paper: Seconds of all texts by the schedule.
        """
        took, same = of
        if name == SERIAL:
            self._serial = took.seconds
        shares = [f"{share:.2f}" for share in took.shares] if any(took.looks) else ["-", "-"]
        self.lines.append([
            str(lookahead), name, f"{self._tokens / took.seconds:.1f}",
            f"{self._serial / took.seconds:.2f}x", str(took.steps), str(took.void),
            f"{took.drafts / took.steps:.2f}", *shares, f"{paper / took.seconds:.2f}",
            f"{same} of {len(self._texts)}",
        ])  # fmt: skip


def measure(texts: "Sequence[Text]", options: argparse.Namespace) -> list[list[str]]:
    """All schedules on all texts; lines of the table."""
    first, second = options.cores
    os.sched_setaffinity(0, [first])
    from _parallel_chains import Chains, deployed
    from _parallel_schedules import Ahead, by_many, by_turns
    from _parallel_timed import timed
    from vllm.engine.arg_utils import EngineArgs

    target = options.target_ms / 1e3
    speculative: dict[str, Any] = {
        "method": "slem", "model": options.drafter, "controller": "fixed", "draft_ahead": True,
        "drafter_device": str(second), "kv_cache_memory_bytes": 256 << 20,
        "num_speculative_tokens": max([options.tokens // 4, *options.lookaheads]),
    }  # fmt: skip
    config = EngineArgs(
        options.target, speculative_config=speculative, dtype="float32", enforce_eager=True,
        max_model_len=1024, max_num_seqs=64, kv_cache_memory_bytes=64 << 20,
        **timed(target, options.drafter_ms / 1e3),
    ).create_engine_config()  # fmt: skip
    deployment, pair = deployed(config)
    chains = Chains(deployment, pair)
    ahead = Ahead(deployment, pair, deployment.drafter_config.max_model_len)
    longest = max([_CHAIN, *options.lookaheads])
    known = [chains.behind_each(text.prompt, text.ids, longest) for text in texts]
    table = Table(texts)
    for lookahead in options.lookaheads:
        before = chains.forwards()
        serial = table.write(partial(by_turns, chains, lookahead, target))
        count, seconds = (b - a for a, b in zip(before, chains.forwards(), strict=True))
        forward = seconds / count
        paper = sum(serial_time(of, lookahead, target, forward) for of in known)
        table.add(lookahead, SERIAL, serial, paper)
        for servers in options.servers:
            many = table.write(partial(by_many, chains, lookahead, servers, target))
            paper = sum(dsi_time(of, lookahead, servers, target, forward) for of in known)
            table.add(lookahead, f"DSI, {servers} target{'s' * (servers > 1)}", many, paper)
        tokens = sum(len(text.ids) for text in texts)
        draft = statistics.mean(of.ready(lookahead) for text in known for of in text) * forward
        for waits in (False, True):
            found = table.write(partial(ahead.write, lookahead, target, waits=waits))
            behind, anew = found[0].shares
            each = tokens / serial[0].steps, draft, target, forward
            paper = tokens / ahead_speed(*each, behind, anew, float(waits))
            name = f"drafts ahead, 1 target{', waiting' * waits}"
            table.add(lookahead, name, found, paper)
    return table.lines


def main() -> int:
    parser = pair_parser(__doc__)
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 7], help="targets of DSI")
    options, prompts = parsed(parser, None)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        with ProcessPoolExecutor(1, spawn) as pool:
            written = pool.submit(continuations, options, prompts).result()
        lines = measure(written, options)
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
