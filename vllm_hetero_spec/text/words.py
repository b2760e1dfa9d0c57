# SPDX-License-Identifier: Apache-2.0
"""Short ASCII texts, word by word: the ids of words that have come before are looked up.

A tokenizer cuts a text into words and spells each on its own. `tokenizers` takes most of its time
for the cutting, where in the tails and drafts of decoding the same few words come again. So they
are cut here, by the tokenizer's own patterns: in ASCII Python's `re` reads those that are admitted
as Oniguruma does. Without patterns a text is cut before spaces, where no token has the two
characters side by side: nothing merges across. Whatever else there may be is left to `tokenizers`.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from unicodedata import category

from vllm_hetero_spec.text.fast_model import FastModel
from vllm_hetero_spec.text.raw_copy import Pipeline, RawCopy
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.token_bytes import components

Encode = Callable[[str], list[int]]
Cut = Callable[[str], list[str]]

# Words whose ids are remembered, and the length of a text from which it is a prompt: read once.
MEMO_WORDS = 1 << 15
LONGEST_TEXT = 1024

_KEEP_ASCII = {"NFC", "NFD", "NFKC", "NFKD"}
# The pattern of the pre-tokenizer `ByteLevel`.
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACE = {"String": " "}
_NO_ASCII = "\x80"

_PROPERTY = r"\\p\{([LMNPSZ][a-z]?)\}"
_ESCAPE = r"\\[^a-zA-Z0-9]|\\[sSdwrnt]"
_CLASS = rf"\[\^?(?:{_PROPERTY}|{_ESCAPE}|[^\[\]\\&]|&(?!&))+\]"
# Patterns that mean the same in Oniguruma and here. Ends of lines, groups that capture, and whether
# a repetition of {n} is possessive are read differently; others are simply not needed.
_ALIKE = re.compile(
    rf"(?:{_CLASS}|{_PROPERTY}|{_ESCAPE}|\(\?(?:i:|[:!=])|[)|.*+?]|\{{\d+(?:,\d*)?\}}(?![+?])"
    r"|[^\\()\[\]{}^$|.*+?])+"
)


def encoder(raw: RawCopy, pipeline: Pipeline, table: Sequence[bytes]) -> Encode:
    """What gives the ids of a text, as the raw copy of a tokenizer does.

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
    spelled = lru_cache(MEMO_WORDS)(spell)
    # Added tokens are found before words are.
    contents = [re.escape(content) for content in raw.added]
    has_added = re.compile("|".join(contents)).search if contents else None

    def encode_words(text: str) -> list[int]:
        if len(text) > LONGEST_TEXT or not text.isascii() or (has_added and has_added(text)):
            return encode(text)
        ids: list[int] = []
        for word in cut(text):
            ids += spelled(word)
        return ids

    alike = all(encode_words(text) == encode(text) for text in CALIBRATION_TEXT.splitlines())
    return encode_words if alike else encode


def cut_of(model: FastModel, pipeline: Pipeline, table: Sequence[bytes]) -> Cut | None:
    """What cuts ASCII text into words; None where that cannot be told."""
    if model.kind != "BPE" or model.model.dropout:
        return None
    patterns, space = [], _space(pipeline)
    for part in _parts(pipeline):
        if part.get("pattern") == _SPACE and space != " ":
            continue  # no spaces are left, or they are about to go
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
    text = "\0".join([data.decode("ascii", "ignore") for data in table])
    joined = "".join(sorted(set(re.findall("([^ ])(?= )", text)))) or _NO_ASCII
    return re.compile(f" *(?:[^ ]*[{re.escape(joined)}] +)*[^ ]*").findall


def _parts(pipeline: Pipeline) -> list[dict[str, Any]]:
    return components(pipeline.normalizer) + components(pipeline.pre_tokenizer)


def _pattern(part: dict[str, Any]) -> str | None:
    """By what a section of a pipeline cuts ASCII text, "" for nothing; None for more than that."""
    kind = part["type"]
    if kind in _KEEP_ASCII or _mark(part):
        return ""
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return _BYTE_LEVEL if part.get("use_regex", True) else ""
    if kind == "Digits":
        return "[0-9]" if part["individual_digits"] else "[0-9]+"
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
    """What gives the ids of an ASCII word."""
    spell, space, tokenize = model.speller(), _space(pipeline), model.model.tokenize
    if spell is not None:
        return lambda word: spell(word.encode())
    return lambda word: [token.id for token in tokenize(word.replace(" ", space))]


def cut_by(pattern: str) -> Cut | None:
    """What cuts ASCII text into the places that a pattern matches, and those between; None where it
    may mean something else to Oniguruma."""
    if not _ALIKE.fullmatch(pattern):
        return None
    ours = re.sub(f"({_CLASS})|{_PROPERTY}", _in_ascii, pattern)
    try:
        words = re.compile(f"(?:{ours})|(?:(?!{ours})[\\s\\S])+", re.ASCII)
        matches_nothing = re.match(ours, "", re.ASCII)
    except re.error:
        return None
    return None if matches_nothing else words.findall


def _in_ascii(found: re.Match[str]) -> str:
    """A class of characters, or a property that stands alone, as a class of those in ASCII."""
    if found[1]:
        return re.sub(_PROPERTY, lambda one: _characters(one[1]), found[1])
    return f"[{_characters(found[3])}]"


def _characters(name: str) -> str:
    having = [char for char in map(chr, range(128)) if category(char).startswith(name)]
    return "".join(map(re.escape, having)) or _NO_ASCII
