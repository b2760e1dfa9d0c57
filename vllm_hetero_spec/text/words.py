# SPDX-License-Identifier: Apache-2.0
"""Short plain texts, word by word: the ids of words that have come before are looked up.

A tokenizer cuts a text into words and spells each on its own. `tokenizers` takes most of its time
for the cutting, where in the tails and drafts of decoding the same few words come again. So they
are cut here, by the tokenizer's own patterns: of plain characters Python's `re` reads those that
are admitted as Oniguruma does. Without patterns a text is cut before spaces, where no token has the
two characters side by side: nothing merges across. All else is left to `tokenizers`.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any
from unicodedata import category

from vllm_hetero_spec.text.fast_model import FastModel
from vllm_hetero_spec.text.raw_copy import Pipeline, RawCopy
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.token_bytes import components

Encode = Callable[[str], list[int]]
Cut = Callable[[str], list[str]]

# Words whose ids are remembered, and how long they may be: a text without spaces may be one.
MEMO_WORDS = 1 << 15
LONGEST_WORD = 32
LONGEST_TEXT = 1024  # characters of a text from which it is a prompt: read once

# Characters of many scripts, each of one kind for long, and left alone by composition.
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
_NEVER = "\U0010ffff"  # is in no text
_WHITE = frozenset("\t\n\v\f\r \x85\xa0\u3000")

# The pattern of the pre-tokenizer `ByteLevel`.
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACE = {"String": " "}

_NAMED = r"\\p\{([LMNPSZ][a-z]?)\}|\\([sSd])"
_ESCAPE = r"\\[^a-zA-Z0-9]|\\[rnt]"
_CLASS = rf"\[\^?(?:{_NAMED}|{_ESCAPE}|[^\[\]\\&]|&(?!&))+\]"
# Patterns that mean the same in Oniguruma and here. Ends of lines, groups that capture, and whether
# a repetition of {n} is possessive are read differently; others are simply not needed.
_ALIKE = re.compile(
    rf"(?:{_CLASS}|{_NAMED}|{_ESCAPE}|\(\?(?:i:|[:!=])|[)|.*+?]|\{{\d+(?:,\d*)?\}}(?![+?])"
    r"|[^\\()\[\]{}^$|.*+?])+"
)


def encoder(raw: RawCopy, pipeline: Pipeline, table: Sequence[bytes]) -> Encode:
    """What gives the ids of a text, as the raw copy of a tokenizer does.

    That is asked itself where it cuts otherwise than is known here, be it the sample text alone.

    Args:
        raw: The copy.
        pipeline: Its sections around the model.
        table: Bytes of every token.
    """
    run = raw.tokenizer.encode

    def encode(text: str) -> list[int]:
        ids: list[int] = run(text, add_special_tokens=False).ids
        return ids

    cut, spell = cut_of(raw.model, pipeline, table), _speller(raw.model, pipeline)
    if cut is None:
        return encode
    known = lru_cache(MEMO_WORDS)(spell)
    # Added tokens are found before words are.
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
    """What cuts plain text into words; None where that cannot be told."""
    if model.kind != "BPE" or model.model.dropout:
        return None
    patterns, space = [], _space(pipeline)
    gone = any(map(_mark, components(pipeline.normalizer)))
    for part in _parts(pipeline):
        if gone and part["type"] == "Split" and part["pattern"] == _SPACE:
            continue  # it finds none
        pattern = _pattern(part)
        if pattern is None:
            return None
        patterns += [pattern] if pattern else []
    if not patterns:  # unknown characters may be one token, on both sides of a space
        return cut_before_spaces(table) if model.spells_all else None
    if space != " ":
        return None  # patterns look for spaces, too
    first, *others = [cut_by(pattern) for pattern in patterns]
    for other in others:
        first = _one_after_other(first, other)
    return first


def _one_after_other(first: Cut | None, second: Cut | None) -> Cut | None:
    if first is None or second is None:
        return None
    cut, cut_further = first, second
    return lambda text: [word for part in cut(text) for word in cut_further(part)]


def cut_before_spaces(table: Sequence[bytes]) -> Cut:
    """What cuts behind characters that no token has before a space."""
    text = "\0".join([data.decode("latin-1") for data in table])
    before = set(re.findall("([^ ])(?= )", text))
    joined = re.escape("".join(sorted(filter(str.isascii, before)))) or _NEVER
    if not all(map(str.isascii, before)):  # a last byte, of whichever character
        joined += f"\x80-{_NEVER}"
    return re.compile(f" *(?:[^ ]*[{joined}] +)*[^ ]*").findall


def _parts(pipeline: Pipeline) -> list[dict[str, Any]]:
    return components(pipeline.normalizer) + components(pipeline.pre_tokenizer)


def _pattern(part: dict[str, Any]) -> str | None:
    """By what a section of a pipeline cuts plain text, "" for nothing; None for more than that."""
    kind = part["type"]
    if kind == "NFC" or _mark(part):
        return ""
    if kind == "ByteLevel" and part.get("add_prefix_space") is False:  # a normalizer has none
        return _BYTE_LEVEL if part.get("use_regex", True) else ""
    if kind == "Digits":
        return r"\p{N}" if part["individual_digits"] else r"\p{N}+"
    if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        (of, pattern), *_ = part["pattern"].items()
        return str(pattern) if of == "Regex" else re.escape(pattern)
    return None


def _mark(part: dict[str, Any]) -> str:
    """What stands for a space behind a section of a pipeline that does nothing else; or ""."""
    if part["type"] == "Replace" and part["pattern"] == _SPACE:
        return str(part["content"])
    whole = part["type"] == "Metaspace" and not part.get("split", True)
    return str(part["replacement"]) if whole and part["prepend_scheme"] == "never" else ""


def _space(pipeline: Pipeline) -> str:
    """What stands for a space when words are spelled."""
    return next(filter(None, map(_mark, _parts(pipeline))), " ")


def _speller(model: FastModel, pipeline: Pipeline) -> Callable[[str], Sequence[int]]:
    """What gives the ids of a plain word."""
    spell, space, tokenize = model.speller(), _space(pipeline), model.model.tokenize
    if spell is not None:
        return lambda word: spell(word.encode())
    return lambda word: [token.id for token in tokenize(word.replace(" ", space))]


def cut_by(pattern: str) -> Cut | None:
    """What cuts plain text into the places that a pattern matches, and those between; None where it
    may mean something else to Oniguruma."""
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
    """A class of characters, or a kind that stands alone, as a class of single ones."""
    if found[1]:
        return re.sub(_NAMED, lambda one: _characters(one[1], one[2]), found[1])
    return f"[{_characters(found[4], found[5])}]"


@lru_cache
def _characters(name: str | None, letter: str | None) -> str:
    r"""The plain characters of a general category, or of Oniguruma's `\s`, `\S` or `\d`."""

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
