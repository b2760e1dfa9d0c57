# SPDX-License-Identifier: Apache-2.0
"""The exact bytes of every token, by the rule of the tokenizer's decoder.

A vocabulary stores its tokens in a display alphabet. Byte-level BPE maps each byte to a printable
character. SentencePiece writes a space as U+2581 and a raw byte as `<0x0A>`. WordPiece marks the
pieces that do not start a word. The decoder section of the tokenizer's JSON determines the rule,
because the decoder converts the target's ids into the output text.
"""

import re
from codecs import charmap_build, charmap_encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

SPACE_MARK = "\u2581"
UTF8_BYTES = frozenset(range(0xF5)) - {0xC0, 0xC1}  # those that occur in UTF-8
_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")
# A WordPiece decoder with cleanup writes no space before these. It also joins contractions. It
# recognizes them by several characters, so bytes are determined only if no piece starts with one.
_PUNCTUATION = (".", "?", "!", ",")
CONTRACTIONS = ("n't", "'m", "'s", "'ve", "'re")


class UnknownDecoder(ValueError):
    """A decoder whose output is not determined token by token."""


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_others = count(0x100)
# The alphabet of byte-level BPE, by byte: bytes that are not printable become U+0100, U+0101, ...
# The codec converts a piece to bytes.
BYTE_CHARACTERS = "".join(chr(byte if byte in _PRINTABLE else next(_others)) for byte in range(256))
_BYTE_CODEC = charmap_build(BYTE_CHARACTERS)


def components(section: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the parts of one section of a tokenizer's JSON, with sequences flattened."""
    if section is None:
        return []
    if section["type"] != "Sequence":
        return [dict(section)]
    inner = next(value for key, value in section.items() if key != "type")
    return [part for item in inner for part in components(item)]


@dataclass(frozen=True)
class PieceRule:
    """Rule by which a decoder writes a piece that is not the first of a text.

    Attributes:
        byte_level: Characters are bytes, in the alphabet of byte-level BPE.
        byte_fallback: `<0xNN>` is one byte.
        replaced: Pairs of a string and its replacement, in order.
        continuing: WordPiece's mark of pieces that continue a word. Other pieces follow a space.
        cleanup: WordPiece writes no space before `. ? ! ,`.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    continuing: str | None = None
    cleanup: bool = False

    def piece(self, piece: str) -> bytes:
        """Return the bytes of a piece of the vocabulary."""
        if self.byte_fallback and (byte := fallback_byte(piece)) is not None:
            return bytes([byte])
        if self.continuing is not None and piece.startswith(self.continuing):
            return piece[len(self.continuing) :].encode()
        return self.word(piece)

    def word(self, word: str) -> bytes:
        """Return the bytes of a word that a pre-tokenizer passes to the model."""
        if self.byte_level:
            return byte_level_piece(word)
        for old, new in self.replaced:
            word = word.replace(old, new)
        if self.continuing is not None and not (self.cleanup and word.startswith(_PUNCTUATION)):
            word = " " + word
        return word.encode()


def decoder_rule(
    decoder: Mapping[str, Any] | None, pre_tokenizer: Mapping[str, Any] | None
) -> PieceRule:
    """Return the rule of a tokenizer, from these sections of its JSON.

    Raises:
        UnknownDecoder: The decoder does not determine the bytes of a token.
    """
    parts = components(decoder)
    if decoder is None and any(part["type"] == "ByteLevel" for part in components(pre_tokenizer)):
        return PieceRule(byte_level=True)
    types = [part["type"] for part in parts]
    if set(types) <= {"ByteLevel", "Fuse"} and "ByteLevel" in types:
        return PieceRule(byte_level=True)
    if types == ["WordPiece"]:
        return PieceRule(continuing=parts[0]["prefix"], cleanup=parts[0]["cleanup"])
    if not types:
        raise UnknownDecoder("it has no decoder")
    return _joined_rule(parts)


def _joined_rule(parts: list[dict[str, Any]]) -> PieceRule:
    """Return the rule of a SentencePiece decoder, which rewrites each piece and joins them."""
    replaced: list[tuple[str, str]] = []
    fused = fallback = False
    for part in parts:
        kind = part["type"]
        if kind == "Replace" and "String" in part["pattern"]:
            old = part["pattern"]["String"]
            if fused and len(old) != 1:
                raise UnknownDecoder(f"its decoder replaces {old!r} across tokens")
            replaced.append((old, part["content"]))
        elif kind == "Metaspace":
            replaced.append((part["replacement"], " "))
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind != "Strip" or not fused:  # after Fuse, Strip affects only the ends of a text
            raise UnknownDecoder(f"its decoder has a {kind} step")
    return PieceRule(byte_fallback=fallback, replaced=tuple(replaced))


def byte_level_piece(piece: str) -> bytes:
    """Return the bytes of a byte-level piece. Text outside the alphabet is encoded as UTF-8."""
    try:
        return charmap_encode(piece, "strict", _BYTE_CODEC)[0]
    except UnicodeEncodeError:
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """Return the byte of a `<0xNN>` piece, or None for any other piece."""
    return int(piece[3:5], 16) if _FALLBACK.fullmatch(piece) else None


def single_byte_ids(pairs: Iterable[tuple[int, bytes]]) -> tuple[int, ...]:
    """Return, for each byte, the first id that spells it alone, or -1."""
    ids = [-1] * 256
    for token_id, data in pairs:
        if len(data) == 1 and ids[data[0]] < 0:
            ids[data[0]] = token_id
    return tuple(ids)
