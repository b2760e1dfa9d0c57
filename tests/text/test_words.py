# SPDX-License-Identifier: Apache-2.0
"""Encoding word by word: it is used only for texts for which it equals `tokenizers`."""

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unicodedata import combining, decomposition, is_normalized

import pytest
from recipes import altered, corpus, split_by, train_byte_level
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vllm_hetero_spec.text import fast_adapter, words
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.raw_copy import Pipeline, RawCopy

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GAPS = (r"\p{Lu}\p{Ll}+", r"[0-9]{2}")  # most of a text lies between their matches
READ_OTHERWISE = (
    r"\s++$", r"^a", r"(a)b", r"\p{N}{1,3}+", r"[a&&[b]]", r"[[:alpha:]]", r"\p{Han}+", r"\h+",
    r"a\z", r"(?<n>a)", r"a{,3}", r"[\p{^L}]", r"\P{L}", r"a*", r"\p{L", "[", "a|",
)  # fmt: skip
SCRIPTS = [[chr(code) for code in range(first, last + 1)] for first, last in words.PLAIN]
PLAIN = [char for script in SCRIPTS for char in script]
USUAL = "abcABC019 '\n\t._-sSdDlLtTmMrReEvV  \r{}()<|>éßñДж½ª\xa0\x85\x1cſ’—"
ADDED = ["<think>", " " * 17, "<|user|>", "</s>", "<unk>", "<0x0A>"]


