# SPDX-License-Identifier: Apache-2.0
"""The bytes of the ids are the bytes of the text, for every tokenizer family."""

import importlib.resources
import importlib.util
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer

TEXTS = [
    "def f(x):\n    return  x+1\t# comment\r\n\r\n\tend",
    "中文字符，没有空格。한국어 테스트 русский",
    "emoji 👩‍👩‍👧‍👦 👍🏽 🇫🇷 and cafe\u0301 nai\u0308ve A\u030a \u1e9b\u0323",
    "runs:" + " " * 17 + "x" + " " * 40 + "\n\n\n\n   \n\t\t\t y",
    "control \x01\x07\x1b[0m\x7f\0 end",
    "<|endoftext|> </s><s> <unk> <|im_start|>user [INST] <0x0A> <think> x",
    "don't 12345 3.14159e-10 snake_case __init__ https://a.b/c?d=e&f",
    " leading and trailing ",
    "\u00a0no-break\u3000wide\u2028line\u200bzero ﬁ Ⅷ ẞ",
    "##a @@b ▁x [UNK] [SEP] <0xE4> \u0338 x",
    "",
]
FAMILIES = ("byte-level", "byte-level-nfc", "sentencepiece", "unigram", "tiktoken", "processor")
COMPLETE = ("byte-level", "sentencepiece", "tiktoken", "processor")


def mistral_files() -> list[Path]:
    """All tokenizer files that mistral_common ships, none where it is not installed."""
    if importlib.util.find_spec("mistral_common") is None:
        return []
    data = Path(str(importlib.resources.files("mistral_common"))) / "data"
    return sorted([*data.glob("tekken*.json"), *data.glob("*.model.v*")])


def expected(text: str, tokenizer: TextTokenizer) -> str:
    """What a tokenizer's documented normalisation leaves of ``text``, worked out here."""
    if any(mark in tokenizer.name for mark in ("nfc", "qwen")):
        return unicodedata.normalize("NFC", text)
    marks = ("sentencepiece", "unigram", "processor", "llama-2", "mistral", "phi-3", "model")
    if any(mark in tokenizer.name for mark in (*marks, "codellama", "tinyllamas")):
        return text.replace("▁", " ")
    return text


def encoded(tokenizer: TextTokenizer, text: str) -> tuple[bytes, int]:
    """Bytes of the ids of a text, none of them special, and how many were counted as lost."""
    before = tokenizer.dropped_bytes
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(set(ids) - {tokenizer.unknown_id})
    return tokenizer.decode_bytes(ids), tokenizer.dropped_bytes - before


def assert_exact(tokenizer: TextTokenizer, text: str) -> None:
    spelled, dropped = encoded(tokenizer, text)
    assert tokenizer.normalize(text) == expected(text, tokenizer)
    whole = expected(text, tokenizer).encode("utf-8", "surrogateescape")
    assert len(spelled) + dropped == len(whole)
    if dropped:
        assert not tokenizer.spells_all
        rest = iter(whole)
        assert all(byte in rest for byte in spelled)
    else:
        assert spelled == whole


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_trained_tokenizers(
    family: dict[str, TextTokenizer], name: str, text: str
) -> None:
    assert_exact(family[name], text)
    assert family[name].spells_all == (name != "unigram")


@pytest.mark.parametrize("name", COMPLETE)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_of_any_text(family: dict[str, TextTokenizer], name: str, text: str) -> None:
    assert_exact(family[name], text)


@pytest.mark.parametrize("name", COMPLETE)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=24) | st.text(max_size=8).map(lambda text: text.encode()[1:-1]))
def test_any_bytes_are_spelled(family: dict[str, TextTokenizer], name: str, data: bytes) -> None:
    tokenizer = family[name]
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data.replace(
        "▁".encode(), b" " if name in ("sentencepiece", "processor") else "▁".encode()
    )


def test_bytes_between_valid_text_are_normalised_around(family: dict[str, TextTokenizer]) -> None:
    tokenizer = family["byte-level-nfc"]
    data = "e\u0301".encode() + b"\xff" + "e\u0301 x".encode()
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == "é".encode() + b"\xff\xc3\xa9 x"
    assert tokenizer.normalize("e\u0301\udcffe\u0301") == "é\udcffé"


