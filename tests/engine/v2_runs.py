# SPDX-License-Identifier: Apache-2.0
"""Run scenarios on Model Runner V2, as a child process of `test_runner_v2.py`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from harness import engine, slem
from scenarios import ROOMY, TIGHT, Run, Scenario, generate, greedy, run_all

from vllm_hetero_spec.engine.seam import async_scheduling

STAGED = "identity, ahead, in stages"
WAYS = {  # by release of vLLM
    "installed": ("alone", "pair", "pair, ahead", "identity, ahead", "parallel, ahead"),
    "0.33": ("alone", "pair, ahead", STAGED),
}
# All run in an engine of tight limits: prompts come in chunks, and eight requests need preemption.
LEFT_OUT = ("batch 1", "batch 32", "common prefix")  # similar to the others, and too long
SOME = {name: run for name, run in (ROOMY | TIGHT).items() if name not in LEFT_OUT}


def run_way(way: str, demo: Path, prompts: list[str], some: Mapping[str, Scenario] = SOME) -> Run:
    """Return token ids and counter increments by scenario."""
    name, _, ahead = way.partition(", ")
    async_scheduling.platform_can = lambda: bool(ahead)
    drafter = {"pair": "drafter", "identity": "target", "parallel": "parallel"}.get(name)
    spec = None if drafter is None else slem(demo / drafter)
    stages = {"pipeline_parallel_size": 2} if way == STAGED else {}
    return run_all(demo / "target", spec, prompts, {}, some, **stages)


def calibrated(demo: Path, prompts: list[str]) -> Run:
    """Run an engine with asynchronous scheduling that times both models at start-up."""
    spec = slem(demo / "drafter", controller="goodput")
    with engine(demo / "target", spec, max_num_seqs=4) as llm:
        return {"batch 8": (generate(llm, prompts, greedy()), {})}


if __name__ == "__main__":
    release, folder, prompts, out = sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    texts = json.loads(prompts)
    found = {way: run_way(way, folder, texts) for way in WAYS[release]}
    out.write_text(json.dumps(found | {"calibrated": calibrated(folder, texts)}))
