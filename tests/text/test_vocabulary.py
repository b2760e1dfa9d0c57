# SPDX-License-Identifier: Apache-2.0
"""Maps between two vocabularies: bytes of each row, the target's own tokens, and the cache."""

import dataclasses
import itertools
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from contexts import Family
from hypothesis import given
from hypothesis import strategies as st
from toys import toy

from vllm_hetero_spec.text import vocabulary
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps, build_maps, default_cache

FAMILIES = ("byte-level", "byte-level-nfc", "sentencepiece", "unigram", "tiktoken", "processor")
BYTES = [bytes([byte]) for byte in range(256)]


def rows_of(maps: VocabularyMaps) -> list[list[int]]:
    return [maps.target_tokens(d).tolist() for d in range(maps.drafter_size)]


def assert_maps(maps: VocabularyMaps, target: TextTokenizer, drafter: TextTokenizer) -> None:
    """Check all properties of the maps, id by id."""
    assert (maps.target_size, maps.drafter_size) == (target.vocab_size, drafter.vocab_size)
    assert {array.dtype for array in (maps.d2t, maps.kappa_ptr, maps.kappa_ids)} == {
        np.dtype(np.int32)
    }
    target_strings = set(target.token_bytes) - {b""}
    for d, row in enumerate(rows_of(maps)):
        data = drafter.token_bytes[d]
        assert maps.kappa_first[d] == (row[0] if row else -1)
        assert (maps.d2t[d] >= 0) == (data in target_strings)
        if maps.d2t[d] >= 0:
            assert row == [maps.d2t[d]]
        if row:
            assert all(0 <= t < target.vocab_size for t in row)
            assert b"".join(target.token_bytes[t] for t in row) == data
            assert target.special_ids.isdisjoint(row)
        elif data:  # the target cannot spell these bytes
            assert target.decode_bytes(target.encode_bytes(data)) != data
            assert any(target.byte_ids[byte] < 0 for byte in data)


@pytest.mark.parametrize(("target", "drafter"), list(itertools.product(FAMILIES, repeat=2)))
def test_maps_of_trained_tokenizers(family: Family, target: str, drafter: str) -> None:
    assert_maps(build_maps(family[target], family[drafter]), family[target], family[drafter])


@pytest.mark.parametrize("target", FAMILIES)
def test_rows_are_the_targets_encoding(family: Family, target: str) -> None:
    checked = 0
    for drafter in family.values():
        maps = build_maps(family[target], drafter)
        for d, row in enumerate(rows_of(maps)):
            data = drafter.token_bytes[d]
            emitted = family[target].encode_bytes(data)
            alone = len(emitted) == 1 or data not in family[target].token_bytes
            if alone and family[target].decode_bytes(emitted) == data:
                assert row == emitted
                checked += len(row) > 0
    assert checked > 1000


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("llama-3.1", "qwen2"),
        ("qwen2", "llama-2"),
        ("starcoder2", "gpt2"),
        ("llama-2", "byte-level"),
    ],
)
def test_maps_of_real_tokenizers(real: Family, target: str, drafter: str) -> None:
    assert_maps(build_maps(real[target], real[drafter]), real[target], real[drafter])


def test_of_equal_target_tokens_never_emitted_the_smallest() -> None:
    target = toy([b"a", b"b", b"ab", b"ab"], encode=lambda text: ["ab".index(c) for c in text])
    maps = build_maps(target, toy([b"ab", b"abb"]))
    assert rows_of(maps) == [[2], [0, 1, 1]]
    assert maps.d2t.tolist() == [2, -1]


def test_text_the_normaliser_rewrites_is_spelled_bytewise(family: Family) -> None:
    target = family["byte-level-nfc"]
    accented = "e\u0301"
    assert (
        target.decode_bytes(target.encode(accented))
        == unicodedata.normalize("NFC", accented).encode()
    )
    maps = build_maps(target, toy([accented.encode(), b"e"]))
    assert rows_of(maps)[0] == [target.byte_ids[byte] for byte in accented.encode()]
    assert rows_of(maps)[1] == target.encode("e")


def test_undecodable_tokens() -> None:
    """A row is the target's own token, or spells the bytes, or is empty if that is impossible."""
    han = "中".encode()
    spelled = toy([b"x", b"a", b"xa", *BYTES, han[:2], han])
    maps = build_maps(spelled, toy([han[:2], b"xa" + han[:1], han[1:]]))
    assert rows_of(maps) == [[3 + 256], [2, 3 + han[0]], [3 + han[1], 3 + han[2]]]

    lacking = toy([b"x", han[:1]])
    maps = build_maps(lacking, toy([han[:1], b"x" + han[:1], b"x" + han[1:2], b"xy", b""]))
    assert rows_of(maps) == [[1], [0, 1], [], [], []]
    assert maps.kappa_first.tolist() == [1, 0, -1, -1, -1]


@given(data=st.data())
def test_kappa_covers_the_intersection(data: st.DataObject) -> None:
    words = st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=8)
    target, drafter = toy(data.draw(words)), toy(data.draw(words))
    maps = build_maps(target, drafter)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    p = rng.dirichlet(np.full(target.vocab_size, 0.3))
    q = rng.dirichlet(np.full(drafter.vocab_size, 0.3))

    def covered(ids: np.ndarray) -> float:
        row = np.bincount(ids[ids >= 0], q[ids >= 0], target.vocab_size)
        return float(np.minimum(p, row).sum())

    assert covered(maps.kappa_first) >= covered(maps.d2t) - 1e-12


