# SPDX-License-Identifier: Apache-2.0
"""Order in which engines run loads.

The engines of a target start once and stay up. If memory does not hold all of them, they run in
waves. Each wave includes `alone`. Within a wave all engines run the same load one after the other.
Each round begins with another engine, so that a drift of the machine affects all engines.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby, product
from typing import Any, NamedTuple

from vllm_hetero_spec.bench.suite import ALONE, KINDS, Suite, SuiteDrafter, Target
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import METHODS

Differ = Callable[[Target, SuiteDrafter], str | None]


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

    def flat(self) -> dict[str, Any]:
        """The fields of the engine and of the load."""
        return {**self.engine._asdict(), **dict(zip(Cell._fields[1:], self[1:], strict=True))}

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
        rounds = (wave.rounds(self.repeats) for wave in self.waves)
        return [[run for whole in wave for run in _left(whole, done)] for wave in rounds]


def reference_cells(cell: Cell) -> list[Cell]:
    """Cells of the same load with speculation disabled."""
    methods = dict.fromkeys((ALONE, KINDS[cell.engine.method].reference))
    return [cell._replace(engine=EngineId(cell.engine.target, method)) for method in methods]


def _left(whole: list[Measurement], done: Collection[Measurement]) -> list[Measurement]:
    missing = [run.cell for run in whole if run not in done]
    wanted = {each for cell in missing for each in (cell, *reference_cells(cell))}
    return [run for run in whole if run.cell in wanted]


def make_plan(suite: Suite, engines_at_once: int, differ: Differ, only: str | None = None) -> Plan:
    """Plan the runs of a suite, or of cells whose names contain the pattern `only`.

    `differ` returns the reason if the vocabularies of a pair differ, otherwise None. References of
    matching cells are added; ConfigError if there are none.
    """
    skipped: dict[Cell, str] = {}
    waves: list[Wave] = []
    every: list[Cell] = []
    for target in suite.targets:
        cells = list(_cells(suite, target))
        every += cells
        skipped |= {cell: why for cell in cells if (why := _unsupported(cell, target, differ))}
        wanted = {
            cell
            for cell in cells
            if cell not in skipped and (only is None or fnmatchcase(str(cell), f"*{only}*"))
        }
        wanted |= {of for cell in wanted for of in reference_cells(cell) if of not in skipped}
        cells = [cell for cell in cells if cell in wanted]
        engines = list(dict.fromkeys(cell.engine for cell in cells))
        for number, up in enumerate(_waves(engines, engines_at_once)):
            own = [cell for cell in cells if cell.engine in up]
            groups = (tuple(group) for _, group in groupby(own, lambda cell: cell[1:]))
            waves.append(Wave(number, tuple(groups)))
    if only is not None and not any(wave.groups for wave in waves):
        raise ConfigError(f"--only {only!r} fits none of the {len(every)} cells, as {every[-1]}.")
    return Plan(tuple(waves), skipped, suite.repeats)


def _cells(suite: Suite, target: Target) -> Iterator[Cell]:
    """All cells of a target: for each load all engines, references first."""
    engines = list(_engines(suite, target))
    for load in product(target.datasets, suite.batch_sizes, suite.temperatures):
        for engine in engines:
            yield Cell(engine, *load)


def _engines(suite: Suite, target: Target) -> Iterator[EngineId]:
    asked = [ALONE, *suite.methods, *suite.peers]
    methods = dict.fromkeys([*asked, *(KINDS[method].reference for method in asked)])
    drafting = [method for method in methods if KINDS[method].drafts]
    yield from (EngineId(target.name, method) for method in methods if method not in drafting)
    for method in drafting:
        for drafter in _drafters(target, method):
            for lookahead in suite.num_speculative_tokens:
                yield EngineId(target.name, method, drafter.name, lookahead)


def _drafters(target: Target, method: str) -> Iterable[SuiteDrafter]:
    """Drafters of a method. Peers have no settings, so they run each model once."""
    if method in METHODS:
        return target.drafters
    first: dict[str, SuiteDrafter] = {}
    for drafter in target.drafters:
        first.setdefault(drafter.model, drafter)
    return first.values()


def _unsupported(cell: Cell, target: Target, differ: Differ) -> str | None:
    kind = KINDS[cell.engine.method]
    if kind.huggingface and cell.batch_size > 1:
        return "Hugging Face's assisted generation takes one request at a time"
    ranks = target.engine.get("tensor_parallel_size", 1)
    if kind.huggingface and ranks != 1:
        return (
            f"Hugging Face loads a target on one device, and tensor_parallel_size is {ranks}; "
            "leave it out where one device holds the target"
        )
    if kind.same_vocabulary:
        return differ(target, next(d for d in target.drafters if d.name == cell.engine.drafter))
    return None


def _waves(engines: list[EngineId], at_once: int) -> Iterator[list[EngineId]]:
    """Engines by wave; each wave includes `alone` if at least two engines may be up."""
    alone = [engine for engine in engines if engine.method == ALONE] if at_once > 1 else []
    others = [engine for engine in engines if engine not in alone]
    room = at_once - len(alone)
    for first in range(0, max(len(others), 1), room):
        yield alone + others[first : first + room]
