# SPDX-License-Identifier: Apache-2.0
"""The bytes of the ids are the bytes of the text, for every tokenizer family."""

import importlib.resources
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer

TEXTS = [
    "def f(x):\n    return  x+1\t# comment\r\n\r\n\tend",
    "中文字符，没有空格。한국어 테스트 русский",
    "emoji 👩‍👩‍👧‍👦 👍🏽 🇫🇷 and cafe\u0301 nai\u0308ve A\u030a \u1e9b\u0323",
    "runs:" + " " * 17 + "x" + " " * 40 + "\n\n\n\n   \n\t\t\t y",
    "control \x01\x07\x1b[0m\x7f end",
    "<|endoftext|> </s><s> <unk> <|im_start|>user [INST] <0x0A> <think> x",
    "don't 12345 3.14159e-10 snake_case __init__ https://a.b/c?d=e&f",
    " leading and trailing ",
    "\u00a0no-break\u3000wide\u2028line\u200bzero",
]
FAMILIES = ("byte-level", "byte-level-nfc", "sentencepiece", "unigram", "tiktoken", "processor")


def expected(text: str, tokenizer: TextTokenizer) -> bytes:
    """What the tokenizer's own normalisation leaves of ``text``."""
    if "nfc" in tokenizer.name or "qwen" in tokenizer.name:
        text = unicodedata.normalize("NFC", text)
    return text.encode()


def assert_exact(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == expected(text, tokenizer)
    assert tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_trained_tokenizers(
    family: dict[str, TextTokenizer], name: str, text: str
) -> None:
    if name == "unigram":  # no byte fallback: keep to characters it has
        known = set("".join(data.decode() for data in family[name].token_bytes))
        text = "".join(char for char in text if char in known)
    assert_exact(family[name], text)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "tiktoken", "processor"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\0")))
def test_bytes_of_any_text(family: dict[str, TextTokenizer], name: str, text: str) -> None:
    assert_exact(family[name], text)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "tiktoken", "processor"])
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_are_spelled(family: dict[str, TextTokenizer], name: str, data: bytes) -> None:
    data = data.replace(b"\0", b"")
    tokenizer = family[name]
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


def test_unspellable_bytes_are_dropped_and_counted(family: dict[str, TextTokenizer]) -> None:
    unigram = family["unigram"]
    before = unigram.dropped_bytes
    assert unigram.decode_bytes(unigram.encode_bytes(b"in\xff\xfe the")) == b"in the"
    assert unigram.dropped_bytes == before + 2


def real_names(shared: Path) -> list[str]:
    return sorted(path.parent.name for path in shared.glob("tokenizers/*/tokenizer.json"))


def test_bytes_of_real_tokenizers(real: dict[str, TextTokenizer], shared: Path) -> None:
    for tokenizer in map(real.__getitem__, real_names(shared)):
        for text in TEXTS:
            missing = {chr(byte) for byte in range(128) if tokenizer.byte_ids[byte] < 0}
            assert_exact(tokenizer, "".join(char for char in text if char not in missing))


def test_raw_ids_are_the_tokenizers_own(real: dict[str, TextTokenizer], shared: Path) -> None:
    """Apart from the dummy prefix, raw encoding is what the library itself returns."""
    for name in real_names(shared)[::3]:
        tokenizer = real[name]
        backend = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
        for text in ("The quick brown fox 中文 👍", "x = [1, 2]\n\n    y\t= x"):
            prefix = " " if tokenizer.dummy_prefix else ""
            own = backend.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(prefix + text) == own


def test_transformers_wrappers(shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("tinyllamas-512", "phi-3-medium-128k-instruct", "starcoder"):
        wrapper = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
        tokenizer = load_tokenizer(wrapper)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (wrapper.bos_token_id, wrapper.eos_token_id)
        own = wrapper.encode("Hello world\n", add_special_tokens=True)
        bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
        space = " " if tokenizer.dummy_prefix else ""
        assert own == [*bos, *tokenizer.encode(space + "Hello world\n")]
        assert tokenizer.special_ids >= set(wrapper.all_special_ids)


def _tekken() -> object:
    base = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    data = importlib.resources.files("mistral_common") / "data" / "tekken_240911.json"
    if not data.is_file():
        pytest.skip("this mistral_common ships no tekken file")
    return base.Tekkenizer.from_file(str(data))


def _mistral_sentencepiece() -> object:
    base = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    return base.MistralTokenizer.v3(is_tekken=False)


@pytest.mark.parametrize("build", [_tekken, _mistral_sentencepiece])
def test_mistral_common(build: Callable[[], Any]) -> None:
    original = build()
    tokenizer = load_tokenizer(original, "mistral")
    for text in TEXTS:
        assert_exact(tokenizer, text)
    core = getattr(original, "instruct_tokenizer", original)
    core = getattr(core, "tokenizer", core)
    own = core.encode("Hello, wide world", bos=True, eos=False)
    space = " " if tokenizer.dummy_prefix else ""
    assert tokenizer.adds_bos
    assert own == [tokenizer.bos_id, *tokenizer.encode(space + "Hello, wide world")]


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
    family: dict[str, TextTokenizer], backends: dict[str, Any]
) -> None:
    tokenizer = family["byte-level"]
    think = backends["byte-level"].token_to_id("<think>")
    ids = tokenizer.encode("a<think>   b")
    assert think in ids
    assert tokenizer.decode_bytes(ids) == b"a<think>   b"


def test_lossy_decoders_are_refused() -> None:
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        load_tokenizer(wordpiece)


def test_lossy_normalisers_are_refused(backends: dict[str, Any]) -> None:
    lowercase = Tokenizer.from_str(backends["byte-level"].to_str())
    lowercase.normalizer = normalizers.Lowercase()
    with pytest.raises(UnsupportedTokenizer, match="rewrites"):
        load_tokenizer(lowercase)


def test_unknown_objects_are_refused() -> None:
    with pytest.raises(UnsupportedTokenizer, match="dict"):
        load_tokenizer({})


def test_display_strings_fail_the_same_check(
    family: dict[str, TextTokenizer], backends: dict[str, Any]
) -> None:
    """Negative oracle: a table of display strings does not spell the text."""
    for name in ("byte-level", "sentencepiece"):
        display = {i: piece.encode() for piece, i in backends[name].get_vocab().items()}
        text = "def f(x):\n    return naïve"
        assert b"".join(display[i] for i in family[name].encode(text)) != text.encode()


def test_the_bridge_needs_no_model_library() -> None:
    code = (
        "import sys\n"
        "from vllm_hetero_spec.text import adapters, bridge, fast_adapter\n"
        "assert not {'torch', 'vllm', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fingerprints_tell_behaviour_apart(backends: dict[str, Any]) -> None:
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
