# SPDX-License-Identifier: Apache-2.0
"""The methods of drafting, one row each: what they propose, and for which pairs they are promising.

To add a method, add a row to `METHODS` and its name to the tests of `tests/draft/test_methods.py`.
A sampled method is a map: which target tokens a drafter token proposes. Any map is right, because
the verifier is told the very distribution that follows from it; a bad one is merely accepted less
(`tests/oracle/reference.py` has the proof). Statistics of two tokenizers bound what a method can
have accepted; they do not say what it will, so the order of the methods is a starting point for a
measurement.

The configuration reads the names from here: this file loads neither torch nor a tokenizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm_hetero_spec.text.statistics import PairStatistics
    from vllm_hetero_spec.text.vocabulary import VocabularyMaps

SLEM = "slem"  # the one that fits every pair
HETERO = "hetero"  # an alias: the first of `order` that the deployment can run

# Where tokens straddle at least this often, what both vocabularies have leaves much out.
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


# How promising a method is for a pair: its place, 0 for the first, and why.
Promise = tuple[int, str]


class Choice(NamedTuple):
    """A method and, in one clause, why it stands where it stands."""

    method: str
    reason: str


class Spelling(NamedTuple):
    """What each drafter token proposes.

    Attributes:
        first: int [V_D], target id of the token that is drawn; -1 for nothing.
        lengths: int [V_D], target tokens proposed, those that follow for certain included.
        tokens: All target tokens that a drafter id proposes.
    """

    first: np.ndarray
    lengths: np.ndarray
    tokens: Callable[[int], Sequence[int]]


def spell_whole(maps: "VocabularyMaps") -> Spelling:
    """Every drafter token by all target tokens that spell it."""
    lengths = np.diff(maps.kappa_ptr)
    return Spelling(maps.kappa_first, lengths, lambda d: maps.target_tokens(d).tolist())


def spell_twins(maps: "VocabularyMaps") -> Spelling:
    """Drafter tokens by the target token of the same bytes, others by nothing."""
    twins = maps.d2t.tolist()
    tokens = lambda d: twins[d : d + 1] if twins[d] >= 0 else ()  # noqa: E731
    return Spelling(maps.d2t, np.ones_like(maps.d2t), tokens)


def spell_same(size: int, width: int) -> Spelling:
    """Ids as they are, of `size` drafter ids those below the `width` of the target's logits."""
    first = np.arange(size)
    first[first >= width] = -1
    return Spelling(first, np.ones_like(first), lambda d: (d,))


@dataclass(frozen=True)
class Method:
    """A method of drafting.

    Attributes:
        summary: What it does, in a line.
        spelling: From the pair's maps what drafter tokens propose; None for greedy drafts, which
            do without the drafter's probabilities.
        renormalise: Never draw what proposes nothing; else that is a null proposal.
        merges: Target tokens of several drafter tokens are proposed too.
        promise: For which pairs it is promising; None where it need not be tried.
    """

    summary: str
    spelling: Callable[["VocabularyMaps"], Spelling] | None = None
    renormalise: bool = True
    merges: bool = False
    promise: Callable[["PairStatistics"], Promise | None] = lambda pair: None

    @property
    def needs_probs(self) -> bool:
        """Whether it verifies the drafter's probabilities, and so has to have them."""
        return self.spelling is not None

    @property
    def draws_ahead(self) -> bool:
        """Whether its drafts may be drawn before it is known what they will follow."""
        return self.needs_probs and self.renormalise and not self.merges


def _promise_of_slem(pair: "PairStatistics") -> Promise | None:
    return 3, "works for every pair: greedy drafts, matched as strings"


def _promise_of_slrs(pair: "PairStatistics") -> Promise | None:
    if _rewritten(pair):
        return None
    if pair.drafter_vocabulary <= FEW_TOKENS:
        few = f"{pair.drafter_vocabulary:,} drafter tokens"
        return 0, f"{few}: target tokens take many of them"
    spans = f"{pair.target_straddle:.1%} of target tokens span several drafter tokens"
    return (1 if pair.straddle >= STRADDLES else 2), f"{spans}, at up to twice the forwards"


def _promise_of_push_forward(pair: "PairStatistics") -> Promise | None:
    if _rewritten(pair):
        return None
    if pair.drafter_vocabulary > FEW_TOKENS and pair.straddle >= STRADDLES:
        share = f"{pair.straddle:.1%} of tokens have the other's boundaries inside"
        return 0, f"{share}, and each drafter token proposes what begins it"
    begun = f"{pair.omega_k:.1%} of the target's"
    return 1, f"drafter tokens begin {begun}, at no cost in forwards"


def _promise_of_tli(pair: "PairStatistics") -> Promise | None:
    shared = f"{pair.omega_t:.1%} of the target's tokens are the drafter's too"
    if _rewritten(pair):
        changed = f"{pair.failure_share:.1%} of lines come back changed"
        return (0, f"{changed}, but {shared}") if pair.omega_t >= ENOUGH_SHARED else None
    if pair.drafter_vocabulary <= FEW_TOKENS or not pair.omega_t:
        return None
    return (2 if pair.straddle >= STRADDLES else 0), shared


def _rewritten(pair: "PairStatistics") -> bool:
    return pair.failure_share > FAILURES


METHODS: Mapping[str, Method] = {
    SLEM: Method("greedy drafts, matched as strings", promise=_promise_of_slem),
    HETERO: Method("stands for the method of this table that fits the pair", merges=True),
    "slrs": Method(
        "push_forward that also proposes target tokens of several drafter tokens",
        spell_whole,
        merges=True,
        promise=_promise_of_slrs,
    ),
    "push_forward": Method(
        "drafter tokens drawn, each proposed as the target tokens that spell it",
        spell_whole,
        promise=_promise_of_push_forward,
    ),
    "tli": Method("tokens drawn from those that both have", spell_twins, promise=_promise_of_tli),
    "union": Method(
        "drafter tokens drawn; one that the target lacks proposes nothing",
        spell_twins,
        renormalise=False,
    ),
}


def order(statistics: "PairStatistics", *, temperature: float) -> list[Choice]:
    """The methods that fit a pair, the most promising first; never empty.

    Args:
        statistics: The pair on a text like the ones to come.
        temperature: Of the target's sampling.
    """
    if temperature == 0:
        reason = "temperature 0: the target has one right token, and a greedy draft aims at it"
        return [Choice(SLEM, reason)]
    promises = {name: method.promise(statistics) for name, method in METHODS.items()}
    promising = sorted((promise, name) for name, promise in promises.items() if promise)
    choices = [Choice(name, reason) for (_, reason), name in promising]
    if temperature <= NEARLY_GREEDY and len(choices) > 1:
        reason = f"temperature {temperature:g}: a greedy guess may beat a drawn one, measure both"
        choices.insert(1, Choice(SLEM, reason))
        del choices[-1]
    return choices


def span(drafter_vocabulary: int) -> int:
    """Drafter tokens that one proposed target token may take, for a drafter with so many ids."""
    return LONG_SPAN if drafter_vocabulary <= FEW_TOKENS else SHORT_SPAN