def train_across_spaces() -> Tokenizer:
    """SentencePiece's alphabet without words: tokens may have spaces inside."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    learner.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    lines = [line for text in corpus()[:8] for line in text.splitlines() if line.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    learner.train_from_iterator(lines, trainer)
    spec: dict[str, Any] = json.loads(learner.to_str())
    vocabulary = spec["model"]["vocab"]
    for piece in [f"<0x{byte:02X}>" for byte in range(256)]:
        vocabulary[piece] = len(vocabulary)
    spec["model"]["byte_fallback"] = True
    spec["decoder"] = json.loads(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        ).__getstate__()
    )
    return Tokenizer.from_str(json.dumps(spec))


def raw_of(tokenizer: Tokenizer, patch: pytest.MonkeyPatch) -> tuple[RawCopy, Pipeline, Any]:
    """Return the arguments of `words.encoder` for a tokenizer."""
    given: list[Any] = []

    def spy(*arguments: Any) -> words.Encode:
        given.extend(arguments)
        return words.encoder(*arguments)

    with patch.context() as patched:
        patched.setattr(fast_adapter, "encoder", spy)
        load_tokenizer(tokenizer, "any")
    return given[0], given[1], given[2]


class Counted:
    """An encoder of words, and the number of texts that `tokenizers` encoded instead."""

    def __init__(self, raw: RawCopy, pipeline: Pipeline, table: Sequence[bytes]) -> None:
        self.left = 0
        self.raw = raw.tokenizer
        counting: Any = SimpleNamespace(encode=self._encode)
        self.encode = words.encoder(dataclasses.replace(raw, tokenizer=counting), pipeline, table)
        self.left = 0

    def _encode(self, text: str, **options: bool) -> Any:
        self.left += 1
        return self.raw.encode(text, **options)

    def right(self, text: str) -> bool:
        ids: list[int] = self.raw.encode(text, add_special_tokens=False).ids
        return self.encode(text) == ids


def some_text(rng: random.Random, sources: str) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        chars = rng.choices(PLAIN, k=10) + rng.choices(PLAIN[:0x250], k=10)
        return "".join(rng.choices(chars, k=rng.randrange(40)))
    if kind == 1:
        return "".join(rng.choices(USUAL, k=rng.randrange(60)))
    if kind == 4:
        several = sum(rng.choices(SCRIPTS, k=3), list(USUAL))
        return "".join(rng.choices(several, k=rng.randrange(60)))
    start = rng.randrange(len(sources) - 200)
    text = sources[start : start + rng.randrange(200)]
    at = rng.randint(0, len(text))
    return text if kind == 2 else text[:at] + rng.choice(ADDED) + text[at:]


def assert_as_in_tokenizers(counted: Counted, texts: int = 1500) -> None:
    rng, sources = random.Random(0), "\n".join(text for text in corpus() if text.isascii())
    for _ in range(texts):
        text = some_text(rng, sources)
        assert counted.right(text), repr(text)
    composed = (" e\u0301", "\u212b", "か\u3099", "न\u093c", "하\u11a8", "ا\u0653")
    for text in ("", "naïve 中文 café", *composed, "x" * 2 * words.LONGEST_TEXT):
        assert counted.right(text)


PATTERNS = {"llama 3": (LLAMA_3,), "gpt-4o": (GPT_4O,), "deepseek 3": DEEPSEEK_3, "gaps": GAPS}
FAMILIES = ("byte-level", "byte-level-nfc", "sentencepiece")


@pytest.fixture(scope="module")
def layouts(backends: dict[str, Any]) -> dict[str, Tokenizer]:
    """Tokenizers that can be encoded word by word."""
    byte_level, sentencepiece = backends["byte-level"], backends["sentencepiece"]

    def digits(*, individual: bool) -> Tokenizer:
        own = pre_tokenizers.ByteLevel(add_prefix_space=False)
        both = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual), own])
        return altered(byte_level, pre_tokenizer=both)

    return {
        **{name: backends[name] for name in FAMILIES},
        **{
            name: altered(byte_level, pre_tokenizer=split_by(*patterns))
            for name, patterns in PATTERNS.items()
        },
        # Two pre-tokenizers that split, one after the other.
        "starcoder": digits(individual=True),
        "runs of digits": digits(individual=False),
        # Spaces are replaced before the text is split at spaces.
        "gemma": altered(
            sentencepiece,
            normalizer=normalizers.Replace(" ", "▁"),
            pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        ),
    }


@pytest.mark.parametrize("name", [*FAMILIES, *PATTERNS, "starcoder", "runs of digits", "gemma"])
def test_words_of_all_kinds(
    name: str, layouts: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(*raw_of(layouts[name], monkeypatch))
    assert counted.right("def words(text):\n    return text.split() if text else []")
    assert counted.right("x1 = 12 + 345")
    assert counted.right(
        "Größe, “naïve” — и слово… Ελλάδα، שלום, مرحبا हिन्दी\u3000中文（，ひカ）한글"
    )
    assert not counted.left
    assert_as_in_tokenizers(counted)


@pytest.mark.parametrize("pattern", [words._BYTE_LEVEL, LLAMA_3, GPT_4O, *DEEPSEEK_3, *GAPS])
def test_plain_characters_are_cut_as_in_tokenizers(pattern: str) -> None:
    cut, split = words.cut_by(pattern), pre_tokenizers.Split(Regex(pattern), "isolated")
    assert cut is not None
    for char in PLAIN:
        text = f"a{char}1 {char}.{char}A"
        assert cut(text) == [part for part, _ in split.pre_tokenize_str(text)], hex(ord(char))


def test_composition_leaves_plain_characters_alone() -> None:
    """This holds in any order: none is decomposed, reordered or joined to the one before it."""
    seconds = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # Hangul
    for code in range(sys.maxunicode + 1):
        spelled = decomposition(chr(code))
        if spelled and not spelled.startswith("<"):
            seconds |= {chr(int(part, 16)) for part in spelled.split()[1:]}
    assert all(is_normalized("NFC", char) and char not in seconds for char in PLAIN)
    # The only marks are viramas (9). Marks of the same class are not reordered.
    assert {combining(char) for char in PLAIN} == {0, 9}


def test_remaining_spaces_prevent_cuts(
    backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
        ]
    )
    apart = altered(backends["sentencepiece"], normalizer=None, pre_tokenizer=both)
    raw, pipeline, table = raw_of(apart, monkeypatch)
    assert words.cut_of(raw.model, pipeline, table) is None


def test_tokens_with_spaces_inside_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """If texts were cut before all spaces, the ids would differ."""
    raw, pipeline, table = raw_of(train_across_spaces(), monkeypatch)
    assert any(b" " in data.strip(b" ") for data in table)
    assert_as_in_tokenizers(Counted(raw, pipeline, table))
    blind = words.cut_before_spaces([b"a"])
    monkeypatch.setattr(words, "cut_before_spaces", lambda table: blind)
    # The comparison at start-up detects the difference.
    assert words.encoder(raw, pipeline, table).__name__ == "encode"
    monkeypatch.setattr(words, "CALIBRATION_TEXT", "")
    with pytest.raises(AssertionError):
        assert_as_in_tokenizers(Counted(raw, pipeline, table))


@pytest.mark.parametrize("pattern", READ_OTHERWISE)
def test_unsupported_patterns(pattern: str) -> None:
    assert words.cut_by(pattern) is None


@pytest.mark.parametrize(
    "name", ["unigram", "wordpiece", "byte-level-lowercase", "byte-level-words", "characters"]
)
def test_others_are_left_to_tokenizers(
    name: str,
    backends: dict[str, Any],
    variant_backends: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw, pipeline, table = raw_of((backends | variant_backends)[name], monkeypatch)
    assert words.cut_of(raw.model, pipeline, table) is None


def test_the_cache_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of a prompt are not cached."""
    monkeypatch.setattr(words, "MEMO_WORDS", 4)
    raw, pipeline, table = raw_of(train_byte_level(700), monkeypatch)
    counted = Counted(raw, pipeline, table)
    assert all(counted.right(f" {a}b{c}") for a in "xyz" for c in "xyz" for _ in range(2))
    assert not counted.left
    assert counted.right("word " * words.LONGEST_TEXT)
    assert counted.left == 1


def test_repeated_words_are_cached(
    backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, pipeline, table = raw_of(backends["byte-level"], monkeypatch)
    spell, spelled = words._speller(raw.model, pipeline), list[str]()

    def noted(word: str) -> Sequence[int]:
        spelled.append(word)
        return spell(word)

    monkeypatch.setattr(words, "CALIBRATION_TEXT", "")
    monkeypatch.setattr(words, "_speller", lambda *_: noted)
    counted = Counted(raw, pipeline, table)
    assert all(counted.right(text) for text in ("one two", "one two", " two one two"))
    assert spelled == ["one", " two", " one"]
    spelled.clear()
    long = "x" * (words.LONGEST_WORD + 1)
    assert counted.right(long)
    assert counted.right(long)
    assert spelled == [long, long]  # not cached: it would rarely occur again


def test_words_of_real_tokenizers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in sorted(shared.glob("tokenizers/*/tokenizer.json")):
        counted = Counted(*raw_of(Tokenizer.from_file(str(file)), monkeypatch))
        assert counted.right("import os")
        assert not counted.left, file.parent.name
        assert_as_in_tokenizers(counted, 600)
