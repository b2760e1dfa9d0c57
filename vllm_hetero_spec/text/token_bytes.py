# SPDX-License-Identifier: Apache-2.0
"""The exact byte string of every token, by the rule of the tokenizer's own decoder.

A vocabulary stores its tokens in a display alphabet: byte-level BPE maps each byte to a printable
character, SentencePiece writes a space as U+2581 and a raw byte as ``<0x0A>``. Which of the two
applies is decided by the decoder section of the tokenizer's JSON, because that is what turns the
target's ids into the text a user reads.
"""

from collections.abc import Iterable, Mapping
from typing import Any

SPACE_MARK = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Printable character -> byte, for the alphabet of byte-level BPE (256 entries)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(shifted)}


def component_types(section: Mapping[str, Any] | None) -> list[str]:
    """Types named by one section of a tokenizer's JSON, with sequences flattened."""
    return [part["type"] for part in components(section)]


def components(section: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Parts of one section of a tokenizer's JSON, with sequences flattened."""
    if section is None:
        return []
    if section["type"] != "Sequence":
        return [dict(section)]
    inner = next(value for key, value in section.items() if key != "type")
    return [part for item in inner for part in components(item)]


def byte_level_piece(piece: str, alphabet: Mapping[str, int]) -> bytes:
    """Bytes of a piece of byte-level BPE; text outside the alphabet stands for itself."""
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "surrogatepass")


def sentencepiece_piece(piece: str, *, byte_fallback: bool) -> bytes:
    """Bytes of a SentencePiece piece; ``<0xNN>`` is one byte only where the model has fallback."""
    if byte_fallback and (byte := fallback_byte(piece)) is not None:
        return bytes([byte])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")


def fallback_byte(piece: str) -> int | None:
    """The byte a ``<0xNN>`` piece spells, or None for any other piece."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def single_byte_ids(pairs: Iterable[tuple[int, bytes]]) -> tuple[int, ...]:
    """For each byte the first id that spells it alone, -1 where none does."""
    ids = [-1] * 256
    for token_id, data in pairs:
        if len(data) == 1 and ids[data[0]] < 0:
            ids[data[0]] = token_id
    return tuple(ids)
