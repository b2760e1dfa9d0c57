# SPDX-License-Identifier: Apache-2.0
"""Byte tables: the bytes of the ids are the bytes of the text, for every tokenizer family."""

from typing import Any

import pytest
from contexts import Family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import TEXTS, assert_exact, assert_written_as_by_the_decoder, not_text
from tokenizers import Tokenizer, pre_tokenizers

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import UnsupportedTokenizer, alike

FAMILIES = ("byte-level", "byte-level-nfc", "sentencepiece", "unigram", "tiktoken", "processor")
COMPLETE = ("byte-level", "sentencepiece", "tiktoken", "processor")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_trained_tokenizers(family: Family, name: str, text: str) -> None:
    assert_exact(family[name], text)
    assert family[name].spells_all == (name != "unigram")


@pytest.mark.parametrize("name", COMPLETE)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_of_any_text(family: Family, name: str, text: str) -> None:
    assert_exact(family[name], text)


@pytest.mark.parametrize("name", COMPLETE)
@given(data=st.binary(max_size=24) | st.text(max_size=8).map(lambda text: text.encode()[1:-1]))
def test_any_bytes_are_spelled(family: Family, name: str, data: bytes) -> None:
    tokenizer = family[name]
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data.replace(
        "▁".encode(), b" " if name in ("sentencepiece", "processor") else "▁".encode()
    )


def test_bytes_between_valid_text_are_normalised_around(family: Family) -> None:
    tokenizer = family["byte-level-nfc"]
    data = "e\u0301".encode() + b"\xff" + "e\u0301 x".encode()
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == "é".encode() + b"\xff\xc3\xa9 x"
    assert tokenizer.normalize("e\u0301\udcffe\u0301") == "é\udcffé"


def test_unspellable_bytes_are_dropped_and_counted(family: Family) -> None:
    unigram = family["unigram"]
    ids = unigram.encode_bytes(b"in\xff\xfe the")
    assert unigram.decode_bytes(ids) == b"in the"
    assert unigram.lost_bytes("in\udcff\udcfe the", ids) == 2
    stray = "in\ud800 the"  # a surrogate that stands for no byte
    assert unigram.decode_bytes(unigram.encode(stray)) == b"in the"
    assert unigram.lost_bytes(stray, unigram.encode(stray)) == 1


def test_tokens_are_written_as_by_the_decoder(
    family: Family,
    backends: dict[str, Any],
    variants: Family,
    variant_backends: dict[str, Tokenizer],
) -> None:
    for name in ("byte-level", "sentencepiece", "unigram"):
        assert_written_as_by_the_decoder(family[name], backends[name], "x")
    for name, tokenizer in variants.items():
        assert_written_as_by_the_decoder(tokenizer, variant_backends[name], "x")


def test_parts_of_characters_are_encoded_to_themselves(family: Family) -> None:
    for name in ("byte-level", "tiktoken", "processor"):
        tokenizer = family[name]
        broken = not_text(tokenizer)
        assert len(broken) >= 128
        for token_id in broken:
            assert tokenizer.encode_bytes(tokenizer.token_bytes[token_id]) == [token_id]


def test_slow_wrapper_adds_its_own_special_tokens(backends: dict[str, Any]) -> None:
    class Token(str):
        special = True

    class Slow:
        name_or_path = "slow"
        bos_token_id, eos_token_id = None, 300
        tokenizer = backends["tiktoken"]
        added_tokens_decoder = {300: Token("<|end|>")}  # noqa: RUF012

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(self.tokenizer.encode_ordinary(text))

    wrapped, bare = load_tokenizer(Slow()), load_tokenizer(backends["tiktoken"])
    assert wrapped.encode(" the <|end|>") == bare.encode(" the <|end|>")
    assert wrapped.special_text[300] == "<|end|>"
    assert wrapped.eos_id == 300
    assert 299 in wrapped.special_ids
    assert wrapped.fingerprint != bare.fingerprint


def test_added_text_tokens_stay_active_and_keep_their_spaces(
    family: Family, backends: dict[str, Any]
) -> None:
    tokenizer = family["byte-level"]
    think = backends["byte-level"].token_to_id("<think>")
    ids = tokenizer.encode("a<think>   b")
    assert think in ids
    assert tokenizer.decode_bytes(ids) == b"a<think>   b"


def test_loading_does_not_change_the_original(backends: dict[str, Any]) -> None:
    """The loaded tokenizer shares the model with the original, but no other component."""
    backend = Tokenizer.from_str(backends["byte-level"].to_str())
    before = backend.to_str(), backend.encode("a <think>  <|user|>").ids
    load_tokenizer(backend).encode("a <think>  <|user|>")
    assert (backend.to_str(), backend.encode("a <think>  <|user|>").ids) == before


def test_ids_without_an_embedding_row_are_left_out(family: Family) -> None:
    tokenizer = family["tiktoken"]
    (end,) = tokenizer.special_text
    assert tokenizer.limited_to(tokenizer.vocab_size) is tokenizer
    limited = tokenizer.limited_to(end)
    assert limited.vocab_size == end < tokenizer.vocab_size
    assert limited.eos_id is None
    assert not limited.special_id_of
    assert limited.encode("in the <|endoftext|>") == tokenizer.encode("in the <|endoftext|>")
    assert max(limited.special_ids) < end
    assert limited.fingerprint != tokenizer.fingerprint
    assert limited.fingerprint == tokenizer.limited_to(end).fingerprint
    with pytest.raises(UnsupportedTokenizer, match="have no row in the model's embedding"):
        tokenizer.limited_to(200)


def test_a_token_that_one_model_lacks_does_not_make_tokenizers_differ(family: Family) -> None:
    """Models of one family often have different numbers of rows for special tokens."""
    tokenizer = family["tiktoken"]
    (end,) = tokenizer.special_text
    smaller, other = tokenizer.limited_to(end), family["byte-level"]
    for pair in ((tokenizer, smaller), (smaller, tokenizer)):
        first, second = alike(*pair)
        assert first.fingerprint == second.fingerprint
        assert first.vocab_size == second.vocab_size == end
    assert alike(other, smaller) == (other, smaller)


def test_display_strings_fail_the_same_check(family: Family, backends: dict[str, Any]) -> None:
    """Negative oracle: a table of display strings does not spell the text."""
    for name in ("byte-level", "sentencepiece"):
        display = {i: piece.encode() for piece, i in backends[name].get_vocab().items()}
        text = "def f(x):\n    return naïve"
        assert b"".join(display[i] for i in family[name].encode(text)) != text.encode()


def test_fingerprints(backends: dict[str, Any]) -> None:
    original = backends["byte-level"]
    same = Tokenizer.from_str(original.to_str())
    same.enable_truncation(16)
    assert load_tokenizer(same).fingerprint == load_tokenizer(original).fingerprint

    text = original.to_str()
    swapped = Tokenizer.from_str(text)
    swapped.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = Tokenizer.from_str(text)
    added.add_tokens(["extra"])
    for changed in (swapped, added):
        assert load_tokenizer(changed).fingerprint != load_tokenizer(original).fingerprint
    trimmed = Tokenizer.from_str(text)
    trimmed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    assert load_tokenizer(trimmed).fingerprint == load_tokenizer(original).fingerprint
