# SPDX-License-Identifier: Apache-2.0
"""Measure the host's time per drafting round: thread CPU time by section and batch size.

    python scripts/measure_host.py                                  # the demo pair
    python scripts/measure_host.py --target DIR --drafter DIR --prompts FILE.jsonl --lookahead 5

It runs on a CPU. On a GPU the section "model" runs in parallel with the host. Thread CPU time
excludes other processes.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # sections are wrapped in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _host_sections import SECTIONS, OwnTime, wrap_sections
from rich.console import Console
from rich.table import Table

from vllm_hetero_spec.bench.load import Load
from vllm_hetero_spec.bench.vllm_engine import Driver, EngineSpec, start
from vllm_hetero_spec.paths import demo_folder

_TEXTS = 3  # prompts per request of a batch


def measure(
    target: str, drafter: str, texts: Sequence[str], batches: Sequence[int], lookahead: int
) -> dict[int, dict[str, float]]:
    """Return microseconds per round by section and the number of rounds, for each batch size."""
    spent = OwnTime(time.thread_time)
    wrap_sections(spent)
    keys = {"method": "hetero", "model": drafter, "controller": "fixed"}
    spec = {**keys, "num_speculative_tokens": lookahead}
    driver = Driver(start(EngineSpec(target, spec, max_batch_size=max(batches))))
    found = {}
    for batch in batches:
        load = Load(list(islice(cycle(texts), _TEXTS * batch)), max_tokens=64, batch_size=batch)
        driver.warm_up(load)
        spent.seconds.clear()
        rounds = driver.run(load).worker["steps"]
        own = {section: 1e6 * spent.seconds[section] / rounds for section in SECTIONS}
        found[batch] = {"rounds": rounds, **own}
    return found


def main() -> None:
    demo = demo_folder()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(demo / "target"))
    parser.add_argument("--drafter", default=str(demo / "drafter"))
    parser.add_argument("--prompts", type=Path, default=demo / "prompts.jsonl")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lookahead", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    texts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()]
    found = measure(given.target, given.drafter, texts, given.batches, given.lookahead)
    table = Table(title="host time of a round, us")
    table.add_column("section")
    for batch in found:
        table.add_column(f"batch {batch}", justify="right")
    for section in SECTIONS:
        table.add_row(section, *(f"{of[section]:.0f}" for of in found.values()))
    ours = [sum(of[name] for name in SECTIONS if name != "model") for of in found.values()]
    table.add_row("all but model", *(f"{us:.0f}" for us in ours))
    table.add_row("rounds", *(f"{of['rounds']:.0f}" for of in found.values()))
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
