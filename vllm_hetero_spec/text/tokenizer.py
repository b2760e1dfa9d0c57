# SPDX-License-Identifier: Apache-2.0
"""The bridge's tokenizer interface: token ids and the exact bytes of each."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# Undecodable bytes are lone surrogates in Python strings (PEP 383, "surrogateescape").
_ESCAPED = re.compile("([\ud800-\udfff]+)")
# Approximates the word that contains undecodable bytes, because their characters are unknown.
_ESCAPED_WORD = re.compile(
    " ?[A-Za-z\u0080-\ud7ff\ue000-\U0010ffff]{0,32}[\ud800-\udfff][A-Za-z\u0080-\U0010ffff]*"
)
_CROSSING = re.compile(r"(?<=\S) ")


class UnsupportedTokenizer(ValueError):
    """A tokenizer whose bytes cannot be determined. The message names a supported alternative."""


@dataclass(frozen=True)
class LeadingSpace:
    """Rule by which a tokenizer itself puts a space before text.

    Attributes:
        scope: "none", "first" (before the first text of a sequence) or "always" (before every
            stretch of text between special tokens).
        unless_present: No space is added to text that already starts with one.
    """

    scope: Literal["none", "first", "always"] = "none"
    unless_present: bool = False

    def applies(self, *, first: bool) -> bool:
        return self.scope == "always" or (self.scope == "first" and first)


def unchanged(text: str) -> str:
    """Return the text itself: the normalization of a tokenizer without a normalizer."""
    return text


@dataclass(eq=False, repr=False)
class TextTokenizer:
    """Token ids and exact bytes of one tokenizer, with a raw encoder.

    `encode` adds no BOS, EOS or dummy prefix, and text that resembles a special token stays text.
    The bytes of its ids are those of `normalize(text)`, except for text that the vocabulary cannot
    spell. Such text becomes the unknown token, or is lost if there is none. Lone surrogates
    U+DC80..U+DCFF stand for undecodable bytes. A byte without a token is lost. `lost_bytes` returns
    the number of bytes that are missing in the ids of a text.

    Attributes:
        token_bytes: Bytes of each id, b"" for special tokens and holes.
        special_text: Content of each special token, by id.
        special_ids: Special tokens and holes. A hole is an id without a token.
        byte_ids: For each byte, the id that spells it alone, or -1.
        fingerprint: Equal for tokenizers that give every text the same ids with the same bytes.
        raw_encode: Function from a text without surrogates to ids.
        raw_encode_batch: The same for many texts.
        raw_normalize: Function from a text without surrogates to the text that is encoded.
        lossy_reason: Description of the changes that normalization makes, or "" if it makes only
            canonical Unicode composition and reads U+2581 as a space.
        spell_word: Function from any bytes, as one word, to ids. None: each byte is spelled alone.
        spells_all: True if no text has unknown or missing tokens.
        unknown_id: Special token for text that cannot be spelled.
        adds_bos: True if the tokenizer itself adds BOS.
    """

    name: str
    token_bytes: list[bytes]
    special_text: Mapping[int, str]
    byte_ids: tuple[int, ...]
    fingerprint: str
    raw_encode: Callable[[str], list[int]]
    raw_encode_batch: Callable[[Sequence[str]], list[list[int]]]
    raw_normalize: Callable[[str], str] = unchanged
    lossy_reason: str = ""
    spell_word: Callable[[bytes], list[int]] | None = None
    spells_all: bool = True
    unknown_id: int | None = None
    bos_id: int | None = None
    adds_bos: bool = False
    eos_id: int | None = None
    leading_space: LeadingSpace = LeadingSpace()

    def __post_init__(self) -> None:
        self.special_ids = frozenset(i for i, data in enumerate(self.token_bytes) if not data)
        self.special_id_of = {text: token_id for token_id, text in self.special_text.items()}
        spaced = [data for data in self.token_bytes if data.rfind(b" ") > 0]
        self.crossing_reach = max(map(_bytes_past_crossing, spaced), default=0)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.name!r}, {self.vocab_size} ids)"

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""
        return len(self.token_bytes)

    def normalize(self, text: str) -> str:
        """Return the text whose bytes the ids of `encode(text)` have."""
        parts = enumerate(_ESCAPED.split(text))  # every second part is escaped
        return "".join([part if place % 2 else self.raw_normalize(part) for place, part in parts])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS, EOS or dummy prefix."""
        return self._encode_escaped(text) if _ESCAPED.search(text) else self.raw_encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if _ESCAPED.search("".join(texts)):
            return [self.encode(text) for text in texts]
        return self.raw_encode_batch(texts)

    def lost_bytes(self, text: str, ids: Sequence[int]) -> int:
        """Return the number of bytes of the normalized text that `ids`, its encoding, lack.

        A surrogate that is not an escaped byte counts as one lost byte.
        """
        escaped = _ESCAPED.search(text)
        if not escaped and (self.spells_all or self.unknown_id not in (None, *ids)):
            return 0  # a tokenizer without an unknown token needs the comparison of lengths below
        expected = sum(max(1, len(_bytes_of(char))) for char in self.normalize(text))
        return expected - len(self.decode_bytes(ids))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the token ids of any bytes. Undecodable ones are encoded by `spell_word`."""
        return self.encode(data.decode("utf-8", "surrogateescape"))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the concatenated bytes of `ids`. Special tokens have none."""
        return b"".join([self.token_bytes[token_id] for token_id in ids])

    def content(self, token_id: int, errors: str = "replace") -> str:
        """Return the content of a special token, the decoded bytes of another one, or ""."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self.special_text.get(token_id, self.token_bytes[token_id].decode("utf-8", errors))

    def limited_to(self, rows: int) -> "TextTokenizer":
        """Return this tokenizer without the ids that have no row in an embedding of `rows` rows.

        Models often lack rows for special tokens that were added to the tokenizer later.

        Raises:
            UnsupportedTokenizer: A token that may occur in encoded text has no row.
        """
        if self.vocab_size <= rows:
            return self
        in_text = [
            i
            for i in range(rows, self.vocab_size)
            if self.token_bytes[i] or (i == self.unknown_id and not self.spells_all)
        ]
        if in_text:
            raise UnsupportedTokenizer(
                f"{self.name}: {len(in_text)} of its text tokens have no row in the model's "
                f"embedding (ids from {in_text[0]}, where the model has {rows} rows); name the "
                "tokenizer that belongs to the model."
            )

        def kept(token_id: int | None) -> int | None:
            return token_id if token_id is not None and token_id < rows else None

        return replace(
            self,
            token_bytes=self.token_bytes[:rows],
            special_text={i: text for i, text in self.special_text.items() if i < rows},
            fingerprint=hashlib.sha256(f"{self.fingerprint} {rows}".encode()).hexdigest(),
            unknown_id=kept(self.unknown_id),
            bos_id=kept(self.bos_id),
            adds_bos=self.adds_bos and kept(self.bos_id) is not None,
            eos_id=kept(self.eos_id),
        )

    def _encode_escaped(self, text: str) -> list[int]:
        words = _ESCAPED if self.spell_word is None else _ESCAPED_WORD
        ids: list[int] = []
        position = 0
        for match in words.finditer(text):
            start = self._parting(text, position, match)
            if position < start:
                ids += self.encode(text[position:start])
            ids += self._spell(self.normalize(text[start : match.end()]))
            position = match.end()
        return ids + self.encode(text[position:]) if position < len(text) else ids

    def _parting(self, text: str, position: int, match: re.Match[str]) -> int:
        """Return the first place, from the start of a match, at which the text can be divided.

        The pattern limits a match's length before the surrogate. The match may therefore begin
        inside characters that normalization composes.
        """
        normalize, start = self.normalize, match.start()
        near = max(position, start - 8)
        whole = normalize(text[near : match.end()])
        for at in range(start, match.end()):
            if normalize(text[near:at]) + normalize(text[at : match.end()]) == whole:
                return at
        return start

    def _spell(self, escaped: str) -> list[int]:
        data = b"".join(map(_bytes_of, escaped))
        if self.spell_word is not None:
            return self.spell_word(data)
        return [self.byte_ids[byte] for byte in data if self.byte_ids[byte] >= 0]


def alike(one: TextTokenizer, other: TextTokenizer) -> tuple[TextTokenizer, TextTokenizer]:
    """Return both without special tokens that one model has no row for, if they are equal then."""
    rows = min(one.vocab_size, other.vocab_size)
    try:
        limited = one.limited_to(rows), other.limited_to(rows)
    except UnsupportedTokenizer:
        return one, other
    return limited if limited[0].fingerprint == limited[1].fingerprint else (one, other)


def _bytes_of(char: str) -> bytes:
    """Return the UTF-8 bytes of a character, or the byte of an escape, or b"" for a surrogate."""
    return char.encode("utf-8", "surrogateescape") if not "\ud800" <= char < "\udc80" else b""


def _bytes_past_crossing(data: bytes) -> int:
    """Return the number of bytes from the first space that follows a non-space, or 0."""
    text = data.decode("utf-8", "replace")
    crossing = _CROSSING.search(text)
    return len(text[crossing.start() :].encode()) if crossing else 0
