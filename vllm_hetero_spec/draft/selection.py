# SPDX-License-Identifier: Apache-2.0
"""In which order the methods of drafting are worth trying for a pair, before any model has run.

Statistics of two tokenizers bound what a method can have accepted; they do not say what it will.
The order is a starting point for a measurement, and any order is lossless.
"""

from typing import NamedTuple

from vllm_hetero_spec.text.statistics import PairStatistics

SLEM = "slem"
TLI = "tli"
PUSH_FORWARD = "push_forward"
SLRS = "slrs"
ERSD = "ersd"

# Where tokens straddle at least this often, proposing across boundaries is worth its rows.
STRADDLES = 0.03
# Lines that come back changed: above this share a tokenizer counts as rewriting its text.
FAILURES = 0.01
# A drafter that rewrites text still drafts well token by token if it has this many of the target's.
ENOUGH_SHARED = 0.6
# Up to here a drafter spells nearly byte by byte, and target tokens take many of its steps.
FEW_TOKENS = 1000
# Drafter tokens that one proposed target token may take: of such a drafter, and of any other. Each
# costs a forward that may come to nothing; with 8 for drafters of bytes no more is accepted.
LONG_SPAN, SHORT_SPAN = 4, 2
# At most this hot, one greedy guess may be accepted more often than a drawn one.
NEARLY_GREEDY = 0.3


class Choice(NamedTuple):
    """A method and, in one clause, why it stands where it stands."""

    method: str
    reason: str


def order(
    statistics: PairStatistics,
    *,
    temperature: float,
    structured_output: bool = False,
    reproducible: bool = False,
    rows_available: bool = True,
) -> list[Choice]:
    """The methods that fit a pair, the most promising first; never empty.

    Args:
        statistics: The pair on a text like the ones to come.
        temperature: Of the target's sampling.
        structured_output: A grammar constrains the target.
        reproducible: The same seed must give the same text whatever the drafter.
        rows_available: The drafter's probabilities can be read, not only its tokens.
    """
    single = _only_greedy(temperature, structured_output, rows_available)
    if single:
        return [Choice(SLEM, single)]
    methods = _with_rows(statistics)
    if reproducible:
        rows = methods[0].method if methods else SLEM
        return [
            Choice(ERSD, f"one seed, one text whatever the drafter; races on the rows of {rows}"),
            Choice(SLEM, "the same distribution, but the text depends on the drafter"),
        ]
    if methods and temperature <= NEARLY_GREEDY:
        greedy = Choice(
            SLEM, f"temperature {temperature:g}: a greedy guess may beat a drawn one, measure both"
        )
        return [methods[0], greedy, *methods[1:]]
    return [*methods, _FALLBACK]


def span(drafter_vocabulary: int) -> int:
    """Drafter tokens that one proposed target token may take, for a drafter with so many ids."""
    return LONG_SPAN if drafter_vocabulary <= FEW_TOKENS else SHORT_SPAN


_FALLBACK = Choice(SLEM, "works for every pair: greedy drafts, matched as strings")


def _only_greedy(temperature: float, structured_output: bool, rows_available: bool) -> str | None:
    """Why nothing but a greedy draft makes sense; None where probabilities do."""
    if temperature == 0:
        return "temperature 0: the target has one right token, and a greedy draft aims at it"
    if structured_output:
        return "a grammar cuts the target's distribution after the draft was drawn"
    if not rows_available:
        return "the drafter's probabilities cannot be read"
    return None


def _with_rows(statistics: PairStatistics) -> list[Choice]:
    """Methods that verify the drafter's probabilities, best first; may be empty."""
    shared, straddle = statistics.omega_t, statistics.target_straddle
    intersection = f"{shared:.1%} of the target's tokens are the drafter's too"
    if statistics.failure_share > FAILURES:
        rewritten = f"{statistics.failure_share:.1%} of lines come back changed"
        if shared >= ENOUGH_SHARED:
            return [Choice(TLI, f"{rewritten}, but {intersection}")]
        return []
    tli = Choice(TLI, intersection)
    push = Choice(
        PUSH_FORWARD,
        f"drafter tokens begin {statistics.omega_k:.1%} of the target's, at no cost in rows",
    )
    if statistics.drafter_vocabulary <= FEW_TOKENS:
        few = f"{statistics.drafter_vocabulary:,} drafter tokens: target tokens take many of them"
        return [Choice(SLRS, few), push]
    spans = f"{straddle:.1%} of target tokens span several drafter tokens"
    slrs = Choice(SLRS, spans)
    if straddle >= STRADDLES:
        methods = [slrs, push, tli]
    elif statistics.drafter_straddle >= STRADDLES:
        longer = f"{statistics.drafter_straddle:.1%} of drafter tokens span several target tokens"
        methods = [Choice(PUSH_FORWARD, longer), slrs._replace(reason=f"only {spans}"), tli]
    else:
        methods = [tli, push, slrs._replace(reason=f"only {spans}")]
    return methods if shared > 0 else [choice for choice in methods if choice.method != TLI]
