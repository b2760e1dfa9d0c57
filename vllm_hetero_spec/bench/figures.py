# SPDX-License-Identifier: Apache-2.0
"""The figures of a cell, from what its runs measured.

Latencies are pooled over the requests of all rounds; speeds are taken per round.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from vllm_hetero_spec.measure.load import Sample
from vllm_hetero_spec.report.figures import Quantiles, Spread, error_of_ratio, quantiles, spread


@dataclass(frozen=True)
class Figures:
    """What a cell did.

    Attributes:
        requests: Completed prompts, of all rounds.
        tokens: Generated target tokens, of all rounds.
        seconds: Of all rounds.
        ttft: Time to the first token.
        tpot: Time per output token after the first arrival.
        itl: Gaps between arrivals.
        tokens_per_second: Of all requests together.
        drafts: Drafts that the target verified.
        draft_tokens: Target tokens proposed in them.
        accepted_tokens: Those accepted.
        acceptance_length: 1 + accepted / drafts; None without drafts.
        acceptance_error: Its standard error over prompts; None of a single one.
        acceptance_per_position: Share of drafts whose token at position 0, 1, ... was accepted.
        acceptance_of_drafted: Share of the tokens drafted at a position that were accepted; empty
            where the engine does not count them.
        drafter_tokens: Tokens the drafter generated; None where the engine does not count them, as
            for the times below.
        translate_seconds: Translation, both directions.
        forward_seconds: The drafter's forwards.
        propose_seconds: Drafting in the engine's own process, with the forwards that run there.
        verify_seconds: The rejection sampler.
        skipped: Requests left undrafted in a step, by reason.
        peak_memory_bytes: Largest of all rounds.
        runner: Which of vLLM's model runners ran it; "" for other engines.
        dtype: What the target computed in; "" where nobody says.
    """

    requests: int
    tokens: int
    seconds: float
    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    tokens_per_second: Spread
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_length: float | None
    acceptance_error: float | None
    acceptance_per_position: list[float]
    acceptance_of_drafted: list[float]
    drafter_tokens: float | None
    translate_seconds: float | None
    forward_seconds: float | None
    propose_seconds: float | None
    verify_seconds: float | None
    skipped: dict[str, int]
    peak_memory_bytes: int
    runner: str = ""
    dtype: str = ""


def figures_of(samples: Sequence[Sample]) -> Figures:
    """The figures of one or more runs of a cell."""
    traces = [trace for sample in samples for trace in sample.traces if trace.times]
    drafts = sum(sample.drafts for sample in samples)
    accepted = sum(sample.accepted_tokens for sample in samples)
    per_position = _summed([sample.accepted_per_position for sample in samples])
    drafted = _summed([sample.drafted_per_position for sample in samples])
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
        acceptance_per_position=[count / drafts for count in per_position] if drafts else [],
        acceptance_of_drafted=[
            count / of for count, of in zip(per_position, drafted, strict=False) if of
        ],
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


def identical(pairs: Sequence[tuple[Sample, Sample]]) -> tuple[int, int] | None:
    """Prompts with the reference's ids in every (run, reference) pair, and all prompts."""
    if not pairs:
        return None
    same = [
        [trace.token_ids == other.token_ids for trace, other in zip(*both, strict=True)]
        for both in ((run.traces, of.traces) for run, of in pairs)
    ]
    return sum(map(all, zip(*same, strict=True))), len(same[0])


def _acceptance_error(samples: Sequence[Sample], accepted: int, drafts: int) -> float | None:
    """Over prompts, all rounds of one together.

    Engines count drafts of all prompts together. A prompt's share of them is taken from its later
    arrivals: each brings one token, and those accepted with it.
    """
    if not accepted:
        return None
    prompts = list(zip(*(sample.traces for sample in samples), strict=True))
    steps = [sum(len(trace.counts[1:]) for trace in traces) for traces in prompts]
    more = [sum(sum(trace.counts[1:]) for trace in traces) for traces in prompts]
    more = [tokens - arrivals for tokens, arrivals in zip(more, steps, strict=True)]
    if not sum(more):
        return None
    return error_of_ratio(
        [own * accepted / sum(more) for own in more], [own * drafts / sum(steps) for own in steps]
    )


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _total(samples: Sequence[Sample], counter: str) -> float | None:
    """Of a counter of the plugin's; None where the engine does not count it."""
    found = [sample.worker[counter] for sample in samples if counter in sample.worker]
    return sum(found) if found else None
