# SPDX-License-Identifier: Apache-2.0
"""Replay bench: compare controllers of the draft length on recorded runs, without an engine.

    PYTHONPATH=. python tests/replay/bench.py                    # all cells, some minutes
    PYTHONPATH=. python tests/replay/bench.py --only cpu/ --jobs 2
    PYTHONPATH=. python tests/replay/bench.py --controller goodput --controller MODULE:FUNCTION
    PYTHONPATH=. python tests/replay/bench.py --out old.json     # then, on other code:
    PYTHONPATH=. python tests/replay/bench.py --against old.json

FUNCTION builds a controller from a `competitors.Start`; `competitors.goodput` is an example.
A cell is named MACHINE/SUBJECT/TEMPERATURE/BATCH or MACHINE/MIX. Speeds are relative to the target
alone. Columns of a controller, in percent except the first one:

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
SUBJECTS = {"humaneval": "real", "mt_bench": "real", "demo": "demo"}
MIXES = "crowd", "turn", "both", "warm"
_SECONDS, _ROUNDS = 30.0, 1500  # duration of a run; a GPU has fewer seconds
_ORACLES = 2  # runs of the oracle, each at the price of the one before


class Cell(NamedTuple):
    """A machine and a load; `saved` estimates are learned before the run."""

    name: str
    machine: Machine
    phases: Sequence[Phase]
    warm: bool = False

    @property
    def seconds(self) -> float:
        """Duration of a run."""
        batch = max(phase.batch for phase in self.phases)
        if self.machine.stops_early:
            return _SECONDS
        return min(_SECONDS, _ROUNDS * self.machine.target(batch, batch))


class Score(NamedTuple):
    """Figures of a controller in a cell, as in the module's documentation."""

    speed: float
    share: float
    whole: float
    probes: float
    reads: float


@cache
def recording(name: str) -> Recording:
    """Return a recording of this folder."""
    return Recording.read(name)


@cache
def text(subject: str, temperature: int) -> Text:
    """Return a recorded text."""
    return recording(SUBJECTS[subject]).text(subject, temperature)


def cell(name: str) -> Cell:
    """Return the cell of a name."""
    machine, *rest = name.split("/")
    if len(rest) == 3:
        subject, temperature, batch = rest[0], int(rest[1]), int(rest[2])
        costs = named(machine, recording(SUBJECTS[subject]), temperature)
        return Cell(name, costs, [Phase(1.0, batch, [text(subject, temperature)])])
    code, chat = text("humaneval", 0), text("mt_bench", 0)
    phases = {
        # Requests come and go.
        "crowd": [Phase(1 / 6, batch, [code, chat], True) for batch in (1, 8, 2, 16, 4, 32)],
        "turn": [Phase(1 / 3, 4, [subject]) for subject in (code, chat, code)],
        "both": [Phase(1.0, 8, [code, text("mt_bench", 1)], True)],
        "warm": [Phase(1.0, 4, [code])],
    }[rest[0]]
    costs = named(machine, recording("real"), int(rest[0] == "both"))
    return Cell(name, costs, phases, warm=rest[0] == "warm")


def names() -> list[str]:
    """Return the names of all cells."""
    steady = [
        f"{machine}/{subject}/{temperature}/{batch}"
        for machine in MACHINES
        for subject in SUBJECTS
        for temperature in (0, 1)
        for batch in BATCHES
    ]
    return steady + [f"{machine}/{mix}" for machine in MACHINES for mix in MIXES]


def replay(
    where: Cell, build: Callable[[World], Controller], seed: int
) -> tuple[Outcome, Outcome, Controller]:
    """Run a controller in a cell. Return the outcomes of `World.run`, and the controller."""
    world = World(where.machine, where.phases, where.seconds, seed)
    controller = build(world)
    return *world.run(controller), controller


def _score(where: Cell, name: str, better: tuple[float, float], seed: int) -> Score:
    make, saved = factory(name), None
    if where.warm:
        *_, earlier = replay(where, lambda world: make(Start(where.machine, world.clock)), seed + 1)
        known: Any = earlier
        saved = json.loads(json.dumps(known.known.to_dict()))
    whole, late, _ = replay(
        where, lambda world: make(Start(where.machine, world.clock, saved)), seed
    )
    return Score(
        late.speed,
        late.speed / better[1],
        whole.speed / better[0],
        whole.probing / whole.seconds,
        whole.read / max(whole.off, 1),
    )


