# SPDX-License-Identifier: Apache-2.0
"""The rows of a report: each cell with its figures, beside its references."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hetero_spec.bench.figures import Figures, figures_of, identical
from vllm_hetero_spec.bench.methods import ALONE, HF_ALONE, KINDS
from vllm_hetero_spec.bench.plan import Cell
from vllm_hetero_spec.bench.results import Contents, Recorded
from vllm_hetero_spec.measure.load import Sample
from vllm_hetero_spec.report.figures import Spread, speedup

Pairs = list[tuple[Sample, Sample]]


@dataclass(frozen=True)
class Row:
    """A cell of the report.

    Attributes:
        cell: Which one.
        figures: Its own.
        speedup: Over the target alone in vLLM; None without a run of it to compare with.
        speedup_over_hf: The same over the target alone in Hugging Face, for its methods.
        speedup_over_first: The same over the first setting of the drafter, for its others.
        identical: Prompts with the tokens of the reference in every round, and all prompts; None
            where nothing is to be equal: sampled cells, and the references themselves.
    """

    cell: Cell
    figures: Figures
    speedup: Spread | None
    speedup_over_hf: Spread | None
    speedup_over_first: Spread | None
    identical: tuple[int, int] | None


def rows_of(contents: Contents) -> list[Row]:
    """One row per measured cell; loads in the order measured, the references of each first."""
    by_cell: dict[Cell, list[Recorded]] = {}
    for recorded in contents.samples:
        by_cell.setdefault(recorded.run.cell, []).append(recorded)
    loads = list(dict.fromkeys((cell.engine.target, *cell[1:]) for cell in by_cell))

    def place(cell: Cell) -> tuple[int, bool, bool]:
        kind = KINDS[cell.engine.method]
        load = loads.index((cell.engine.target, *cell[1:]))
        return load, kind.huggingface, kind.drafts

    return [_row(cell, by_cell) for cell in sorted(by_cell, key=place)]


def pairs_with(runs: Sequence[Recorded], references: Sequence[Recorded]) -> Pairs:
    """Each run with the reference's run of the same session, wave and round.

    Where engines were up one at a time there is none: then the reference's run of that round in
    another wave.
    """
    pairs = []
    for recorded in runs:
        same_round = [of for of in references if of.run.round == recorded.run.round]
        near = [
            of
            for of in same_round
            if (of.session, of.run.wave) == (recorded.session, recorded.run.wave)
        ]
        if same_round:
            pairs.append((recorded.sample, (near or same_round)[-1].sample))
    return pairs


def _row(cell: Cell, by_cell: dict[Cell, list[Recorded]]) -> Row:
    runs = by_cell[cell]
    kind = KINDS[cell.engine.method]

    def pairs(method: str) -> Pairs:
        engine = cell.engine._replace(method=method, drafter=None, lookahead=None)
        return pairs_with(runs, by_cell.get(cell._replace(engine=engine), []))

    first = next(other for other in by_cell if _but_for_setting(other) == _but_for_setting(cell))

    return Row(
        cell=cell,
        # A reference that was measured again after an interruption counts once for its round.
        figures=figures_of(list({recorded.run: recorded.sample for recorded in runs}.values())),
        speedup=speedup(pairs(ALONE)) if cell.engine.method != ALONE else None,
        speedup_over_hf=speedup(pairs(HF_ALONE)) if kind.drafts and kind.huggingface else None,
        speedup_over_first=speedup(pairs_with(runs, by_cell[first])) if first != cell else None,
        identical=(
            identical(pairs(kind.reference)) if kind.drafts and cell.temperature == 0 else None
        ),
    )


def _but_for_setting(cell: Cell) -> Cell:
    """The cell of a drafter's setting, DRAFTER:SETTING, as that of the drafter."""
    drafter = (cell.engine.drafter or "").partition(":")[0]
    return cell._replace(engine=cell.engine._replace(drafter=drafter))
