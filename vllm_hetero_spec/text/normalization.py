# SPDX-License-Identifier: Apache-2.0
"""What a `tokenizers` pipeline makes of text before its model sees it.

The bytes of encode(s) cannot be those of s where a tokenizer lowercases, composes characters or
keeps no white space. They are those of the words it hands to its model, written by the rule of its
decoder: that is computed here without the model, and what may get lost on the way is named.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

from vllm_hetero_spec.text.token_bytes import PieceRule, components

# Text of every kind; a pre-tokenizer that keeps all of it is taken to keep everything.
_SAMPLE = "The  cat's\tnaïve\r\n\n Ω-12,34.6 _x_ 中文 か 한국 (👍🏽) <|a|> ##b \u00a0e\u0301\u200d~"
_SPACES_DROPPED = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}
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


def drops_spaces(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer of this type takes the white space between words away."""
    return part["type"] in _SPACES_DROPPED


def loses_separators(raw: Tokenizer, rule: PieceRule) -> bool:
    """Whether words handed to the model are not all of the text, be it what it begins with."""
    if raw.pre_tokenizer is None:
        return rule.continuing is not None
    for text in (_SAMPLE, "   " + _SAMPLE):
        whole = raw.normalizer.normalize_str(text) if raw.normalizer else text
        words = [word for word, _ in raw.pre_tokenizer.pre_tokenize_str(whole)]
        if b"".join(map(rule.word, words)) != rule.word(whole):
            return True
    return False


def lossy_reason(normalizer: dict[str, Any] | None, raw: Tokenizer, rule: PieceRule) -> str:
    """What the pipeline does to text beyond composing characters, empty where nothing.

    Args:
        normalizer: The section of the tokenizer's JSON, without a leading space of its own.
        raw: The pipeline at work.
        rule: How its decoder writes words.
    """
    losses = [loss for part in components(normalizer) for loss in _losses(part, rule)]
    if loses_separators(raw, rule):
        losses.append("keeps at most a space of what separates words")
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
        if "String" not in old or not rule.keeps(old["String"], new):
            yield f"replaces {next(iter(old.values()))!r} by {new!r}"
    elif kind == "Prepend":
        yield f"prepends {part['prepend']!r}"
    elif kind not in _HARMLESS:
        yield _LOSSES.get(kind, f"applies {kind}")


def stretch_normalizer(raw: Tokenizer, rule: PieceRule) -> Callable[[str], str]:
    """Normalisation of text without added tokens: what the words handed to the model spell."""
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
    stretch: Callable[[str], str], splitter: Tokenizer | None, written: dict[str, str]
) -> Callable[[str], str]:
    """Normalisation of any text: added tokens that are found before normalising stay whole.

    Args:
        stretch: Normalisation between them.
        splitter: Gives one token for each of them and for each stretch between, None where there
            are none.
        written: What each of them stands for.
    """
    if splitter is None:
        return stretch

    def normalize(text: str) -> str:
        encoding = splitter.encode(text, add_special_tokens=False)
        parts = zip(encoding.tokens, encoding.offsets, strict=True)
        return "".join(
            [written.get(token) or stretch(text[begin:end]) for token, (begin, end) in parts]
        )

    return normalize
