# SPDX-License-Identifier: Apache-2.0
"""In how many ways the tokens of one vocabulary spell each token of another.

An algorithm that needs the probability of a target token under the drafter sums over these ways,
so their number says whether that can be afforded. They are counted, never listed: the ways to
spell a word are the sum, over the pieces that end it, of the ways to spell what comes before.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_hetero_spec.text.tokenizer import TextTokenizer

Progress = Callable[[int, int], None]
REPORT_EVERY = 4096


@dataclass(frozen=True)
class SegmentationStatistics:
    """Ways to spell the tokens of one vocabulary with another's; every byte string counts once.

    Quantiles are taken over all tokens, those without any way included, and are numbers of ways
    that occur (the smallest that at least that share of the tokens does not exceed).
    """

    tokens: int
    without: int  # tokens that cannot be spelled at all
    median: int
    mean: float  # inf where it is beyond a float
    p90: int
    p99: int
    max: int
    hardest: bytes  # a token with the most ways
    shortest_mean: float  # pieces in the shortest spelling of a token that has one, nan without any
    shortest_max: int

    @property
    def share_without(self) -> float:
        return self.without / self.tokens if self.tokens else 0.0


def count_segmentations(
    words: Sequence[bytes], pieces: Iterable[bytes], *, progress: Progress | None = None
) -> list[int]:
    """For each word the number of sequences of pieces whose concatenation it is.

    Pieces that occur twice count once and empty ones not at all; the empty word has one spelling.
    ``progress`` is told (words done, words in all) now and then, and at the end.
    """
    return [ways for ways, _ in _spellings(words, pieces, progress)]


def segmentation_statistics(
    spelled: TextTokenizer, by: TextTokenizer, *, progress: Progress | None = None
) -> SegmentationStatistics:
    """How the text tokens of ``spelled`` can be written with the text tokens of ``by``.

    Special tokens take no part. Raises ValueError where one of the two has no other tokens.
    """
    words = sorted({data for data in spelled.token_bytes if data})
    pieces = {data for data in by.token_bytes if data}
    if not words or not pieces:
        empty = by if words else spelled
        raise ValueError(f"{empty.name} has no text tokens: nothing can be spelled with it")
    found = _spellings(words, pieces, progress)
    ways = sorted(count for count, _ in found)
    fewest = [length for count, length in found if count]
    return SegmentationStatistics(
        tokens=len(words),
        without=len(words) - len(fewest),
        median=_quantile(ways, 0.5),
        mean=_mean(ways),
        p90=_quantile(ways, 0.9),
        p99=_quantile(ways, 0.99),
        max=ways[-1],
        hardest=max(zip(found, words, strict=True), key=lambda entry: entry[0][0])[1],
        shortest_mean=sum(fewest) / len(fewest) if fewest else math.nan,
        shortest_max=max(fewest, default=0),
    )


def _spellings(
    words: Sequence[bytes], pieces: Iterable[bytes], progress: Progress | None
) -> list[tuple[int, int]]:
    """For each word the number of its spellings and of the pieces in the shortest one."""
    known = set(pieces) - {b""}
    longest = max(map(len, known), default=0)
    found = []
    for done, word in enumerate(words, 1):
        found.append(_spell(word, known, longest))
        if progress is not None and (done % REPORT_EVERY == 0 or done == len(words)):
            progress(done, len(words))
    return found


def _spell(word: bytes, known: set[bytes], longest: int) -> tuple[int, int]:
    ways, shortest = [1], [0]  # of the first 0, 1, 2, ... bytes
    for end in range(1, len(word) + 1):
        count, pieces = 0, end
        for start in range(max(0, end - longest), end):
            if ways[start] and word[start:end] in known:
                count += ways[start]
                pieces = min(pieces, shortest[start] + 1)
        ways.append(count)
        shortest.append(pieces)
    return ways[-1], shortest[-1]


def _quantile(ordered: Sequence[int], share: float) -> int:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _mean(values: Sequence[int]) -> float:
    try:
        return sum(values) / len(values)
    except OverflowError:
        return math.inf
