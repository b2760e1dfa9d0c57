# SPDX-License-Identifier: Apache-2.0
"""Tiny vocabularies and models, for which every distribution can be enumerated."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from chance import Chance, Outcome, law
from reference import Pair, Row

TARGET = (b"a", b"b", b"ab", b"ba", b"aab")
DRAFTER = (b"a", b"b", b"aa", b"ab", b"bb")
# A drafter of single bytes, and a target with tokens of up to four bytes.
WORDS = (b"a", b"b", b"ab", b"aba", b"abab", b"bab")
LETTERS = (b"a", b"b")


def longest_match(vocabulary: Sequence[bytes]) -> Callable[[bytes], tuple[int, ...]]:
    """Return a tokenizer that always takes the longest token."""
    longest_first = sorted(range(len(vocabulary)), key=lambda t: -len(vocabulary[t]))

    def tau(text: bytes) -> tuple[int, ...]:
        ids: list[int] = []
        while text:
            ids.append(next(t for t in longest_first if text.startswith(vocabulary[t])))
            text = text[len(vocabulary[ids[-1]]) :]
        return tuple(ids)

    return tau


@dataclass(frozen=True)
class World:
    """A pair of vocabularies with random models whose rows depend on the whole context."""

    pair: Pair
    seed: int
    peak: float = 0.6  # concentration of the Dirichlet distribution; a small one is peaked

    def p(self, c: tuple[int, ...]) -> Row:
        return self._row("p", len(self.pair.target), c)

    def q_after(self, c: tuple[int, ...]) -> Callable[[tuple[int, ...]], Row]:
        """Return the drafter's rows after the text of c."""
        text = b"".join(self.pair.target[t] for t in c)
        return lambda path: self._row("q", len(self.pair.drafter), (text, path))

    def _row(self, model: str, size: int, context: object) -> Row:
        return _dirichlet(self.seed, self.peak, size, f"{model} {context!r}")

    def law_of(
        self,
        step: Callable[[tuple[int, ...], Chance], tuple[int, ...]],
        *,
        length: int,
        prompt: tuple[int, ...] = (),
    ) -> dict[tuple[int, ...], float]:
        """Return the distribution of `length` tokens: one speculative step, then the target."""

        emitted = law(lambda chance: step(prompt, chance)[:length])
        found: dict[tuple[int, ...], float] = defaultdict(float)
        for tokens, probability in emitted.items():
            for rest, share in self._continued(prompt + tokens, length - len(tokens)):
                found[tokens + rest] += probability * share
        return found

    def _continued(
        self, c: tuple[int, ...], length: int
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield each continuation by the target alone, with its probability."""
        if not length:
            yield (), 1.0
            return
        for t, probability in enumerate(self.p(c)):
            for rest, share in self._continued((*c, t), length - 1):
                yield (t, *rest), float(probability * share)

    def target_law(
        self, *, length: int, prompt: tuple[int, ...] = ()
    ) -> dict[tuple[int, ...], float]:
        return self.law_of(lambda c, chance: (), length=length, prompt=prompt)


@dataclass(frozen=True)
class FaithfulWorld(World):
    """A world whose drafter is the target itself, with tokens of single bytes."""

    def q_after(self, c: tuple[int, ...]) -> Callable[[tuple[int, ...]], Row]:
        def q(path: tuple[int, ...]) -> Row:
            text = self.pair.spell(path)
            row = np.array([self.begins(c, text + letter) for letter in self.pair.drafter])
            return row / row.sum()

        return q

    @lru_cache(maxsize=100_000)  # noqa: B019
    def begins(self, c: tuple[int, ...], text: bytes) -> float:
        """Return the probability that the target's text after c begins with `text`."""
        found = 0.0
        for t, (token, share) in enumerate(zip(self.pair.target, self.p(c), strict=True)):
            if token.startswith(text):
                found += share
            elif text.startswith(token):
                found += share * self.begins((*c, t), text[len(token) :])
        return float(found)


@lru_cache(maxsize=100_000)
def _dirichlet(seed: int, peak: float, size: int, context: str) -> Row:
    generator = np.random.default_rng([seed, zlib.crc32(context.encode())])
    row = generator.dirichlet(np.full(size, peak))
    row.setflags(write=False)
    return row


def worlds(count: int, target: Sequence[bytes] = TARGET, drafter: Sequence[bytes] = DRAFTER):
    """Return random worlds over one pair of vocabularies."""
    pair = Pair(target, drafter, longest_match(target))
    return [World(pair, seed) for seed in range(count)]


def total_variation(first: dict[Outcome, float], second: dict[Outcome, float]) -> float:
    """Return half the sum of absolute differences of two distributions."""
    keys = first.keys() | second.keys()
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in keys)
