# SPDX-License-Identifier: Apache-2.0
"""Rank drafters of a target: compare their files, then measure each drafter beside the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm_hetero_spec.bench.engines import vllm_config
from vllm_hetero_spec.bench.figures import Row, Spread, rows_of
from vllm_hetero_spec.bench.plan import EngineId
from vllm_hetero_spec.bench.report import notes
from vllm_hetero_spec.bench.results import Contents
from vllm_hetero_spec.bench.suite import Suite, SuiteDrafter, Target
from vllm_hetero_spec.draft.methods import Choice, order
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.model_folder import kv_bytes_per_token, text_config
from vllm_hetero_spec.inputs.tokenizer_source import open_tokenizer
from vllm_hetero_spec.inputs.weights import local_folder, missing_weights, weight_bytes
from vllm_hetero_spec.options import DEFAULT_CONTEXT
from vllm_hetero_spec.text.statistics import PairMeter, PairStatistics, shared_text
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache

_ELEMENT_BYTES = {"float32": 4, "float": 4}  # other dtypes: 2
_LEAST_SHARE = 0.02  # share of wall time; overlapping less drafting time gains nothing


@dataclass(frozen=True)
class Memory:
    """Memory of a drafter, in addition to the target's."""

    weight_bytes: int | None  # None if the weights are not on this machine
    kv_bytes_per_token: int
    tokens: int  # drafter tokens per context
    sequences: int  # simultaneous contexts

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV of all sequences."""
        return self.kv_bytes_per_token * self.tokens * self.sequences


@dataclass(frozen=True)
class DrafterFacts:
    """Facts about a drafter from its own and the target's files."""

    drafter: SuiteDrafter
    statistics: PairStatistics | None = None  # None if the tokenizers cannot be bridged
    shared_tokens: int = 0  # byte strings that are a text token of both
    memory: Memory | None = None
    not_measured: str = ""  # reason if no engine starts with it, as a sentence

    @property
    def suggested(self) -> Choice | None:
        """Suggested method for sampled requests, from the tokenizers alone."""
        if self.statistics is None:
            return None
        return order(self.statistics, temperature=1.0)[0]


def look_at(
    target: Target, documents: Sequence[str], dtype: str, sequences: int, statistics_only: bool
) -> list[DrafterFacts]:
    """Compare tokenizers on documents, and compute each drafter's memory in a dtype.

    Raises:
        ConfigError: The target's tokenizer cannot be bridged, or no drafter can be used.
    """
    trust = bool(target.engine.get("trust_remote_code"))
    ours = open_tokenizer(target.model, "target", trust_remote_code=trust).text
    found = []
    for drafter in target.drafters:
        try:
            theirs = open_tokenizer(drafter.model, "drafter", trust_remote_code=trust).text
            memory = _memory(drafter.model, _ELEMENT_BYTES.get(dtype, 2), sequences, trust)
        except ConfigError as error:
            found.append(DrafterFacts(drafter, not_measured=str(error)))
            continue
        meter = PairMeter(ours, theirs, build_maps(ours, theirs, cache=default_cache()))
        meter.add(documents)
        shared = len(shared_text(ours, theirs))
        reason = "--statistics-only" if statistics_only else ""
        reason = reason or missing_weights(target.model) or missing_weights(drafter.model)
        reason = reason and f"not measured: {reason}."
        found.append(DrafterFacts(drafter, meter.statistics(), shared, memory, reason))
    if all(facts.statistics is None for facts in found):
        raise ConfigError(" ".join(facts.not_measured for facts in found))
    return found


def _memory(drafter: str, element: int, sequences: int, trust: bool) -> Memory:
    """Memory for contexts of the default length, or of the drafter's maximum if that is less."""
    text = text_config(drafter, trust)
    folder = None if missing_weights(drafter) else local_folder(drafter)
    return Memory(
        weight_bytes(folder, element) if folder else None,
        kv_bytes_per_token(text, element),
        min(DEFAULT_CONTEXT, getattr(text, "max_position_embeddings", DEFAULT_CONTEXT)),
        sequences,
    )


@dataclass(frozen=True)
class Candidate:
    """Measurements of a drafter with a method."""

    engine: EngineId
    config: dict[str, Any]  # its `--speculative-config`
    rows: Sequence[Row]  # one per load; fewer if a load failed
    failure: str = ""  # reason if a load failed, as a sentence

    @property
    def speedup(self) -> Spread | None:
        """Geometric mean of each statistic over all loads; None after a failure."""
        spreads = [row.speedup for row in self.rows if row.speedup is not None]
        if self.failure or not spreads:
            return None
        median, low, high, first, third = (
            prod(getattr(spread, part) for spread in spreads) ** (1 / len(spreads))
            for part in ("median", "low", "high", "quartile1", "quartile3")
        )
        rounds = min(spread.rounds for spread in spreads)
        return Spread(median, low, high, first, third, rounds)

    @property
    def faster_loads(self) -> list[str]:
        """Loads under which it is faster than the target alone in all rounds."""
        return [
            f"batch {row.cell.batch_size}, temperature {row.cell.temperature:g}"
            for row in self.rows
            if row.speedup is not None and row.speedup.low > 1
        ]

    @property
    def faster(self) -> bool:
        """True if it is faster than the target alone in all rounds, averaged over loads."""
        return self.speedup is not None and self.speedup.low > 1

    @property
    def slower(self) -> bool:
        """True if it is slower than the target alone in all rounds, averaged over loads."""
        return self.speedup is not None and self.speedup.high < 1


