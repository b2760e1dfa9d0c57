# SPDX-License-Identifier: Apache-2.0
"""Replay bench: compare controllers of the draft length on recorded runs, without an engine.

    PYTHONPATH=. python tests/replay/bench.py                    # all cells, a minute
    PYTHONPATH=. python tests/replay/bench.py --only cpu/ --jobs 2
    PYTHONPATH=. python tests/replay/bench.py --controller goodput --controller MODULE:FUNCTION
    PYTHONPATH=. python tests/replay/bench.py --out old.json     # then, on other code:
    PYTHONPATH=. python tests/replay/bench.py --against old.json

FUNCTION builds a controller from a `competitors.Start`; `competitors.goodput` is an example.
A cell is named MACHINE/SUBJECT/TEMPERATURE/BATCH or MACHINE/MIX. Mixes: in `crowd` requests come
and go, in `turn` the subject changes twice, `both` has greedy and sampled requests, in `chats` only
the target has the long prompts in its cache, and in `warm` a controller starts from saved
estimates.

Speeds are relative to the target alone. Columns of a controller:

* `speed`: after the first 2 seconds.
* `share`: of the better of the best fixed lookahead and the target alone, after these seconds.
* `whole`: the same share over the whole run, which begins with a cold start.
* `probes`: time that probes lost.
* `reads`: steps without drafts that were read, of all steps while speculation was disabled.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from competitors import Oracle, Start, factory
from machines import Machine, named
from recordings import LONGEST, Recording, Text
from world import Outcome, Phase, World

from vllm_hetero_spec.lookahead.controllers import Controller, Fixed

MACHINES = "cpu", "h200", "h100", "h200-async"
BATCHES = 1, 2, 4, 8, 16, 32
SUBJECTS = {"humaneval": "real", "mt_bench": "real", "demo": "demo"}  # and their recordings
MIXES = "crowd", "turn", "both", "chats", "warm"
_SECONDS, _ROUNDS = 30.0, 1500  # duration of a run; a GPU has fewer seconds
_ORACLES = 2  # runs of the oracle, each at the prices of the one before
_FIGURES = "speed", "share", "whole", "probes", "reads"
Results = dict[str, dict[str, float]]  # by cell; a controller's figures as "NAME speed"

recording = cache(Recording.read)


@cache
def text(subject: str, temperature: int) -> Text:
    """Return a recorded text."""
    return recording(SUBJECTS[subject]).text(subject, temperature)


class Cell(NamedTuple):
    """A machine and a load; `warm` if a controller starts from the estimates of another run."""

    machine: Machine
    phases: Sequence[Phase]
    warm: bool = False

    @classmethod
    def named(cls, name: str) -> "Cell":
        machine, load, *rest = name.split("/")
        if rest:
            temperature, batch = map(int, rest)
            costs = named(machine, recording(SUBJECTS[load]), temperature)
            return cls(costs, [Phase(1.0, batch, [text(load, temperature)])])
        code, chat = text("humaneval", 0), text("mt_bench", 0)
        phases = {
            "crowd": [Phase(1 / 6, batch, [code, chat], True) for batch in (1, 8, 2, 16, 4, 32)],
            "turn": [Phase(1 / 3, 4, [subject]) for subject in (code, chat, code)],
            "both": [Phase(1.0, 8, [code, text("mt_bench", 1)], True)],
            "chats": [Phase(1 / 2, batch, [code, chat], True, 4000) for batch in (4, 16)],
            "warm": [Phase(1.0, 4, [code])],
        }[load]
        costs = named(machine, recording("real"), int(load == "both"))
        return cls(costs, phases, warm=load == "warm")

    def run(self, build: Callable[[World], Controller], seed: int) -> tuple[Outcome, Outcome, Any]:
        """Return the outcomes of `World.run`, and the controller."""
        batch, seconds = max(phase.batch for phase in self.phases), _SECONDS
        if not self.machine.stops_early:
            seconds = min(seconds, _ROUNDS * self.machine.target(batch, batch))
        world = World(self.machine, self.phases, seconds, seed)
        controller = build(world)
        return *world.run(controller), controller


def names() -> list[str]:
    """Return the names of all cells."""
    loads = [f"{of}/{at}/{batch}" for of in SUBJECTS for at in (0, 1) for batch in BATCHES]
    return [f"{machine}/{load}" for machine in MACHINES for load in [*loads, *MIXES]]


def run_cell(name: str, controllers: Sequence[str], seed: int = 0) -> dict[str, float]:
    """Return the figures of a cell."""
    cell = Cell.named(name)
    fixed = [cell.run(lambda _, k=k: Fixed(k), seed)[:2] for k in range(1, LONGEST + 1)]
    speed, best = max((late.speed, k) for k, (_, late) in enumerate(fixed, 1))
    better = max(1.0, speed)
    better_whole = max(1.0, *(whole.speed for whole, _ in fixed))
    gains: dict[int, float] = {}
    results = {"best": best, "fixed": speed, "oracle": better}
    for _ in range(_ORACLES):
        late = cell.run(lambda world, known=gains: Oracle(world, known, better), seed)[1]
        gains = {at: alone / seconds for at, (alone, seconds) in late.of_batch.items()}
        results["oracle"] = max(results["oracle"], late.speed)
    for each in controllers:
        whole, late = _run(cell, factory(each), seed)
        shares = late.speed / better, whole.speed / better_whole
        rest = whole.probing / whole.seconds, whole.read / max(whole.off, 1)
        values = zip(_FIGURES, (late.speed, *shares, *rest), strict=True)
        results |= {f"{each} {figure}": value for figure, value in values}
    return results


def _run(cell: Cell, make: Callable[[Start], Any], seed: int) -> tuple[Outcome, Outcome]:
    """Run a controller, in a warm cell for the second time."""
    saved = None
    if cell.warm:
        before = cell.run(lambda world: make(Start(cell.machine, world.clock)), seed + 1)[2]
        saved = json.loads(json.dumps(before.known.to_dict()))
    return cell.run(lambda world: make(Start(cell.machine, world.clock, saved)), seed)[:2]


def line(name: str, result: dict[str, float], controllers: Sequence[str]) -> str:
    """Return the line of a cell."""
    parts = [f"{name:25} {result['fixed']:5.2f} ({result['best']:.0f}) {result['oracle']:5.2f}"]
    for each in controllers:
        speed, *rest = (result[f"{each} {figure}"] for figure in _FIGURES)
        parts.append(f"{speed:8.2f} " + " ".join(f"{value:6.1%}" for value in rest))
    return " ".join(parts)


def summary(results: Results, controller: str) -> str:
    """Return the figures of a controller over all cells."""
    speeds, shares, wholes, probes, _ = (
        {name: result[f"{controller} {figure}"] for name, result in results.items()}
        for figure in _FIGURES
    )
    count, least, whole = len(results), min(shares, key=shares.get), min(wholes, key=wholes.get)
    low = sum(share < 0.98 for share in shares.values())
    return (
        f"{controller}: mean speed {sum(speeds.values()) / count:.3f}, mean share "
        f"{sum(shares.values()) / count:.2%}; below 98 % in {low} of {count} cells, "
        f"least {shares[least]:.1%} ({least}); whole run at least "
        f"{wholes[whole]:.1%} ({whole}); probes at most {max(probes.values()):.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controller", action="append", help="`goodput`, or MODULE:FUNCTION")
    parser.add_argument("--only", action="append", help="part of a cell's name; may be repeated")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell, averaged")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--against", type=Path, help="such a file; prints its `goodput` as `old`")
    given = parser.parse_args()
    controllers = given.controller or ["goodput"]
    old = json.loads(given.against.read_text()) if given.against else {}
    shown = [*controllers, *["old"] * bool(old)]
    print(f"{'':25} best fixed oracle" + "".join(f"{each:>37}" for each in shown))
    print(f"{'':43}" + f"{'speed':>9}  share  whole probes  reads" * len(shown))
    results: Results = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        cells = [name for name in names() if any(part in name for part in given.only or [""])]
        pending = [
            [pool.submit(run_cell, name, controllers, seed) for seed in range(given.seeds)]
            for name in cells
        ]
        for name, runs in zip(cells, pending, strict=True):
            found = [run.result() for run in runs]
            result = {key: sum(each[key] for each in found) / len(found) for key in found[0]}
            result |= {
                key.replace("goodput", "old"): value
                for key, value in old.get(name, {}).items()
                if key.startswith("goodput ")
            }
            results[name] = result
            print(line(name, result, shown if name in old else controllers), flush=True)
    for each in controllers:
        print(summary(results, each))
    if shared := {name: result for name, result in results.items() if name in old}:
        print(summary(shared, "old"))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
