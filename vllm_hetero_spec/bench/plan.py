# SPDX-License-Identifier: Apache-2.0
"""Order in which engines run loads.

The engines of a target start once and stay up. If memory does not hold all of them, they run in
waves. Each wave includes `alone`. Within a wave all engines run the same load one after the other.
Each round begins with another engine, so that a drift of the machine affects all engines.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from vllm_hetero_spec.bench.suite import ALONE, KINDS, Suite, SuiteDrafter, Target
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import METHODS


class EngineId(NamedTuple):
    """An engine of a target: a method, with a drafter and a draft length if it drafts."""

    target: str
    method: str
    drafter: str | None = None
    lookahead: int | None = None

    def __str__(self) -> str:
        parts = [self.target, self.method]
        if self.drafter is not None:
            parts += [self.drafter, f"k{self.lookahead}"]
        return "/".join(parts)


class Cell(NamedTuple):
    """An engine under a load: one row of the report."""

    engine: EngineId
    dataset: str
    batch_size: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.engine}/{self.dataset}/b{self.batch_size}/t{self.temperature:g}"


class Measurement(NamedTuple):
    """One run of a cell."""

    cell: Cell
    wave: int
    round: int


@dataclass(frozen=True)
class Wave:
    """Engines that are up together."""

    number: int  # index within the target
    groups: tuple[tuple[Cell, ...], ...]  # cells of the same load, in the order of the first round

    def rounds(self, repeats: int) -> Iterator[list[Measurement]]:
        """Yield the runs of each round; each round begins with another engine."""
        for group in self.groups:
            for turn in range(repeats):
                first = turn % len(group)
                cells = group[first:] + group[:first]
                yield [Measurement(cell, self.number, turn) for cell in cells]


@dataclass(frozen=True)
class Plan:
    """All runs of a suite."""

    waves: tuple[Wave, ...]
    skipped: dict[Cell, str]  # reasons of cells that cannot be measured
    repeats: int

    def pending(self, done: Collection[Measurement]) -> list[list[Measurement]]:
        """Remaining runs of each wave, in order.

        An incomplete round runs its references again, because a ratio needs runs of the same time.
        """
        return [
            [
                run
                for whole in wave.rounds(self.repeats)
                for run in _left(whole, [run for run in whole if run not in done])
            ]
            for wave in self.waves
        ]


def reference_cells(cell: Cell) -> list[Cell]:
    """Cells of the same load with speculation disabled."""
    methods = dict.fromkeys((ALONE, KINDS[cell.engine.method].reference))
    return [cell._replace(engine=EngineId(cell.engine.target, method)) for method in methods]


def _left(whole: list[Measurement], missing: list[Measurement]) -> list[Measurement]:
    wanted = {cell for run in missing for cell in (run.cell, *reference_cells(run.cell))}
    return [run for run in whole if run.cell in wanted]


def make_plan(
    suite: Suite,
    engines_at_once: int,
    differ: Callable[[Target, SuiteDrafter], str | None],
    only: str | None = None,
) -> Plan:
    """Plan the runs of a suite.

    Args:
        suite: The suite.
        engines_at_once: Maximum number of engines that are up together.
        differ: Returns the reason if the vocabularies of a pair differ, otherwise None.
        only: Pattern for a part of a cell's name. References of matching cells are added.

    Raises:
        ConfigError: `only` matches no cell.
    """
    skipped: dict[Cell, str] = {}
    waves: list[Wave] = []
    fits: set[Cell] = set()
    every: list[Cell] = []
    for target in suite.targets:
        cells = {engine: _cells(suite, target, engine) for engine in _engines(suite, target)}
        every += [cell for row in cells.values() for cell in row]
        for engine, row in cells.items():
            skipped |= {
                cell: why for cell in row if (why := _unsupported(cell, target, engine, differ))
            }
        wanted = {cell for row in cells.values() for cell in row if cell not in skipped}
        if only is not None:
            wanted = {cell for cell in wanted if fnmatchcase(str(cell), f"*{only}*")}
            fits |= wanted
        wanted |= {
            reference
            for cell in wanted
            for reference in reference_cells(cell)
            if reference not in skipped
        }
        loads = dict.fromkeys(cell[1:] for row in cells.values() for cell in row)
        for number, engines in enumerate(_waves(list(cells), wanted, engines_at_once)):
            groups = (
                tuple(
                    cell
                    for engine in engines
                    for cell in cells[engine]
                    if cell[1:] == load and cell in wanted
                )
                for load in loads
            )
            waves.append(Wave(number, tuple(group for group in groups if group)))
    if only is not None and not fits:
        raise ConfigError(f"--only {only!r} fits none of the {len(every)} cells, as {every[-1]}.")
    return Plan(tuple(waves), skipped, suite.repeats)


def _engines(suite: Suite, target: Target) -> list[EngineId]:
    """Engines of a target, references first so that they are in the first wave."""
    asked = [ALONE, *suite.methods, *suite.peers]
    methods = dict.fromkeys([*asked, *(KINDS[method].reference for method in asked)])
    alone = [method for method in methods if not KINDS[method].drafts]
    drafting = [method for method in methods if KINDS[method].drafts]
    return [EngineId(target.name, method) for method in alone] + [
        EngineId(target.name, method, drafter.name, lookahead)
        for method in drafting
        for drafter in _drafters(target, method)
        for lookahead in suite.num_speculative_tokens
    ]


def _drafters(target: Target, method: str) -> Iterable[SuiteDrafter]:
    """Drafters of a method. Peers have no settings, so they run each model once."""
    if method in METHODS:
        return target.drafters
    first: dict[str, SuiteDrafter] = {}
    for drafter in target.drafters:
        first.setdefault(drafter.model, drafter)
    return first.values()


def _cells(suite: Suite, target: Target, engine: EngineId) -> list[Cell]:
    return [
        Cell(engine, dataset, batch_size, temperature)
        for dataset in target.datasets
        for batch_size in suite.batch_sizes
        for temperature in suite.temperatures
    ]


def _unsupported(
    cell: Cell,
    target: Target,
    engine: EngineId,
    differ: Callable[[Target, SuiteDrafter], str | None],
) -> str | None:
    kind = KINDS[engine.method]
    if kind.huggingface and cell.batch_size > 1:
        return "Hugging Face's assisted generation takes one request at a time"
    ranks = target.engine.get("tensor_parallel_size", 1)
    if kind.huggingface and ranks != 1:
        return (
            f"Hugging Face loads a target on one device, and tensor_parallel_size is {ranks}; "
            "leave it out where one device holds the target"
        )
    if kind.same_vocabulary:
        drafter = next(d for d in target.drafters if d.name == engine.drafter)
        return differ(target, drafter)
    return None


def _waves(engines: list[EngineId], wanted: set[Cell], at_once: int) -> Iterator[list[EngineId]]:
    """Engines that have cells; each wave includes `alone` if at least two engines may be up."""
    busy = [engine for engine in engines if any(cell.engine == engine for cell in wanted)]
    if at_once == 1:
        yield from ([engine] for engine in busy)
        return
    alone = [engine for engine in busy if engine.method == ALONE]
    others = [engine for engine in busy if engine.method != ALONE]
    room = at_once - len(alone)
    for first in range(0, max(len(others), 1), room):
        yield alone + others[first : first + room]
