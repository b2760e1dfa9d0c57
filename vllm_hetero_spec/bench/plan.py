# SPDX-License-Identifier: Apache-2.0
"""Order in which engines run loads.

A target's engines start once and stay up. If they do not all fit, they come in waves, each with
`alone`. Within a wave every engine runs the same load in turn, and each round begins with another
engine, so that a drift of the machine affects all.
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

    number: int  # of the wave within its target
    groups: tuple[tuple[Cell, ...], ...]  # cells of the same load, in the first round's order

    def rounds(self, repeats: int) -> Iterator[list[Measurement]]:
        """Group by group and round by round; each round begins with another engine."""
        for group in self.groups:
            for turn in range(repeats):
                first = turn % len(group)
                cells = group[first:] + group[:first]
                yield [Measurement(cell, self.number, turn) for cell in cells]


@dataclass(frozen=True)
class Plan:
    """All runs of a suite."""

    waves: tuple[Wave, ...]
    skipped: dict[Cell, str]  # cells that cannot be measured, with the reason
    repeats: int

    def pending(self, done: Collection[Measurement]) -> list[list[Measurement]]:
        """Remaining runs of each wave, in order.

        The rest of a round is measured with its references again, because a ratio needs runs of
        the same time.
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
    """The same load without speculation."""
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
    """Lay out a suite.

    Args:
        suite: What is to be measured.
        engines_at_once: Engines that may be up together.
        differ: Returns why the vocabularies of a pair do not agree, or None.
        only: Part of the names of the wanted cells, with wildcards; their references are added.

    Raises:
        ConfigError: `only` fits no cell.
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
    """The references are first, so that they are in the first wave."""
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
    """Peers have no settings: they run each model once, under the first of its names."""
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
    """Engines that have cells; with `alone` in each wave if more than one may be up."""
    busy = [engine for engine in engines if any(cell.engine == engine for cell in wanted)]
    if at_once == 1:
        yield from ([engine] for engine in busy)
        return
    alone = [engine for engine in busy if engine.method == ALONE]
    others = [engine for engine in busy if engine.method != ALONE]
    room = at_once - len(alone)
    for first in range(0, max(len(others), 1), room):
        yield alone + others[first : first + room]
