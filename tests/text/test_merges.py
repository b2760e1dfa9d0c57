# SPDX-License-Identifier: Apache-2.0
"""Merges of SLRS-n (mu), compared with their definition: the tokenizer encodes each pair."""

import dataclasses
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from contexts import Family
from hypothesis import given
from hypothesis import strategies as st
from toys import toy

from vllm_hetero_spec.slrs import merges as merges_module
from vllm_hetero_spec.slrs.merges import Merges
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import build_maps

PAIRS = [
    ("byte-level", "byte-level-nfc"),
    ("byte-level-nfc", "byte-level"),
    ("byte-level", "sentencepiece"),
    ("sentencepiece", "byte-level"),
    ("sentencepiece", "unigram"),
    ("unigram", "sentencepiece"),
    ("processor", "byte-level"),
]


def merges_of(target: TextTokenizer, drafter: TextTokenizer) -> Merges:
    return Merges(target, drafter, build_maps(target, drafter))


def table(merges: Merges, drafter_id: int) -> dict[int, int]:
    """Return mu(drafter_id, e) for all e for which it is defined."""
    merged = merges.among((drafter_id,), np.arange(len(merges._place), dtype=np.int32))
    return {e: t for e, t in enumerate(merged.tolist()) if t >= 0}


def candidates(target: TextTokenizer, drafter: TextTokenizer, drafter_id: int) -> set[int]:
    """Return all e for which a target token is drafter_id followed by the first bytes of e."""
    data = drafter.token_bytes[drafter_id]
    rests = {t[len(data) :] for t in target.token_bytes if t.startswith(data)} - {b""}
    longest = max(map(len, rests), default=0)
    return {
        e
        for e in spellable(target, drafter)
        if any(drafter.token_bytes[e][: n + 1] in rests for n in range(longest))
    }


def spellable(target: TextTokenizer, drafter: TextTokenizer) -> list[int]:
    """Return the drafter ids whose bytes the target can spell."""
    return np.flatnonzero(build_maps(target, drafter).kappa_first >= 0).tolist()


def followed(text: bytes) -> bytes:
    """Return a text. If it ends in white space, a word is added."""
    return text + b"x" if text[-1:].isspace() else text


def begins_merges(
    target: TextTokenizer, drafter: TextTokenizer, path: Sequence[int], able: Sequence[int]
) -> bool:
    """Return True if a path begins in the intersection, and the target can spell its tokens."""
    return drafter.token_bytes[path[0]] in target.token_bytes and set(path) <= set(able)


def by_definition(
    target: TextTokenizer, drafter: TextTokenizer, path: Sequence[int], following: Sequence[int]
) -> dict[int, int]:
    """Return mu(path, e) for each e of ``following`` for which it is defined.

    ``following`` are ids that the target can spell.
    """
    found: dict[int, int] = {}
    if not begins_merges(target, drafter, path, following):
        return found
    data = drafter.decode_bytes(path)
    for e in following:
        joined = data + drafter.token_bytes[e]
        first = target.encode_bytes(followed(joined))[:1]
        beginning = target.decode_bytes(first)
        if len(beginning) > len(data) and joined.startswith(beginning):
            found[e] = first[0]
    return found