def test_control_tokens_by_string_and_ends_by_role() -> None:
    """<2> is a control token of both. 0 and 4 are EOS of the drafter that the target lacks."""
    target, drafter = toy([b"a", b"b", b"", b""]), toy([b"", b"ab", b"", b"b", b""])
    maps = build_maps(target, drafter)
    assert rows_of(maps) == [[], [0, 1], [], [1], []]
    ended = maps.with_control(SpecialTokens(target, drafter, [3, 2], [4, 0]))
    assert rows_of(ended) == [[3], [0, 1], [2], [1], [3]]
    assert ended.d2t.tolist() == [3, -1, 2, 1, 3]
    assert ended.kappa_first.tolist() == [3, 0, 2, 1, 3]
    assert {ended.d2t.dtype, ended.kappa_ptr.dtype, ended.kappa_ids.dtype} == {np.dtype(np.int32)}
    assert rows_of(maps) == [[], [0, 1], [], [1], []]


def test_an_end_that_is_text_loses_its_text() -> None:
    target, drafter = toy([b"a", b"b", b""]), toy([b"ab", b"b"])
    maps = build_maps(target, drafter).with_control(SpecialTokens(target, drafter, [2], [0, 7]))
    assert rows_of(maps) == [[2], [1]]


@pytest.mark.parametrize("target_eos", [[], [9]])
def test_no_end_in_the_target(target_eos: list[int]) -> None:
    target, drafter = toy([b"a", b"b"]), toy([b"", b"ab", b"b"])
    maps = build_maps(target, drafter).with_control(
        SpecialTokens(target, drafter, target_eos, [0, 2])
    )
    assert rows_of(maps) == [[], [0, 1], []]
    assert maps.d2t.tolist() == [-1, -1, -1]


PAIR = toy([b"a", b"b", b"ab", b""]), toy([b"a", b"abb", b"", b"ba"])


def unbuildable() -> TextTokenizer:
    """Return the target of PAIR with an encoder that must not be called."""

    def refuse(texts: Sequence[str]) -> list[list[int]]:
        raise AssertionError(f"encoded {texts}")

    return dataclasses.replace(PAIR[0], raw_encode_batch=refuse)


def test_cache_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    built = build_maps(*PAIR, cache=folder)
    read = build_maps(unbuildable(), PAIR[1], cache=folder)
    assert rows_of(read) == rows_of(built) == [[0], [2, 1], [], [1, 0]]
    assert read.d2t.tolist() == built.d2t.tolist()
    assert len(list(folder.iterdir())) == 1
    with pytest.raises(AssertionError, match="encoded"):
        build_maps(unbuildable(), PAIR[1])


def test_cache_keeps_pairs_and_directions_and_formats_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PAIR
    for target, drafter in ((first, second), (second, first), (first, first)):
        build_maps(target, drafter, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(vocabulary, "FORMAT", vocabulary.FORMAT + 1)
    build_maps(*PAIR, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(np.array([0, -1, -1, -1], np.int32).tobytes())] ^= 1  # of d2t
    path.write_bytes(data)


def write_one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(4))


def with_arrays(**changed: np.ndarray) -> Callable[[Path], None]:
    """Return a function that replaces arrays of a cache file."""

    def rewrite(path: Path) -> None:
        with np.load(path) as held:
            arrays = dict(held) | changed
        np.savez(path, **arrays)

    return rewrite


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "flipped": flip_a_bit,
    "text": lambda path: path.write_text("no maps"),
    "one array": write_one_array,
    "pickle": with_arrays(d2t=np.array([{}, 1, 2, 3], object)),
    "other key": with_arrays(key=np.array("0" * 64), d2t=np.array([1, -1, -1, -1], np.int32)),
    "too short": with_arrays(d2t=np.array([0], np.int32)),
    "wide ids": with_arrays(d2t=np.array([1, -1, -1, -1], np.int64)),
    "beyond the vocabulary": with_arrays(d2t=np.array([99, -1, -1, -1], np.int32)),
    "backwards": with_arrays(kappa_ptr=np.array([0, 4, 3, 3, 5], np.int32)),
    "loose end": with_arrays(kappa_ptr=np.array([0, 1, 3, 3, 4], np.int32)),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_cache_is_rebuilt(tmp_path: Path, how: str) -> None:
    expected = rows_of(build_maps(*PAIR, cache=tmp_path))
    (path,) = tmp_path.iterdir()
    DAMAGE[how](path)
    again = build_maps(*PAIR, cache=tmp_path)
    assert rows_of(again) == expected
    assert again.d2t.tolist() == [0, -1, -1, -1]
    assert rows_of(build_maps(unbuildable(), PAIR[1], cache=tmp_path)) == expected


def test_unusable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    expected = rows_of(build_maps(*PAIR))
    assert rows_of(build_maps(*PAIR, cache=tmp_path / "file")) == expected
    assert rows_of(build_maps(*PAIR, cache=tmp_path / "file" / "below")) == expected


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert rows_of(build_maps(*PAIR, cache=tmp_path)) == rows_of(build_maps(*PAIR))
    assert list(tmp_path.iterdir()) == []


def test_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given_root, root in (
        (str(tmp_path), tmp_path),
        ("", tmp_path / "home" / ".cache"),
        ("relative", tmp_path / "home" / ".cache"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", given_root)
        assert default_cache() == root / "vllm_hetero_spec" / "maps"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home folder
    assert default_cache() is None
