# SPDX-License-Identifier: Apache-2.0
"""Table of the drafting methods, with an estimate of how promising each one is for a pair.

A sampled method maps each drafter token to target tokens. Any map is lossless, because the
verifier receives the distribution that follows from it (proof: `tests/oracle/reference.py`).
Tokenizer statistics only bound the acceptance rate: `order` is a starting point for measurements.
The configuration reads the names here, so this file loads neither torch nor a tokenizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm_hetero_spec.text.statistics import PairStatistics
    from vllm_hetero_spec.text.vocabulary import VocabularyMaps

SLEM = "slem"  # fits every pair
HETERO = "hetero"  # alias of the first method in `order` that the deployment can run

# Share of straddling tokens from which on the shared vocabulary misses much text.
STRADDLES = 0.03
# Share of lines changed by a round trip above which a tokenizer counts as rewriting its text.
FAILURES = 0.01
# Share of target tokens that a rewriting drafter must have to draft well token by token.
ENOUGH_SHARED = 0.6
# Vocabulary size up to which a drafter spells nearly byte by byte: a target token takes many steps.
FEW_TOKENS = 1000
# Drafter tokens that one proposed target token may take, for such a drafter and for any other. Each
# costs a forward that may be wasted. 8 for byte-level drafters did not raise acceptance.
LONG_SPAN, SHORT_SPAN = 4, 2
# Temperature up to which a greedy draft token may be accepted more often than a sampled one.
NEARLY_GREEDY = 0.3
_KEPT = 1 << 16  # spellings of drafter tokens that are kept, a few MiB


# How promising a method is for a pair: its rank, 0 for the best, and the reason.
Promise = tuple[int, str]


class Choice(NamedTuple):
    """A method and the reason for its rank, in one clause."""

    method: str
    reason: str


class Spelling(NamedTuple):
    """The target tokens that each drafter token proposes.

    Attributes:
        first: int [V_D], id of the first target token; -1 if nothing is proposed.
        lengths: int [V_D], number of target tokens proposed, including the certain ones after the
            first.
        tokens: Returns all target tokens that a drafter id proposes.
    """

    first: np.ndarray
    lengths: np.ndarray
    tokens: Callable[[int], Sequence[int]]


def spell_whole(maps: "VocabularyMaps") -> Spelling:
    """Propose each drafter token as all target tokens that spell it."""
    lengths = np.diff(maps.kappa_ptr)
    tokens = lru_cache(_KEPT)(lambda d: tuple(maps.target_tokens(d).tolist()))
    return Spelling(maps.kappa_first, lengths, tokens)


def spell_twins(maps: "VocabularyMaps") -> Spelling:
    """Propose each drafter token as the target token of the same bytes, or nothing."""
    twins = maps.d2t.tolist()
    tokens = lambda d: twins[d : d + 1] if twins[d] >= 0 else ()  # noqa: E731
    return Spelling(maps.d2t, np.ones_like(maps.d2t), tokens)


def spell_same(size: int, width: int) -> Spelling:
    """Propose each of `size` drafter ids as itself if it is below the target logits' `width`."""
    first = np.arange(size)
    first[first >= width] = -1
    return Spelling(first, np.ones_like(first), lambda d: (d,))


@dataclass(frozen=True)
class Method:
    """A drafting method.

    Attributes:
        summary: One line for users.
        spelling: Maps drafter tokens to target tokens; None for greedy drafts, which need no
            draft probabilities.
        renormalise: True if drafter tokens that propose nothing are never drawn; otherwise such a
            draw is a null proposal.
        merges: True if one target token may be proposed for several drafter tokens.
        promise: Rates the method for a pair; returns None if it need not be tried.
    """

    summary: str
    spelling: Callable[["VocabularyMaps"], Spelling] | None = None
    renormalise: bool = True
    merges: bool = False
    promise: Callable[["PairStatistics"], Promise | None] = lambda pair: None

    @property
    def needs_probs(self) -> bool:
        """True if verification needs the drafter's probabilities."""
        return self.spelling is not None

    @property
    def draws_ahead(self) -> bool:
        """True if drafts may be drawn before the target tokens they continue are known."""
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
    HETERO: Method("alias of the best method for the pair", merges=True),
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
    """Return the methods that fit a pair, the most promising first; never empty.

    `statistics` should come from text similar to the expected requests.
    """
    if temperature == 0:
        reason = "temperature 0: the target has one right token, and a greedy draft predicts it"
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
    """Return how many drafter tokens one proposed target token may take."""
    return LONG_SPAN if drafter_vocabulary <= FEW_TOKENS else SHORT_SPAN