def fruitful(merges: Merges, ids: Iterable[int], count: int) -> list[int]:
    """Return `count` random ids. For at least half of them, a longer target token exists."""
    known, rng = list(ids), random.Random(0)
    with_some = [d for d in known if merges.goes_on((d,))]
    return rng.sample(known, count // 2) + rng.sample(with_some, count // 2)


@pytest.mark.parametrize(("target_name", "drafter_name"), PAIRS)
def test_merges_of_trained_tokenizers(family: Family, target_name: str, drafter_name: str) -> None:
    target, drafter = family[target_name], family[drafter_name]
    merges = merges_of(target, drafter)
    following = spellable(target, drafter)
    partners = 0
    for d in fruitful(merges, range(drafter.vocab_size), 16):
        expected = by_definition(target, drafter, (d,), following)
        assert table(merges, d) == expected
        assert set(expected) <= candidates(target, drafter, d)
        partners += len(expected)
    assert partners > 10  # of 16 tokens, with any trained vocabulary


def test_merges_of_whole_vocabularies(family: Family) -> None:
    target, drafter = family["tiktoken"], family["byte-level-nfc"]
    merges, following = merges_of(target, drafter), spellable(target, drafter)
    for d in range(drafter.vocab_size):
        assert table(merges, d) == by_definition(target, drafter, (d,), following)


def test_parts_of_a_character(family: Family) -> None:
    """Joined parts are the character's token, or the token of an incomplete character."""
    target, han = family["tiktoken"], "中".encode()
    merges = merges_of(target, toy([han[:1], han[1:], han[:2], han[2:] + b"x", han[1:2]]))
    whole = target.encode("中")
    assert len(whole) == 1
    assert table(merges, 0) == {1: whole[0], 4: target.token_bytes.index(han[:2])}
    assert table(merges, 2) == {3: whole[0]}


WORDS = st.lists(st.text("ab ", min_size=1, max_size=4).map(str.encode), max_size=10)


@given(target_words=WORDS, drafter_words=WORDS, seed=st.integers(0, 1 << 30))
def test_merges_of_small_vocabularies(
    target_words: list[bytes], drafter_words: list[bytes], seed: int
) -> None:
    """Merges of all tokens, and of paths of several tokens."""
    target, drafter = toy([b"a", b"b", b"", *target_words]), toy([b"", *drafter_words, b"a", b"b "])
    merges, following = merges_of(target, drafter), spellable(target, drafter)
    everything = np.arange(drafter.vocab_size, dtype=np.int32)
    rng = np.random.default_rng(seed)
    paths = [rng.integers(drafter.vocab_size, size=length).tolist() for length in (2, 3, 4)]
    for path in [*([d] for d in range(drafter.vocab_size)), *paths]:
        expected = by_definition(target, drafter, path, following)
        assert merges.among(path, everything).tolist() == [expected.get(e, -1) for e in everything]
        data = drafter.decode_bytes(path)
        longer = any(t.startswith(data) and t != data for t in target.token_bytes)
        begins = begins_merges(target, drafter, path, following)
        assert merges.goes_on(path) == (begins and longer)


def test_the_last_space_is_left_to_the_word_after_it(family: Family) -> None:
    """Two newlines before a word are two target tokens, although one token spells both."""
    target, drafter = family["byte-level"], toy([b"\n", b" ", b"\n\n", b"  "])
    assert b"\n\n" in target.token_bytes
    assert [target.token_bytes[t] for t in target.encode("\n\nx")][:2] == [b"\n", b"\n"]
    merges = merges_of(target, drafter)
    assert 0 not in table(merges, 0)
    assert target.token_bytes[table(merges, 0)[2]] == b"\n\n"
    assert target.token_bytes[table(merges, 1)[3]] == b"  "


def test_paths_that_longer_tokens_continue(family: Family) -> None:
    target, drafter = family["byte-level"], family["byte-level-nfc"]
    merges = merges_of(target, drafter)
    able = merges.mergeable
    assert able.any()
    assert able.tolist() == [merges.goes_on((d,)) for d in range(drafter.vocab_size)]
    path = [drafter.token_bytes.index(bytes([byte])) for byte in b" retur"]
    assert b" return" in target.token_bytes
    assert all(merges.goes_on(path[: length + 1]) for length in range(len(path)))
    ends = np.array([drafter.token_bytes.index(byte) for byte in (b"n", b"x")], np.int32)
    assert merges.among(path, ends).tolist() == [target.token_bytes.index(b" return"), -1]
    assert not merges.goes_on([*path, path[0]])


def test_bytes_beyond_the_last_one() -> None:
    """Ranges of strings that begin with 0xFF, the byte without a successor."""
    pieces = [b"\xff", b"\xff\xff", b"\xfe", b"\xff\xff\xffa", b"a"]
    own = {b"\xff\xff": 1, b"\xff\xff\xffa": 3}

    def encode_bytes(data: bytes) -> list[int]:
        return [own[data]] if data in own else [0] * len(data)

    target, drafter = toy(pieces), toy([b"\xff", b"\xff\xff", b"\xff\xffa", b"a", b"\xfe"])
    target.encode_bytes = encode_bytes  # type: ignore[method-assign]
    merges = merges_of(target, drafter)
    assert table(merges, 0) == {0: 1, 2: 3}
    assert table(merges, 1) == {}


def test_longest_match_is_not_the_merge(family: Family) -> None:
    """Negative oracle for the tests above: the longest match often is not the real merge."""
    target, drafter = family["byte-level"], family["sentencepiece"]
    merges = merges_of(target, drafter)
    strings = set(target.token_bytes)

    def longest_match(data: bytes, following: bytes) -> bytes:
        joined = data + following
        ends = range(len(joined), len(data), -1)
        return next((joined[:end] for end in ends if joined[:end] in strings), b"")

    differing = agreeing = 0
    for d in fruitful(merges, range(drafter.vocab_size), 16):
        real = table(merges, d)
        for e in candidates(target, drafter, d):
            chosen = longest_match(drafter.token_bytes[d], drafter.token_bytes[e])
            same = chosen == target.token_bytes[real[e]] if e in real else not chosen
            differing, agreeing = differing + (not same), agreeing + same
    assert differing > 20
    assert agreeing > 20


def test_a_rewritten_beginning_is_no_merge(family: Family) -> None:
    """The normalizer replaces e and a combining accent by one character with other bytes."""
    target = toy([b"e", b"\xcc", b"\x81", b"e\xcc\x81", "é".encode()], encode=lambda text: [4])
    drafter = toy([b"e", "\u0301".encode()])
    merges = merges_of(target, drafter)
    assert table(merges, 0) == {}


def test_no_merges_outside_the_intersection_or_with_control() -> None:
    target = toy([b"a", b"b", b"ab", b"abb", b""])
    drafter = toy([b"a", b"b", b"bb", b"bx", b"aab", b""])
    merges = merges_of(target, drafter)
    assert table(merges, 0) == {1: 2, 2: 3}
    for empty in (1, 3, 4, 5):
        assert table(merges, empty) == {}
        assert merges.among((empty,), np.arange(6, dtype=np.int32)).tolist() == [-1] * 6

    for eos, found in ((1, {2: 3}), (0, {})):
        special = SpecialTokens(target, drafter, [4], [eos])
        ended = Merges(target, drafter, build_maps(target, drafter).with_control(special))
        assert table(ended, 0) == found


class Counting:
    """A target, and the number of texts that it has encoded."""

    def __init__(self, target: TextTokenizer) -> None:
        self._encode = target.raw_encode_batch
        self.texts = 0
        self.target = dataclasses.replace(target, raw_encode_batch=self._counted)

    def _counted(self, texts: Sequence[str]) -> list[list[int]]:
        self.texts += len(texts)
        return self._encode(texts)


def test_the_cache_of_merges_is_bounded(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    counting, drafter = Counting(family["byte-level"]), family["sentencepiece"]
    maps = build_maps(counting.target, drafter)
    d = drafter.token_bytes.index(b"s")
    expected = table(Merges(counting.target, drafter, maps), d)
    monkeypatch.setattr(merges_module, "MEMO_PAIRS", 64)
    merges = Merges(counting.target, drafter, maps)
    rng = np.random.default_rng(0)

    def asked(ids: np.ndarray) -> int:
        before = counting.texts
        assert merges.among((d,), ids).tolist() == [expected.get(e, -1) for e in ids.tolist()]
        return counting.texts - before

    some = np.array([*rng.choice(list(expected), 12), *rng.integers(3, 900, 30)], np.int32)
    assert asked(some) == len(set(some.tolist()) & candidates(counting.target, drafter, d))
    assert asked(some) == 0
    assert asked(rng.permutation(some)) == 0
    assert asked(np.array([], np.int32)) == 0
    for _ in range(40):
        asked(rng.integers(0, drafter.vocab_size, 64).astype(np.int32))
    assert asked(some) > 0  # evicted by the other pairs


@pytest.mark.parametrize(("target", "drafter"), [("llama-3.1", "qwen2"), ("qwen2", "llama-2")])
def test_merges_of_real_tokenizers(real: Family, target: str, drafter: str) -> None:
    merges = merges_of(real[target], real[drafter])
    ids = [real[drafter].token_bytes.index(data) for data in (b" York", b"\n", b"\xe4")]
    rng = random.Random(0)
    for d in ids:
        found = table(merges, d)
        others = rng.sample(range(real[drafter].vocab_size), 300)
        data = real[drafter].token_bytes[d]
        for e in [*rng.sample(sorted(found), min(300, len(found))), *others]:
            tail = real[drafter].token_bytes[e]
            first = real[target].encode_bytes(data + tail)[0]
            longer = len(real[target].token_bytes[first]) > len(data) and bool(tail)
            assert found.get(e) == (first if longer else None)