@dataclass(frozen=True)
class Measured:
    """All measurements of a target; empty if no engine started."""

    rows: Sequence[Row] = ()  # for each load the target alone, then the candidates
    candidates: Sequence[Candidate] = ()  # by falling speedup, failed ones last
    notes: Sequence[str] = ()

    @property
    def ranking(self) -> list[Candidate]:
        """Candidates without a failure, by falling speedup."""
        return [candidate for candidate in self.candidates if not candidate.failure]

    @property
    def failures(self) -> list[str]:
        """Failures of candidates, each with the name of its engine."""
        failed = (each for each in self.candidates if each.failure)
        return [f"{engine_name(each.engine)}: {each.failure}" for each in failed]

    @property
    def recommended(self) -> Candidate | None:
        """Fastest candidate that is faster than the target alone, or None."""
        return next((candidate for candidate in self.ranking if candidate.faster), None)

    def verdict(self, candidate: Candidate) -> str:
        best, speedup = self.recommended, candidate.speedup
        if speedup is None:
            return "failed"
        if candidate is best:
            return "recommended"
        if candidate.slower:
            return "slower than the target alone"
        if not candidate.faster:
            return "not told apart from the target alone"
        if best is not None and best.speedup is not None and speedup.high >= best.speedup.low:
            return "faster, not told apart from the recommended one"
        return "faster than the target alone"


def engine_name(engine: EngineId) -> str:
    return f"{engine.drafter} ({engine.method})" if engine.drafter else "target alone"


def compared(suite: Suite, contents: Contents) -> Measured:
    """Summarize the measurements of a suite with one target."""
    (target,) = suite.targets
    rows = rows_of(contents)
    candidates = []
    for drafter in target.drafters:
        for method in suite.methods:
            engine = EngineId(target.name, method, drafter.name, *suite.num_speculative_tokens)
            own = [row for row in rows if row.cell.engine == engine]
            config = vllm_config(engine, drafter) or {}
            reasons = (why for cell, why in contents.errors.items() if cell.engine == engine)
            candidates.append(Candidate(engine, config, own, "; ".join(dict.fromkeys(reasons))))
    candidates.sort(key=lambda each: -each.speedup.median if each.speedup else 0.0)
    return Measured(rows, candidates, notes(contents))


def trees(row: Row, small: Row, large: Row) -> str:
    """Describe an upper bound of the gain of draft trees for a drafter; "" if it is unknown.

    One more row of the batch brings at most one token, and only if the first draft token was
    rejected. Its cost is estimated from the target alone at the smallest and largest batch.
    """
    shares, length = row.figures.acceptance_per_position, row.figures.acceptance_length
    few, many = small.cell.batch_size, large.cell.batch_size
    if not shares or length is None or few == many:
        return ""
    one, more = (
        each.cell.batch_size / each.figures.tokens_per_second.median for each in (small, large)
    )
    price = max(0.0, more / one - 1) / (many - few)
    gain = (1 - shares[0]) / length
    found = (
        f"Draft trees: one more row costs the target {price:.1%} of its step (batch {many} beside "
        f"{few}), and brings at most {gain:.1%} more tokens"
    )
    if price < gain:
        return f'{found}: measure them with --settings \'{{"tree": {{"tree_nodes": 8}}}}\'.'
    return f"{found}: they cannot pay on this machine."


def own_process(row: Row) -> str:
    """Describe an upper bound of the gain of `draft_ahead`; "" if it is unknown."""
    seconds = row.figures.propose_seconds
    if seconds is None or not row.figures.drafts:
        return ""
    share = min(seconds / row.figures.seconds, 0.99)
    found = f"A process of its own: drafting takes {share:.1%} of the time"
    if share < _LEAST_SHARE:
        return f"{found}, so overlapping it gains nothing."
    return (
        f"{found}, so that drafting while the target verifies, on cores or a device that the "
        f"target does not use, is at most {1 / (1 - share):.2f}x as fast: measure it with "
        '--settings \'{"ahead": {"draft_ahead": true}}\'.'
    )


def prospects(rows: Sequence[Row], of: Sequence[Row], config: dict[str, object]) -> list[str]:
    """Suggest measurements, from a drafter's rows `of`, unless its `config` is already one."""
    if config.get("tree_nodes") or config.get("draft_ahead"):
        return []
    row = min(of, key=lambda each: (each.cell.batch_size, each.cell.temperature))
    same = [
        each
        for each in rows
        if each.cell.engine.drafter is None and each.cell.temperature == row.cell.temperature
    ]
    small, large = (pick(same, key=lambda each: each.cell.batch_size) for pick in (min, max))
    return [sentence for sentence in (trees(row, small, large), own_process(row)) if sentence]