def test_unspellable_bytes_are_dropped_and_counted(family: dict[str, TextTokenizer]) -> None:
    unigram = family["unigram"]
    before = unigram.dropped_bytes
    assert unigram.decode_bytes(unigram.encode_bytes(b"in\xff\xfe the")) == b"in the"
    assert unigram.dropped_bytes == before + 2
    assert unigram.decode_bytes(unigram.encode("in\ud800 the")) == b"in the"  # no byte's surrogate
    assert unigram.dropped_bytes == before + 3


def real_names(shared: Path) -> list[str]:
    return sorted(path.parent.name for path in shared.glob("tokenizers/*/tokenizer.json"))


def test_bytes_of_real_tokenizers(real: dict[str, TextTokenizer], shared: Path) -> None:
    for tokenizer in map(real.__getitem__, real_names(shared)):
        before = tokenizer.dropped_bytes
        for text in TEXTS:
            assert_exact(tokenizer, text)
        assert tokenizer.lossless
        assert tokenizer.dropped_bytes == before


def test_bytes_of_sentencepiece_files(shared: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    files = sorted(shared.glob("tokenizers/*/tokenizer.model"))
    for file in files:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        tokenizer = load_tokenizer(processor, f"{file.parent.name}.model")
        for text in TEXTS:
            assert_exact(tokenizer, text)
    assert len(files) >= 2


@pytest.mark.parametrize("file", mistral_files(), ids=lambda file: file.name)
def test_bytes_of_mistral_files(file: Path) -> None:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    original = mistral.MistralTokenizer.from_file(str(file))
    tokenizer = load_tokenizer(original, file.name)
    for text in TEXTS:
        assert_exact(tokenizer, text)
    core = original.instruct_tokenizer.tokenizer
    text = "Hello, wide world: 中文\n"
    own = core.encode(text, bos=True, eos=False)
    assert own == [tokenizer.bos_id, *tokenizer.encode(" " * tokenizer.dummy_prefix + text)]
    assert tokenizer.adds_bos
    assert tokenizer.lossless
    assert [i for i, data in enumerate(tokenizer.token_bytes) if data] == [
        i for i in range(core.n_words) if i not in tokenizer.special_text
    ]


def test_raw_ids_are_the_tokenizers_own(real: dict[str, TextTokenizer], shared: Path) -> None:
    """Apart from the dummy prefix, raw encoding is what the library itself returns."""
    for name in real_names(shared)[::3]:
        tokenizer = real[name]
        backend = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
        for text in ("The quick brown fox 中文 👍", "x = [1, 2]\n\n    y\t= x"):
            prefix = " " if tokenizer.dummy_prefix else ""
            own = backend.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(prefix + text) == own
            assert tokenizer.encode_batch([prefix + text] * 900) == [own] * 900


# Ids that are no text: first and one past the last of each run.
SPECIAL_IDS = {
    "codellama": [(0, 3), (32007, 32011)],
    "deepseek-r1-distill-qwen": [(151643, 151644), (151646, 151647), (151650, 151657)],
    "gpt2": [(50256, 50257)],
    "llama-2": [(0, 3)],
    "llama-3.1": [(128000, 128256)],
    "mistral-v3-32768": [(0, 771)],
    "phi-3-medium-128k-instruct": [(0, 2), (32000, 32011)],
    "phi-4": [(100256, 100352)],
    "qwen2": [(151643, 151646)],
    "qwen2.5": [(151643, 151657)],
    "starcoder": [(0, 19)],
    "starcoder2": [(0, 38)],
    "tinyllamas-512": [(0, 3)],
}


@pytest.mark.parametrize("name", SPECIAL_IDS)
def test_every_id_is_text_or_special(
    real: dict[str, TextTokenizer], shared: Path, name: str
) -> None:
    tokenizer = real[name]
    runs = [range(*run) for run in SPECIAL_IDS[name]]
    assert tokenizer.special_ids == {i for run in runs for i in run} == set(tokenizer.special_text)
    assert [i for i, data in enumerate(tokenizer.token_bytes) if not data] == sorted(
        tokenizer.special_ids
    )
    spec = json.loads((shared / "tokenizers" / name / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        if token["special"]:
            assert tokenizer.special_text[token["id"]] == token["content"]
        else:
            assert tokenizer.token_bytes[token["id"]] == token["content"].encode()
            assert tokenizer.encode(token["content"]) == [token["id"]]


def assert_written_as_by_the_decoder(
    tokenizer: TextTokenizer, backend: Tokenizer, anchor: str, step: int = 1
) -> None:
    """Each token after another one, as the library itself decodes the two."""
    first = backend.token_to_id(anchor)
    ids = [i for i, data in enumerate(tokenizer.token_bytes) if data][::step]
    alone = backend.decode([first], skip_special_tokens=False)
    decoded = backend.decode_batch([[first, i] for i in ids], skip_special_tokens=False)
    for token_id, text in zip(ids, decoded, strict=True):
        written = alone.encode() + tokenizer.token_bytes[token_id]
        assert written.decode("utf-8", "replace") == text, token_id


def test_tokens_are_written_as_by_the_decoder(
    family: dict[str, TextTokenizer],
    backends: dict[str, Any],
    variants: dict[str, TextTokenizer],
    variant_backends: dict[str, Tokenizer],
) -> None:
    for name in ("byte-level", "sentencepiece", "unigram"):
        assert_written_as_by_the_decoder(family[name], backends[name], "x")
    for name, tokenizer in variants.items():
        assert_written_as_by_the_decoder(tokenizer, variant_backends[name], "x")


@pytest.mark.parametrize("name", ["qwen2.5", "phi-3-medium-128k-instruct", "mistral-v3-32768"])
def test_real_tokens_are_written_as_by_the_decoder(
    real: dict[str, TextTokenizer], shared: Path, name: str
) -> None:
    backend = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    assert_written_as_by_the_decoder(real[name], backend, "x", step=7)


def not_text(tokenizer: TextTokenizer) -> list[int]:
    """Ids whose bytes alone are no valid UTF-8."""
    return [
        i
        for i, data in enumerate(tokenizer.token_bytes)
        if data.decode("utf-8", "ignore").encode() != data
    ]


def test_parts_of_characters_are_the_tokens_they_are(family: dict[str, TextTokenizer]) -> None:
    for name in ("byte-level", "tiktoken", "processor"):
        tokenizer = family[name]
        broken = not_text(tokenizer)
        assert len(broken) >= 128
        for token_id in broken:
            assert tokenizer.encode_bytes(tokenizer.token_bytes[token_id]) == [token_id]


@pytest.mark.parametrize("name", ["qwen2", "llama-3.1", "gpt2", "phi-4", "starcoder2"])
def test_parts_of_characters_in_real_vocabularies(
    real: dict[str, TextTokenizer], name: str
) -> None:
    """All but one or two tokens in a thousand, which begin or end in punctuation."""
    tokenizer = real[name]
    broken = not_text(tokenizer)
    other = 0
    for token_id in broken:
        ids = tokenizer.encode_bytes(tokenizer.token_bytes[token_id])
        assert tokenizer.decode_bytes(ids) == tokenizer.token_bytes[token_id]
        other += ids != [token_id]
    assert len(broken) > 300
    assert other <= 2


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


def test_loading_leaves_the_original_as_it_was(backends: dict[str, Any]) -> None:
    """The model is shared with it, the rest is not."""
    backend = Tokenizer.from_str(backends["byte-level"].to_str())
    before = backend.to_str(), backend.encode("a <think>  <|user|>").ids
    load_tokenizer(backend).encode("a <think>  <|user|>")
    assert (backend.to_str(), backend.encode("a <think>  <|user|>").ids) == before


def test_ids_without_an_embedding_row_are_left_out(family: dict[str, TextTokenizer]) -> None:
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
    trimmed = Tokenizer.from_str(text)
    trimmed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    assert load_tokenizer(trimmed).fingerprint == load_tokenizer(original).fingerprint
