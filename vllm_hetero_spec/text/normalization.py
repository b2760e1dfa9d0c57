# SPDX-License-Identifier: Apache-2.0
"""Normalization of text by a `tokenizers` pipeline, before the model encodes it.

If a tokenizer lowercases, composes characters or removes white space, the bytes of `encode(text)`
differ from those of the text. They are the bytes of the words that the model receives, written by
the rule of the decoder. This module computes them without the model, and describes possible losses.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

from vllm_hetero_spec.text.token_bytes import PieceRule, components

# Text of many kinds. A pre-tokenizer that keeps all of it is assumed to keep any text.
_SAMPLE = "The  cat's\tnaïve\r\n\n Ω-12,34.6 _x_ 中文 か 한국 (👍🏽) <|a|> ##b \u00a0e\u0301\u200d~"
_LOSSES = {
    "NFKC": "applies NFKC",
    "NFKD": "applies NFKD",
    "Lowercase": "lowercases",
    "StripAccents": "strips accents",
    "Strip": "strips white space at the ends of a text",
    "Nmt": "removes control characters",
    "Precompiled": "applies a SentencePiece character map",
}
_HARMLESS = {"NFC", "NFD", "ByteLevel"}


def loses_separators(raw: Tokenizer, rule: PieceRule) -> bool:
    """Return True if the pipeline removes text between words or at the beginning."""
    if raw.pre_tokenizer is None:
        return rule.continuing is not None
    for text in (_SAMPLE, "   " + _SAMPLE):
        whole = raw.normalizer.normalize_str(text) if raw.normalizer else text
        words = [word for word, _ in raw.pre_tokenizer.pre_tokenize_str(whole)]
        if b"".join(map(rule.word, words)) != rule.word(whole):
            return True
    return False


def lossy_reason(normalizer: dict[str, Any] | None, raw: Tokenizer, rule: PieceRule) -> str:
    """Return a description of how the pipeline changes text, or "" if it does not.

    Canonical composition of characters is not mentioned. `normalizer` is a section of the
    tokenizer's JSON, without the part that adds a leading space.
    """
    losses = [loss for part in components(normalizer) for loss in _losses(part, rule)]
    if loses_separators(raw, rule):
        losses.append("keeps at most one space between words")
    return ", ".join(dict.fromkeys(losses))


def _losses(part: dict[str, Any], rule: PieceRule) -> Iterable[str]:
    kind = part["type"]
    if kind == "BertNormalizer":
        if part["clean_text"]:
            yield "removes control characters"
        if part["lowercase"]:
            yield "lowercases"
        if part["strip_accents"] or (part["strip_accents"] is None and part["lowercase"]):
            yield "strips accents"
        if part["handle_chinese_chars"]:
            yield "puts spaces around Chinese characters"
    elif kind == "Replace":
        old, new = part["pattern"], part["content"]
        if "String" not in old or rule.word(new) != old["String"].encode():
            yield f"replaces {next(iter(old.values()))!r} by {new!r}"
    elif kind == "Prepend":
        yield f"prepends {part['prepend']!r}"
    elif kind not in _HARMLESS:
        yield _LOSSES.get(kind, f"applies {kind}")


def stretch_normalizer(raw: Tokenizer, rule: PieceRule) -> Callable[[str], str]:
    """Return the normalization of text without added tokens: the text of the model's words."""
    normalizer, pre_tokenizer = raw.normalizer, raw.pre_tokenizer

    def normalize(text: str) -> str:
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = [text]
        if pre_tokenizer is not None:
            words = [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
        return b"".join(map(rule.word, words)).decode("utf-8", "surrogateescape")

    return normalize


def text_normalizer(
    stretch: Callable[[str], str], splitter: Tokenizer, written: dict[str, str]
) -> Callable[[str], str]:
    """Return the normalization of any text. Added tokens found before normalization stay whole.

    Args:
        stretch: Normalization of the text between these tokens.
        splitter: Tokenizer that gives one token for each of them and for each stretch between.
        written: Text of each of them, by content.
    """

    def normalize(text: str) -> str:
        encoding = splitter.encode(text, add_special_tokens=False)
        parts = zip(encoding.tokens, encoding.offsets, strict=True)
        return "".join(
            [written.get(token) or stretch(text[begin:end]) for token, (begin, end) in parts]
        )

    return normalize
