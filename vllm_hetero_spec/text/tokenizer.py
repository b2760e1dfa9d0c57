# SPDX-License-Identifier: Apache-2.0
"""A tokenizer as the bridge sees it: token ids and the exact bytes they stand for."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

SpaceScope = Literal["none", "first", "always"]

# Undecodable bytes travel through Python strings as lone surrogates (PEP 383, "surrogateescape").
_ESCAPED = re.compile("[\ud800-\udfff]+")
# The word that undecodable bytes are part of, as far as one can tell without their characters.
_ESCAPED_WORD = re.compile(
    " ?[A-Za-z\u0080-\ud7ff\ue000-\U0010ffff]{0,32}[\ud800-\udfff][A-Za-z\u0080-\U0010ffff]*"
)
_CROSSING = re.compile(r"(?<=\S) ")


class UnsupportedTokenizer(ValueError):
    """A tokenizer whose bytes cannot be known exactly; the message says what to use instead."""


@dataclass(frozen=True)
class LeadingSpace:
    """When a tokenizer itself puts a space before text.

    Attributes:
        scope: Never, before the first text of a sequence only, or before every stretch of text
            between special tokens.
        unless_present: Not where the text already starts with a space.
    """

    scope: SpaceScope = "none"
    unless_present: bool = False

    def applies(self, *, first: bool) -> bool:
        return self.scope == "always" or (self.scope == "first" and first)


def unchanged(text: str) -> str:
    """The normalisation of a tokenizer that has none."""
    return text


@dataclass(eq=False, repr=False)
class TextTokenizer:
    """Token ids and exact bytes of one tokenizer, with an encoder that adds nothing of its own.

    `encode` is raw: no BOS or EOS, no dummy prefix, and text that merely looks like a special token
    stays text. The bytes of its ids are those of `normalize(text)`, but for what the vocabulary
    cannot spell. Such text is the unknown token or, where there is none, gone. Lone surrogates
    U+DC80..U+DCFF stand for undecodable bytes; those without a token are gone. `lost_bytes` tells
    how much the ids of a text lack.

    Attributes:
        name: For messages.
        token_bytes: Bytes of each id, b"" for special tokens and holes.
        special_text: Content of each special token.
        special_ids: Special tokens, and holes: ids without a token.
        byte_ids: For each byte the id that spells it alone, -1 where there is none.
        fingerprint: Equal for tokenizers that give every text the same ids of the same bytes.
        raw_encode: Ids of a text without surrogates.
        raw_encode_batch: The same of many.
        raw_normalize: What is encoded in the place of a text without surrogates.
        lossy_reason: What normalisation takes from text, empty where nothing.
        spell_word: Ids of any bytes, taken as one word; None where bytes are spelled one by one.
        spells_all: No text has unknown or missing tokens.
        unknown_id: Stands for what cannot be spelled; a special token.
        bos_id: The token that begins a sequence.
        adds_bos: Whether the tokenizer itself puts that there.
        eos_id: The token that ends a sequence.
        leading_space: When the tokenizer itself puts a space before text.
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
        """Number of ids (largest id + 1)."""
        return len(self.token_bytes)

    @property
    def lossless(self) -> bool:
        """Whether normalisation keeps all text, up to canonical Unicode composition.

        SentencePiece's mark U+2581 always becomes a space; that counts as keeping.
        """
        return not self.lossy_reason

    def normalize(self, text: str) -> str:
        """Text as the tokenizer writes it: what the bytes of `encode(text)` are."""
        normalized, position = "", 0
        for match in _ESCAPED.finditer(text):
            normalized += self.raw_normalize(text[position : match.start()]) + match.group()
            position = match.end()
        return normalized + self.raw_normalize(text[position:])

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; see the class for what raw means."""
        return self._encode_escaped(text) if _ESCAPED.search(text) else self.raw_encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        if _ESCAPED.search("".join(texts)):
            return [self.encode(text) for text in texts]
        return self.raw_encode_batch(texts)

    def lost_bytes(self, text: str, ids: Sequence[int]) -> int:
        """How many bytes of a normalised text are not in `ids`, its encoding.

        A surrogate that is no escaped byte is no text in any encoding: one byte of loss.
        """
        escaped = _ESCAPED.search(text)
        if not escaped and (self.spells_all or self.unknown_id not in (None, *ids)):
            return 0  # without unknown tokens nothing but the length of the bytes tells
        expected = sum(max(1, len(_bytes_of(char))) for char in self.normalize(text))
        return expected - len(self.decode_bytes(ids))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes: those of their text, and undecodable bytes as `spell_word`."""
        return self.encode(data.decode("utf-8", "surrogateescape"))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Concatenated bytes of `ids`; special tokens contribute nothing."""
        return b"".join([self.token_bytes[token_id] for token_id in ids])

    def limited_to(self, rows: int) -> "TextTokenizer":
        """This tokenizer without the ids that a model with `rows` embedding rows does not have.

        Models often lack the rows of special tokens that were added to the tokenizer later: those
        tokens are gone.

        Raises:
            UnsupportedTokenizer: A token that text may have has no row.
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
        """Start of a match, or where behind it the text can be parted before normalisation.

        What a match may begin with is bounded, so it may begin inside what is one character then.
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


def _bytes_of(char: str) -> bytes:
    """UTF-8 of a character, the byte that a surrogate stands for, b"" for any other surrogate."""
    return char.encode("utf-8", "surrogateescape") if not "\ud800" <= char < "\udc80" else b""


def _bytes_past_crossing(data: bytes) -> int:
    """How far a token reaches past the first place where a space follows something else."""
    text = data.decode("utf-8", "replace")
    crossing = _CROSSING.search(text)
    return len(text[crossing.start() :].encode()) if crossing else 0
