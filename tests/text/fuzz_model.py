# SPDX-License-Identifier: Apache-2.0
"""Model of the token bridge: reads a whole target sequence at once, and drafts by their bytes.

The model is not incremental. It shares only the tokenizers and the roles of special tokens with the
bridge.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import NamedTuple
from unicodedata import combining

from fuzz_cases import Case, arbitrary_id

from vllm_hetero_spec.text import drafts
from vllm_hetero_spec.text.bridge import TextBridge, make_bridge
from vllm_hetero_spec.text.special_tokens import UNKNOWN_ID, SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer


class Violation(AssertionError):
    """An invariant of the bridge does not hold."""


def require(holds: bool, what: str, *details: object) -> None:
    if not holds:
        raise Violation(f"{what}: " + ", ".join(map(repr, details)))


class Scratch(NamedTuple):
    """Expected content of a context, read from the whole target sequence."""

    closed: list[tuple[str, int]]  # a text and the special token of the drafter that ends it
    text: str  # the text after the last special token
    held: bytes
    untouched: tuple[bool, bool]


class Pair:
    """A bridge and its model."""

    def __init__(self, target: TextTokenizer, drafter: TextTokenizer) -> None:
        bridge = make_bridge(target, drafter, mode="text")
        assert isinstance(bridge, TextBridge)
        self.bridge, self.target, self.drafter = bridge, target, drafter
        self.special = SpecialTokens(target, drafter, None, None)

    def ids_of(self, case: Case) -> list[int]:
        """Return the target ids of a case, with the spaces that the tokenizer puts before text."""
        ids: list[int] = []
        for stretch in case.stretches:
            if isinstance(stretch, bytes):
                last = ids[-1] if ids else None
                begins = last is None or last in self.special.target_control
                leading = self.target.leading_space
                present = leading.unless_present and stretch.startswith(b" ")
                if begins and not present and leading.applies(first=last is None):
                    stretch = b" " + stretch
                encoded = self.target.encode_bytes(stretch)
                require_spelled(self.target, encoded, stretch.decode("utf-8", "surrogateescape"))
                ids += encoded
            else:
                ids += [arbitrary_id(self.target, *drawn) for drawn in stretch]
        return ids

    def scratch(self, target_ids: Sequence[int]) -> Scratch:
        """Return the texts between control tokens, each one to be encoded as a whole."""
        target, drafter = self.target, self.drafter
        strip = target.leading_space.applies(first=True)
        add = drafter.leading_space.applies(first=True)
        closed: list[tuple[str, int]] = []
        data = b""
        for place, token_id in enumerate(target_ids):
            known = token_id if 0 <= token_id < target.vocab_size else UNKNOWN_ID
            mapped: int | bytes = b""
            if known not in self.special.target_control:
                mapped = target.token_bytes[known]
            elif place == 0 and known == target.bos_id:
                continue
            else:
                mapped = self.special.to_drafter(known)
            if isinstance(mapped, int):
                text = self._text(data.decode("utf-8", "surrogateescape"), add)
                closed.append((text, mapped))
                data, add = b"", drafter.leading_space.applies(first=False)
            elif mapped:
                data += mapped.removeprefix(b" ") if strip else mapped
                strip = False
            if known in self.special.target_control:
                strip = target.leading_space.applies(first=False)
        held = incomplete(data)
        complete = data[: len(data) - len(held)].decode("utf-8", "surrogateescape")
        text = self._text(complete, add)
        return Scratch(closed, text, held, (strip, add and not complete))

    def first_ids(self) -> list[int]:
        """Return the drafter ids before any text."""
        bos = self.drafter.bos_id
        return [bos] if self.drafter.adds_bos and bos is not None else []

    def whole(self, scratch: Scratch) -> list[int]:
        """Return the drafter ids of the whole sequence."""
        ids = self.first_ids()
        for text, control in scratch.closed:
            ids += [*self.drafter.encode(text), control]
        return ids + self.drafter.encode(scratch.text)

    def _text(self, text: str, add: bool) -> str:
        present = self.drafter.leading_space.unless_present and text.startswith(" ")
        return " " + text if add and text and not present else text


def require_spelled(tokenizer: TextTokenizer, ids: Sequence[int], *texts: str) -> None:
    """Require that the ids spell the texts.

    If the vocabulary cannot spell all bytes, the ids must spell a subsequence of them.
    """
    spelled = tokenizer.decode_bytes(ids)
    expected = "".join(map(tokenizer.normalize, texts)).encode("utf-8", "surrogateescape")
    if tokenizer.spells_all:
        require(spelled == expected, "bytes of the ids", spelled, expected)
    else:
        rest = iter(expected)
        require(all(byte in rest for byte in spelled), "bytes of the ids", spelled, expected)


def incomplete(data: bytes) -> bytes:
    """Return the first bytes of an incomplete character at the end of ``data``."""
    return data[utf_8_decode(data, "surrogateescape", False)[1] :]


def anchor_of(pair: Pair, known: Sequence[int]) -> list[int]:
    """Return the ids of the anchor, as documented in `text/drafts.py`.

    It starts at the last beginning of a word, behind the last control token, or ANCHOR_TOKENS ids
    before the end.
    """
    table = pair.target.token_bytes
    start = len(known)
    for start in range(len(known), max(0, len(known) - drafts.ANCHOR_TOKENS) - 1, -1):
        before = known[start - 1] if start else UNKNOWN_ID
        if not 0 <= before < len(table) or before in pair.special.target_control:
            break
        begins_word = start < len(known) and table[known[start]].startswith(b" ")
        if begins_word and not table[before][-1:].isspace():
            break
    while start < len(known) and 0x80 <= table[known[start]][0] < 0xC0:
        start += 1
    return list(known[start:])


def drafted(
    pair: Pair, draft: Sequence[int], untouched: tuple[bool, bool]
) -> list[tuple[bytes, int | None]]:
    """Return the bytes of a draft before each control token, and the target's token for that one.

    The result ends at an EOS, or at the first id that is not text and proposes nothing.
    """
    special, table = pair.special, pair.drafter.token_bytes
    parts: list[tuple[bytes, int | None]] = []
    data, spaces = b"", untouched
    for token_id in [*draft, -1]:
        if 0 <= token_id < len(table) and token_id not in special.drafter_control:
            data += table[token_id]
            continue
        control = special.proposed.get(token_id)
        parts.append((respaced(data, spaces), control))
        if control is None or token_id in special.drafter_eos:
            break
        sides = pair.target, pair.drafter
        data, spaces = b"", tuple(side.leading_space.applies(first=False) for side in sides)
    return parts


def respaced(data: bytes, untouched: tuple[bool, ...]) -> bytes:
    """Return drafted bytes with the target's leading space instead of the drafter's."""
    strip, add = untouched
    data = data.removeprefix(b" ") if add else data
    return b" " + data if strip and data else data


def separable(tokenizer: TextTokenizer, text: str, at: int) -> bool:
    """Return True if both sides of this place can be normalized separately, with any next word."""
    followed = text + "x"
    parts = tokenizer.normalize(followed[:at]) + tokenizer.normalize(followed[at:])
    return parts == tokenizer.normalize(followed) and not combining(text[at])


def endings(drafter: TextTokenizer, text: str) -> list[list[int]]:
    """Return the ids of a text and, if it ends in a space, also its ids before a next word.

    The word may contain the last space.
    """
    found = [drafter.encode(text)]
    if text and text[-1].isspace():
        *followed, word = drafter.encode(text + "x")
        if drafter.token_bytes[word] in (b"x", text[-1].encode() + b"x"):
            found.append(followed)
    return found
