# SPDX-License-Identifier: Apache-2.0
"""Parts 0, A, B and D of `measure_gpu.py`: does it run, is it right, and what does a step take."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _gpu_graphs
import torch
from _gpu_engine import (
    Continuation,
    Facts,
    Lesson,
    Outcome,
    Profile,
    Record,
    Setup,
    StepTimes,
    Task,
)
from _gpu_setups import FIXED, LOOKAHEAD, Options, Setups, modes, running, shells, tried

from vllm_hetero_spec.cli.health import examine
from vllm_hetero_spec.machine import provenance

# Conditional acceptance of a token that gives an acceptance length of 3 at a lookahead of 5.
RATE = 0.71
# Share of drafts; a captured batch is padded, may take other kernels, and they round otherwise.
_MAY_DIFFER = 0.01
_SELF = "target as drafter"

Result = dict[str, Any]
Report = Callable[[Result], None]


def part_0(options: Options, report: Report) -> bool:
    """Versions, the machine, the bandwidth of a copy, and whether a pair runs at all."""
    result: Result = provenance()
    result["checks"] = [asdict(finding) for finding in examine(run=False)]
    result["copy_gb_per_s"] = _bandwidth(options.on_gpu)
    report(result)
    setup = Setups(options, exact=True, batch=1).ours({"enforce_eager": True, **FIXED})
    pair: Result = {}
    result["pair"] = pair
    outcome = _serve(options, setup, Task(options.texts(1), 16, ignore_eos=True), pair)
    report(result)
    return outcome.drafts > 0 and not outcome.failures


def part_a(options: Options, report: Report) -> bool:
    """Is the output the target's own, token by token, and are the drafts the same ones?"""
    texts = options.texts(16 if options.on_gpu else 4)
    task = Task(texts, 64 if options.on_gpu else 24, 8, ignore_eos=True, watched=True)
    setups = Setups(options, exact=True, batch=8)
    *_, fastest = modes(options).values()
    own = {**FIXED, **fastest}
    wanted: dict[str, Setup] = {
        "alone": setups.alone(),
        **{mode: setups.ours({**FIXED, **given}) for mode, given in modes(options).items()},
        _SELF: setups.ours({"debug": {"translation": "identity"}, **own}, options.target),
        f"{_SELF}, through text": setups.ours(
            {"debug": {"translation": "text"}, **own}, options.target
        ),
    }
    if options.on_gpu:
        wanted["on V1"] = setups.ours(own, runner="0")
        wanted["not ahead"] = setups.ours(own, async_scheduling=False)
    rows: dict[str, Result] = {name: {} for name in wanted}
    result: Result = {"prompts": len(texts), "setups": rows, **_without_graphs(options)}
    outcomes: dict[str, Outcome] = {}

    def serve(name: str) -> tuple[str, Result]:
        row: Result = {}

        def outcome() -> Result:
            return {"outcome": _serve(options, wanted[name], task, row)}

        return name, row | tried(outcome)

    with ThreadPoolExecutor(options.at_once) as pool:
        for done in as_completed([pool.submit(serve, name) for name in wanted]):
            name, row = done.result()
            rows[name] = row
            if "outcome" in row:
                outcomes[name] = row.pop("outcome")
            if "alone" in outcomes:
                alone = [trace.token_ids for trace in outcomes["alone"].traces]
                for name, outcome in outcomes.items():
                    rows[name] |= {"same": outcome.same_as(alone), "waits": outcome.waits}
            report(result)
    good = outcomes.keys() == wanted.keys()
    for name, outcome in outcomes.items():
        good &= rows[name].get("same") == len(texts) and not outcome.failures
        if name in modes(options):
            good &= _is(name, rows[name]["engine"])
    if _SELF in outcomes:
        good &= 0 < outcomes[_SELF].accepted_tokens == outcomes[_SELF].draft_tokens
    if {"eager", "graphs"} <= outcomes.keys():
        drafts, differing = _compared(outcomes["eager"], outcomes["graphs"])
        result["drafts_that_differ"] = {"of": drafts, "differ": differing}
        good &= differing <= _MAY_DIFFER * drafts
        report(result)
    return good


def part_b(options: Options, report: Report) -> bool:
    """What a forward of a drafter of real size takes, and what comes on top of its replay."""
    good = True
    with shells(options) as (_, drafter):
        result: Result = {"shape": drafter.name, "modes": {}, **_without_graphs(options)}
        setups = Setups(options, exact=False, batch=64, drafter=drafter)
        for mode, given in modes(options).items():
            setup = setups.ours({**FIXED, **given})

            def measure(setup: Setup = setup) -> Result:
                with running(options, setup) as engine:
                    return {
                        "engine": engine.ask(Facts()),
                        **engine.ask(StepTimes(batches=(1, 8, 64), widths=(4, 8))),
                    }

            result["modes"][mode] = row = tried(measure)
            good &= "error" not in row and _is(mode, row["engine"])
            report(result)
    return good


def part_d(options: Options, report: Report) -> bool:
    """What device and host do in a round, beside those of the target alone: idle time, waits."""
    *_, (mode, given) = modes(options).items()
    with shells(options) as (target, drafter):
        setups = Setups(options, exact=False, batch=8, target=target, drafter=drafter)
        engines = {"alone": setups.alone(), mode: setups.ours({**FIXED, **given})}
        result: Result = {"imposed_rate": RATE, "engines": {name: {} for name in engines}}
        known: dict[int, list[Continuation]] = {}
        for name, setup in engines.items():
            with running(options, setup) as engine:
                for batch in (1, 8):
                    texts = options.texts(batch)
                    lesson = None
                    if name == "alone":
                        known[batch] = engine.ask(Record(texts, 40 + LOOKAHEAD))
                    else:
                        lesson = Lesson([text.token_ids for text in known[batch]], RATE)
                    task = Task(texts, 40, batch, ignore_eos=True, lesson=lesson)
                    kept = str(Path(options.traces, name)) if options.traces else ""
                    result["engines"][name][f"batch {batch}"] = engine.ask(Profile(task, kept))
                    report(result)
                result["engines"][name]["engine"] = engine.ask(Facts())
    return True


def _serve(options: Options, setup: Setup, task: Task, row: Result) -> Outcome:
    """A task in an engine of its own; what is to be told of it goes into the row."""
    began = time.perf_counter()
    with running(options, setup) as engine:
        row["start_seconds"] = round(time.perf_counter() - began, 1)
        outcome: Outcome = engine.ask(task)
        row["engine"] = engine.ask(Facts())
    row |= outcome.figures()
    return outcome


def _compared(one: Outcome, other: Outcome) -> tuple[int, int]:
    """Drafts of the first, and how many the second made otherwise or not at all."""
    drafts = differing = 0
    for mine, theirs in zip(one.made, other.made, strict=True):
        drafts += len(mine)
        differing += abs(len(mine) - len(theirs))
        differing += sum(a != b for a, b in zip(mine, theirs, strict=False))
    return drafts, differing


def _without_graphs(options: Options) -> Result:
    return {} if options.on_gpu else {"graphs": _gpu_graphs.NONE_HERE}


def _is(mode: str, facts: Result) -> bool:
    """Whether an engine has graphs if it was to have them, and none else."""
    return bool(facts["graphs"]["recorded"]) == (mode != "eager")


def _bandwidth(on_gpu: bool) -> float:
    """Bytes read and written per second by one large copy, in GB."""
    size = (1 << 30) if on_gpu else (1 << 26)
    source = torch.zeros(size, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    there = source.clone()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        there.copy_(source)
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return round(2 * size / best / 1e9, 1)
