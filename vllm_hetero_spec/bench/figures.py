# SPDX-License-Identifier: Apache-2.0
"""Figures of a report: measurements of each cell, compared with its references.

Latencies are pooled over the requests of all rounds; speeds are per round. A speedup is the ratio
of two runs of the same round, so that its range over rounds shows the drift of the machine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from vllm_hetero_spec.bench.load import Sample
from vllm_hetero_spec.bench.plan import Cell
from vllm_hetero_spec.bench.results import Contents, Recorded
from vllm_hetero_spec.bench.suite import ALONE, HF_ALONE, KINDS

Pairs = list[tuple[Sample, Sample]]  # of a run and a reference


@dataclass(frozen=True)
class Quantiles:
    """Median and tail of pooled latencies, in seconds."""

    median: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Spread:
    """One value per round: median, range and quartiles."""

    median: float
    low: float
    high: float
    quartile1: float
    quartile3: float
    rounds: int


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """Linearly interpolated quantiles; None without values."""
    if not values:
        return None
    return Quantiles(*map(float, np.percentile(values, [50, 90, 99])))


def spread(values: Sequence[float]) -> Spread:
    median, low, high, first, third = map(float, np.percentile(values, [50, 0, 100, 25, 75]))
    return Spread(median, low, high, first, third, rounds=len(values))


def speedup(pairs: Pairs) -> Spread | None:
    """Ratios of tokens per second in (run, reference) pairs of the same round."""
    if not pairs:
        return None
    return spread([run.tokens_per_second / of.tokens_per_second for run, of in pairs])


def error_of_ratio(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    """Standard error of `sum(parts) / sum(wholes)` over prompts, one part and whole per prompt.

    Counts within a prompt are correlated, so the total count would give too small an error.
    """
    groups, whole = len(parts), sum(wholes)
    if groups < 2 or not whole:
        return None
    of_all = sum(parts) / whole
    squares = sum((part - of_all * own) ** 2 for part, own in zip(parts, wholes, strict=True))
    return float((groups / (groups - 1) * squares) ** 0.5 / whole)


@dataclass(frozen=True)
class Figures:
    """Figures of a cell over all rounds; None if not counted, or without events."""

    requests: int  # completed prompts
    tokens: int  # generated target tokens
    seconds: float
    ttft: Quantiles | None  # time to the first token
    tpot: Quantiles | None  # time per output token after the first arrival
    itl: Quantiles | None  # gaps between arrivals
    tokens_per_second: Spread
    drafts: int  # verified drafts
    draft_tokens: int  # target tokens in these drafts
    accepted_tokens: int
    acceptance_length: float | None  # 1 + accepted / drafts
    acceptance_error: float | None  # its standard error over prompts
    acceptance_per_position: list[float]  # share of all drafts
    drafter_tokens: float | None  # generated drafter tokens
    translate_seconds: float | None  # both directions
    forward_seconds: float | None  # forwards of the drafter
    propose_seconds: float | None  # drafting in the engine's own process
    verify_seconds: float | None  # rejection sampler
    skipped: dict[str, int]  # requests without a draft in a step, by reason
    peak_memory_bytes: int  # largest of all rounds
    runner: str = ""
    dtype: str = ""


def figures_of(samples: Sequence[Sample]) -> Figures:
    """Compute the figures of one or more runs of a cell."""
    traces = [trace for sample in samples for trace in sample.traces if trace.times]
    drafts = sum(sample.drafts for sample in samples)
    accepted = sum(sample.accepted_tokens for sample in samples)
    positions = zip_longest(*(sample.accepted_per_position for sample in samples), fillvalue=0)
    skipped = Counter[str]()
    for sample in samples:
        skipped.update(sample.worker.get("skipped", {}))
    return Figures(
        requests=sum(len(sample.traces) for sample in samples),
        tokens=sum(sample.tokens for sample in samples),
        seconds=sum(sample.seconds for sample in samples),
        ttft=quantiles([trace.ttft for trace in traces]),
        tpot=quantiles([trace.tpot for trace in traces if trace.tpot is not None]),
        itl=quantiles(list(chain.from_iterable(trace.itl for trace in traces))),
        tokens_per_second=spread([sample.tokens_per_second for sample in samples]),
        drafts=drafts,
        draft_tokens=sum(sample.draft_tokens for sample in samples),
        accepted_tokens=accepted,
        acceptance_length=1 + accepted / drafts if drafts else None,
        acceptance_error=_acceptance_error(samples, accepted, drafts),
        acceptance_per_position=[sum(counts) / drafts for counts in positions] if drafts else [],
        drafter_tokens=_total(samples, "drafter_tokens"),
        translate_seconds=_total(samples, "translate_seconds"),
        forward_seconds=_total(samples, "forward_seconds"),
        propose_seconds=_total(samples, "propose_seconds"),
        verify_seconds=_total(samples, "verify_seconds"),
        skipped={reason: count for reason, count in skipped.items() if count},
        peak_memory_bytes=max(sample.peak_memory_bytes for sample in samples),
        runner=samples[-1].runner,
        dtype=samples[-1].dtype,
    )


def identical(pairs: Pairs) -> tuple[int, int] | None:
    """Number of prompts with equal token ids in every (run, reference) pair, and of all prompts."""
    if not pairs:
        return None
    same = [
        [trace.token_ids == other.token_ids for trace, other in zip(*both, strict=True)]
        for both in ((run.traces, of.traces) for run, of in pairs)
    ]
    return sum(map(all, zip(*same, strict=True))), len(same[0])


def _acceptance_error(samples: Sequence[Sample], accepted: int, drafts: int) -> float | None:
    """Standard error of the acceptance length over prompts; rounds of a prompt are summed.

    Engines count drafts over all prompts. A prompt's share follows from its arrivals after the
    first one: each contains one token and the draft tokens accepted with it.
    """
    if not accepted:
        return None
    prompts = list(zip(*(sample.traces for sample in samples), strict=True))
    steps = [sum(len(trace.counts[1:]) for trace in traces) for traces in prompts]
    more = [sum(count - 1 for trace in traces for count in trace.counts[1:]) for traces in prompts]
    if not sum(more):
        return None
    return error_of_ratio(
        [own * accepted / sum(more) for own in more], [own * drafts / sum(steps) for own in steps]
    )


def _total(samples: Sequence[Sample], counter: str) -> float | None:
    found = [sample.worker[counter] for sample in samples if counter in sample.worker]
    return sum(found) if found else None


@dataclass(frozen=True)
class Row:
    """A cell of the report; comparisons are None without a reference."""

    cell: Cell
    figures: Figures
    speedup: Spread | None  # over the target alone in vLLM
    speedup_over_hf: Spread | None  # Hugging Face methods: over the target alone there
    speedup_over_first: Spread | None  # further settings of a drafter: over its first setting
    # Prompts with the reference's tokens in every round, and all prompts; only greedy drafting.
    identical: tuple[int, int] | None


def rows_of(contents: Contents) -> list[Row]:
    """One row per measured cell, in the order of loads; references of a load come first."""
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
    """Pair each run with the reference's run of the same session, wave and round.

    If one engine is up at a time, the reference's run of that round is in another wave.
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
        # A reference that ran again after an interruption counts once per round.
        figures=figures_of(list({recorded.run: recorded.sample for recorded in runs}.values())),
        speedup=speedup(pairs(ALONE)) if cell.engine.method != ALONE else None,
        speedup_over_hf=speedup(pairs(HF_ALONE)) if kind.drafts and kind.huggingface else None,
        speedup_over_first=speedup(pairs_with(runs, by_cell[first])) if first != cell else None,
        identical=(
            identical(pairs(kind.reference)) if kind.drafts and cell.temperature == 0 else None
        ),
    )


def _but_for_setting(cell: Cell) -> Cell:
    """The cell with DRAFTER instead of DRAFTER:SETTING."""
    drafter = (cell.engine.drafter or "").partition(":")[0]
    return cell._replace(engine=cell.engine._replace(drafter=drafter))
