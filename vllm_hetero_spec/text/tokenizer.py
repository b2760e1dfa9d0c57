# SPDX-License-Identifier: Apache-2.0
"""A tokenizer as the bridge sees it: token ids and the exact bytes they stand for."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SpaceScope = Literal["none", "first", "always"]

# Undecodable bytes travel through Python strings as lone surrogates (PEP 383, "surrogateescape").
_ESCAPED = re.compile("[\ud800-\udfff]+")
_CROSSING = re.compile(r"(?<=\S) ")


class UnsupportedTokenizer(ValueError):
    """A tokenizer whose bytes cannot be known exactly; the message says what to use instead."""


@dataclass(frozen=True)
class LeadingSpace:
    """When a tokenizer itself puts a space before text.

    ``scope``: never, before the first text of a sequence only, or before every stretch of text
    between special tokens. ``unless_present``: not where the text already starts with a space.
    """

    scope: SpaceScope = "none"
    unless_present: bool = False

    def applies(self, *, first: bool) -> bool:
        return self.scope == "always" or (self.scope == "first" and first)


@dataclass(eq=False, repr=False)
class TextTokenizer:
    """Token ids and exact bytes of one tokenizer, with an encoder that adds nothing of its own.

    ``encode`` is raw: no BOS or EOS, no dummy prefix, and text that merely looks like a special
    token stays text. Lone surrogates U+DC80..U+DCFF in the text stand for undecodable bytes and are
    spelled by ``byte_ids``; bytes no token spells are dropped and counted in ``dropped_bytes``.
    """

    name: str
    token_bytes: list[bytes]  # one entry per id; b"" for special tokens and holes
    special_text: Mapping[int, str]  # content of each special token
    special_ids: frozenset[int]  # special tokens and holes
    byte_ids: tuple[int, ...]  # 256 ids, -1 where no token spells that byte alone
    fingerprint: str
    raw_encode: Callable[[str], list[int]]
    raw_encode_batch: Callable[[Sequence[str]], list[list[int]]]
    bos_id: int | None = None
    adds_bos: bool = False
    eos_id: int | None = None
    leading_space: LeadingSpace = LeadingSpace()
    dropped_bytes: int = 0

    def __post_init__(self) -> None:
        self.special_id_of = {text: token_id for token_id, text in self.special_text.items()}
        self.crossing_reach = max(map(_bytes_past_crossing, self.token_bytes), default=0)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.name!r}, {self.vocab_size} ids)"

    @property
    def vocab_size(self) -> int:
        """Number of ids (largest id + 1)."""
        return len(self.token_bytes)

    @property
    def dummy_prefix(self) -> bool:
        """Whether the tokenizer itself puts a space before the first text."""
        return self.leading_space.scope != "none"

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; see the class for what raw means."""
        return self._encode_escaped(text) if _ESCAPED.search(text) else self.raw_encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        if _ESCAPED.search("".join(texts)):
            return [self._encode_escaped(text) for text in texts]
        return self.raw_encode_batch(texts)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes: valid UTF-8 by ``encode``, the rest byte by byte."""
        return self.encode(data.decode("utf-8", "surrogateescape"))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Concatenated bytes of ``ids``; special tokens contribute nothing."""
        return b"".join([self.token_bytes[token_id] for token_id in ids])

    def _encode_escaped(self, text: str) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in _ESCAPED.finditer(text):
            ids += self.raw_encode(text[position : match.start()])
            spelled = [_byte_of(char) for char in match.group()]
            known = [self.byte_ids[byte] for byte in spelled if byte is not None]
            kept = [token_id for token_id in known if token_id >= 0]
            self.dropped_bytes += len(spelled) - len(kept)
            ids += kept
            position = match.end()
        return ids + self.raw_encode(text[position:])


def _byte_of(surrogate: str) -> int | None:
    byte = ord(surrogate) - 0xDC00
    return byte if 0x80 <= byte <= 0xFF else None


def _bytes_past_crossing(data: bytes) -> int:
    """How far a token reaches past the first place where a space follows something else."""
    if b" " not in data[1:]:
        return 0
    text = data.decode("utf-8", "replace")
    crossing = _CROSSING.search(text)
    return len(text[crossing.start() :].encode()) if crossing else 0