def run_cell(name: str, controllers: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Return the best fixed lookahead, the speed of the oracle and a `Score` by controller."""
    where = cell(name)
    fixed = [replay(where, lambda _, k=k: Fixed(k), seed)[:2] for k in range(1, LONGEST + 1)]
    best = max(range(LONGEST), key=lambda at: fixed[at][1].speed)
    whole, late = (max(1.0, max(pair[at].speed for pair in fixed)) for at in range(2))
    gains: dict[int, float] = {}
    oracle = late
    for _ in range(_ORACLES):
        _, found, _ = replay(where, lambda world, known=gains: Oracle(world, known, late), seed)
        gains = {at: alone / seconds for at, (alone, seconds) in found.of_batch.items()}
        oracle = max(oracle, found.speed)
    return {
        "best": best + 1,
        "fixed": fixed[best][1].speed,
        "oracle": oracle,
        **{each: _score(where, each, (whole, late), seed)._asdict() for each in controllers},
    }


def mean(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean over seeds of the results of a cell; `best` is that of the first one."""
    first = results[0]
    return {
        key: {at: sum(r[key][at] for r in results) / len(results) for at in value}
        if isinstance(value, dict)
        else value
        if key == "best"
        else sum(r[key] for r in results) / len(results)
        for key, value in first.items()
    }


def line(name: str, result: dict[str, Any], old: dict[str, Any]) -> str:
    """Return the line of a cell."""
    parts = [f"{name:24}  {result['fixed']:5.2f} ({result['best']})  {result['oracle']:5.2f} "]
    for score in (value for value in result.values() if isinstance(value, dict)):
        parts.append(
            f" {score['speed']:5.2f} {score['share']:6.1%} {score['whole']:6.1%}"
            f" {score['probes']:5.1%} {score['reads']:5.1%} "
        )
    for score in (value for value in old.get(name, {}).values() if isinstance(value, dict)):
        parts.append(f" {score['speed']:5.2f} {score['share']:6.1%} {score['whole']:6.1%}")
    return " ".join(parts)


def summary(results: dict[str, dict[str, Any]], controller: str) -> str:
    """Return the figures of a controller over all cells."""
    scores = [result[controller] for result in results.values()]
    lost = sum(score["share"] < 0.98 for score in scores)
    least = min(results, key=lambda name: results[name][controller]["share"])
    whole = min(results, key=lambda name: results[name][controller]["whole"])
    count = len(scores)
    return (
        f"{controller}: mean speed {sum(s['speed'] for s in scores) / count:.3f}, mean share "
        f"{sum(s['share'] for s in scores) / count:.2%}; {lost} of {count} cells below 98 %, least "
        f"{results[least][controller]['share']:.1%} ({least}); whole run at least "
        f"{results[whole][controller]['whole']:.1%} ({whole}); probes at most "
        f"{max(s['probes'] for s in scores):.2%}"
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
    parser.add_argument("--against", type=Path, help="such a file, to print beside")
    arguments = parser.parse_args()
    controllers = arguments.controller or ["goodput"]
    old = json.loads(arguments.against.read_text()) if arguments.against else {}
    parts = arguments.only or [""]
    chosen = [name for name in names() if any(part in name for part in parts)]
    heads = [f"{each:>33} " for each in controllers]
    print(f"{'cell':24}   best fixed oracle {' '.join(heads)}{'  old' if old else ''}")
    results = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        runs = [
            [pool.submit(run_cell, name, controllers, seed) for seed in range(arguments.seeds)]
            for name in chosen
        ]
        for name, pending in zip(chosen, runs, strict=True):
            results[name] = mean([each.result() for each in pending])
            print(line(name, results[name], old), flush=True)
    for controller in controllers:
        print(summary(results, controller))
    shared = {name: old[name] for name in results if name in old}
    for controller in {key for result in shared.values() for key in result} - {*results}:
        if all(isinstance(result.get(controller), dict) for result in shared.values()):
            print(f"old {summary(shared, controller)}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
