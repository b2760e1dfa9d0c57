# SPDX-License-Identifier: Apache-2.0
"""Ways to spell words with pieces: against listing them all, and against closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import toy

from vllm_hetero_spec.text.segmentation import (
    REPORT_EVERY,
    count_segmentations,
    segmentation_statistics,
)
from vllm_hetero_spec.text.tokenizer import TextTokenizer

WORD = st.text("abc", max_size=9).map(str.encode)
PIECES = st.lists(st.text("abc", max_size=4).map(str.encode), max_size=9)


def listed(word: bytes, pieces: set[bytes]) -> list[list[bytes]]:
    """Every spelling of the word, one by one."""
    if not word:
        return [[]]
    return [
        [piece, *rest]
        for piece in pieces
        if piece and word.startswith(piece)
        for rest in listed(word[len(piece) :], pieces)
    ]


@given(words=st.lists(WORD, max_size=4), pieces=PIECES)
def test_counts_are_those_of_a_list(words: list[bytes], pieces: list[bytes]) -> None:
    expected = [len(listed(word, set(pieces))) for word in words]
    assert count_segmentations(words, pieces) == expected


def fibonacci(count: int) -> int:
    before, current = 0, 1
    for _ in range(count):
        before, current = current, before + current
    return current


@pytest.mark.parametrize("length", [0, 1, 2, 10, 128, 500])
def test_ones_and_twos_are_fibonacci(length: int) -> None:
    assert count_segmentations([b"a" * length], [b"a", b"aa"]) == [fibonacci(length)]


def test_runs_of_any_length_are_powers_of_two() -> None:
    """128 spaces: 2 ** 127 spellings, exactly."""
    runs = [b" " * length for length in range(1, 129)]
    assert count_segmentations(runs, runs) == [2 ** (len(run) - 1) for run in runs]


def test_pieces_count_once_and_empty_ones_never() -> None:
    assert count_segmentations([b"ab", b"", b"x"], [b"a", b"b", b"a", b"", b"ab"]) == [2, 1, 0]
    assert count_segmentations([b"a"], []) == [0]
    assert count_segmentations([], [b"a"]) == []


def test_statistics() -> None:
    spelled = toy([b"", b"ab", b"aab", b"ab", b"xa", b"aaaa", b"a"])
    by = toy([b"a", b"", b"b", b"ab", b"aa", b"aa"])
    found = segmentation_statistics(spelled, by)
    # a: 1; ab: 2; aab: a a b, aa b, a ab; aaaa: 5; xa: none
    assert (found.tokens, found.without, found.share_without) == (5, 1, 0.2)
    assert (found.median, found.p90, found.p99, found.max) == (2, 5, 5, 5)
    assert found.mean == pytest.approx((0 + 1 + 2 + 3 + 5) / 5)
    assert found.hardest == b"aaaa"
    assert found.shortest_mean == pytest.approx((1 + 1 + 2 + 2) / 4)
    assert found.shortest_max == 2


@given(words=st.lists(WORD.filter(bool), min_size=1, max_size=6), pieces=PIECES.filter(any))
def test_statistics_against_a_list(words: list[bytes], pieces: list[bytes]) -> None:
    found = segmentation_statistics(toy(words), toy(pieces))
    spellings = [listed(word, set(pieces)) for word in set(words)]
    counts = sorted(map(len, spellings))
    assert found.tokens == len(counts)
    assert found.without == counts.count(0)
    assert found.max == counts[-1]
    assert found.mean == pytest.approx(sum(counts) / len(counts))
    assert sum(count <= found.median for count in counts) * 2 >= len(counts)
    assert sum(count < found.median for count in counts) * 2 < len(counts)
    shortest = [min(map(len, ways)) for ways in spellings if ways]
    assert found.shortest_max == max(shortest, default=0)
    if shortest:
        assert found.shortest_mean == pytest.approx(sum(shortest) / len(shortest))
    else:
        assert math.isnan(found.shortest_mean)


def test_a_mean_beyond_a_float() -> None:
    runs = [b"a" * length for length in (1, 2, 3, 1200)]
    found = segmentation_statistics(toy(runs), toy([b"a" * length for length in range(1, 1201)]))
    assert found.max == 2**1199
    assert found.mean == math.inf
    assert found.shortest_mean == 1


def test_nothing_to_spell_or_to_spell_with() -> None:
    for spelled, by in ((toy([b""]), toy([b"a"])), (toy([b"a"]), toy([b""]))):
        with pytest.raises(ValueError, match="toy has no text tokens"):
            segmentation_statistics(spelled, by)


def test_progress() -> None:
    count = 2 * REPORT_EVERY + 5
    seen: list[tuple[int, int]] = []
    count_segmentations([b"a"] * count, [b"a"], progress=lambda *steps: seen.append(steps))
    assert seen == [(REPORT_EVERY, count), (2 * REPORT_EVERY, count), (count, count)]
    seen.clear()
    exact = toy([b"a", b"b"])
    segmentation_statistics(exact, exact, progress=lambda *steps: seen.append(steps))
    assert seen == [(2, 2)]


def test_a_byte_vocabulary_spells_every_token_in_one_way(family: dict[str, TextTokenizer]) -> None:
    single = toy([bytes([byte]) for byte in range(256)])
    found = segmentation_statistics(family["byte-level"], single)
    assert (found.without, found.median, found.max) == (0, 1, 1)
    assert found.shortest_max == max(map(len, family["byte-level"].token_bytes))


def test_real_tokenizers(real: dict[str, TextTokenizer]) -> None:
    found = segmentation_statistics(real["llama-2"], real["qwen2"])
    assert (found.tokens, found.without) == (31901, 0)
    assert found.median > 1
    assert found.max > 100 * found.p90
