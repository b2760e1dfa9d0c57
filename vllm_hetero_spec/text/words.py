# SPDX-License-Identifier: Apache-2.0
"""A fast encoder of short plain texts, with a cache of the ids of words.

A tokenizer cuts a text into words and encodes each word separately. `tokenizers` spends most of its
time on cutting, although the tails and drafts of decode steps repeat few words. This module cuts
by the tokenizer's own patterns, if Python's `re` and Oniguruma agree on them for plain characters.
Without patterns it cuts before a space if no token contains the two characters side by side.
`tokenizers` encodes all other texts.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import groupby
from typing import Any
from unicodedata import category

from vllm_hetero_spec.text.fast_model import FastModel
from vllm_hetero_spec.text.raw_copy import Pipeline, RawCopy
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.token_bytes import components

Encode = Callable[[str], list[int]]
Cut = Callable[[str], list[str]]

MEMO_WORDS = 1 << 15  # words in the cache
LONGEST_WORD = 32  # characters; a text without spaces is one word, too long to cache
LONGEST_TEXT = 1024  # characters; a longer text is a prompt, which is encoded once

# Ranges of characters of many scripts. Composition does not change them.
PLAIN = (
    (0x0, 0x24F),  # Latin
    (0x386, 0x386), (0x388, 0x38A), (0x38C, 0x38C), (0x38E, 0x3A1), (0x3A3, 0x3CE),  # Greek
    (0x400, 0x481), (0x48A, 0x4FF),  # Cyrillic
    (0x5D0, 0x5EA),  # Hebrew, and Arabic, without marks
    (0x60C, 0x60C), (0x61B, 0x61B), (0x61F, 0x61F), (0x621, 0x64A), (0x660, 0x66D),
    (0x901, 0x939), (0x93D, 0x94D), (0x964, 0x96F),  # Devanagari
    (0x2010, 0x2027),  # dashes, quotes
    (0x3000, 0x3029), (0x3041, 0x3096), (0x309B, 0x30FF), (0x4E00, 0x9FA5),  # Japanese, Chinese
    (0xAC00, 0xD7A3),  # Korean
    (0xFF01, 0xFF5E),  # wide letters and signs
)  # fmt: skip
_NOT_PLAIN = re.compile("[^" + "".join([f"{chr(a)}-{chr(z)}" for a, z in PLAIN]) + "]")
_NEVER = "\U0010ffff"  # a noncharacter, in no text
_WHITE = frozenset("\t\n\v\f\r \x85\xa0\u3000")

# The pattern of the pre-tokenizer `ByteLevel`.
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACE = {"String": " "}

_NAMED = r"\\p\{([LMNPSZ][a-z]?)\}|\\([sSd])"
_ESCAPE = r"\\[^a-zA-Z0-9]|\\[rnt]"
_CLASS = rf"\[\^?(?:{_NAMED}|{_ESCAPE}|[^\[\]\\&]|&(?!&))+\]"
# Patterns with the same meaning in Oniguruma and `re`. Line ends, capturing groups and possessive
# {n} repetitions differ. Other syntax is excluded because it is not needed.
_ALIKE = re.compile(
    rf"(?:{_CLASS}|{_NAMED}|{_ESCAPE}|\(\?(?:i:|[:!=])|[)|.*+?]|\{{\d+(?:,\d*)?\}}(?![+?])"
    r"|[^\\()\[\]{}^$|.*+?])+"
)


def encoder(raw: RawCopy, pipeline: Pipeline, table: Sequence[bytes]) -> Encode:
    """Return a function from a text to the ids that the raw copy of a tokenizer gives.

    It uses the raw copy itself if the cuts are unknown or if results differ for the sample text.
    """
    run = raw.tokenizer.encode

    def encode(text: str) -> list[int]:
        ids: list[int] = run(text, add_special_tokens=False).ids
        return ids

    cut, spell = cut_of(raw.model, pipeline, table), _speller(raw.model, pipeline)
    if cut is None:
        return encode
    known = lru_cache(MEMO_WORDS)(spell)
    # `tokenizers` finds added tokens before it cuts words.
    contents = [re.escape(content) for content in raw.added]
    has_added = re.compile("|".join(contents)).search if contents else None

    def encode_words(text: str) -> list[int]:
        if len(text) > LONGEST_TEXT or _NOT_PLAIN.search(text) or (has_added and has_added(text)):
            return encode(text)
        ids: list[int] = []
        for word in cut(text):
            ids += known(word) if len(word) <= LONGEST_WORD else spell(word)
        return ids

    alike = all(encode_words(text) == encode(text) for text in CALIBRATION_TEXT.splitlines())
    return encode_words if alike else encode


def cut_of(model: FastModel, pipeline: Pipeline, table: Sequence[bytes]) -> Cut | None:
    """Return a function that cuts plain text into words, or None if the cuts are unknown."""
    if model.kind != "BPE" or model.model.dropout:
        return None
    patterns, space = [], _space(pipeline)
    gone = any(map(_mark, components(pipeline.normalizer)))
    for part in _parts(pipeline):
        if gone and part["type"] == "Split" and part["pattern"] == _SPACE:
            continue  # the normalizer has replaced all spaces
        pattern = _pattern(part)
        if pattern is None:
            return None
        patterns += [pattern] if pattern else []
    if not patterns:  # unknown characters on both sides of a space may be fused to one token
        return cut_before_spaces(table) if model.spells_all else None
    cuts = [cut for cut in map(cut_by, patterns) if cut]
    if space != " " or len(cuts) < len(patterns):
        return None  # patterns match spaces, which the normalizer has replaced, or one is unknown
    return reduce(_one_after_other, cuts)


def _one_after_other(cut: Cut, cut_further: Cut) -> Cut:
    return lambda text: [word for part in cut(text) for word in cut_further(part)]


def cut_before_spaces(table: Sequence[bytes]) -> Cut:
    """Return a function that cuts before a space, except after characters that merge with it."""
    text = "\0".join([data.decode("latin-1") for data in table])
    before = set(re.findall("([^ ])(?= )", text))
    joined = re.escape("".join(sorted(filter(str.isascii, before)))) or _NEVER
    if not all(map(str.isascii, before)):  # the last byte of any character that is not ASCII
        joined += f"\x80-{_NEVER}"
    return re.compile(f" *(?:[^ ]*[{joined}] +)*[^ ]*").findall


def _parts(pipeline: Pipeline) -> list[dict[str, Any]]:
    return components(pipeline.normalizer) + components(pipeline.pre_tokenizer)


def _pattern(part: dict[str, Any]) -> str | None:
    """Return the pattern by which a part cuts plain text, "" for no cuts, None if it is unknown."""
    kind = part["type"]
    if kind == "NFC" or _mark(part):
        return ""
    # The normalizer of this type has no "add_prefix_space".
    if kind == "ByteLevel" and part.get("add_prefix_space") is False:
        return _BYTE_LEVEL if part.get("use_regex", True) else ""
    if kind == "Digits":
        return r"\p{N}" if part["individual_digits"] else r"\p{N}+"
    if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        (of, pattern), *_ = part["pattern"].items()
        return str(pattern) if of == "Regex" else re.escape(pattern)
    return None


def _mark(part: dict[str, Any]) -> str:
    """Return the replacement of a space if a part does nothing else, or ""."""
    if part["type"] == "Replace" and part["pattern"] == _SPACE:
        return str(part["content"])
    whole = part["type"] == "Metaspace" and not part.get("split", True)
    return str(part["replacement"]) if whole and part["prepend_scheme"] == "never" else ""


def _space(pipeline: Pipeline) -> str:
    """Return the string that replaces a space in the words that the model receives."""
    return next(filter(None, map(_mark, _parts(pipeline))), " ")


def _speller(model: FastModel, pipeline: Pipeline) -> Callable[[str], Sequence[int]]:
    spell, space, tokenize = model.speller(), _space(pipeline), model.model.tokenize
    if spell is not None:
        return lambda word: spell(word.encode())
    return lambda word: [token.id for token in tokenize(word.replace(" ", space))]


def cut_by(pattern: str) -> Cut | None:
    """Return a function that cuts plain text into matches of a pattern and the text between.

    Return None if the pattern may have another meaning in Oniguruma, or matches the empty string.
    """
    if not _ALIKE.fullmatch(pattern):
        return None
    ours = re.sub(f"({_CLASS})|{_NAMED}", _spelled_out, pattern)
    try:
        words = re.compile(f"(?:{ours})|(?:(?!{ours})[\\s\\S])+")
        matches_nothing = re.match(ours, "")
    except re.error:
        return None
    return None if matches_nothing else words.findall


def _spelled_out(found: re.Match[str]) -> str:
    """Replace the named kinds of characters in a class, or a single kind, by ranges."""
    if found[1]:
        return re.sub(_NAMED, lambda one: _characters(one[1], one[2]), found[1])
    return f"[{_characters(found[4], found[5])}]"


@lru_cache
def _characters(name: str | None, letter: str | None) -> str:
    r"""Return the plain characters of a general category or of `\s`, `\S`, `\d`, as ranges."""

    def has(code: int) -> bool:
        if letter in ("s", "S"):
            return (chr(code) in _WHITE) == (letter == "s")
        return category(chr(code)).startswith(name or "Nd")

    spelled = ""
    for first, last in PLAIN:
        for having, codes in groupby(range(first, last + 1), has):
            run = list(codes)
            if having:
                spelled += f"{re.escape(chr(run[0]))}-{re.escape(chr(run[-1]))}"
    return spelled or _NEVER
