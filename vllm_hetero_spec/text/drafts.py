# SPDX-License-Identifier: Apache-2.0
"""Translation of drafts into target ids.

The target's encoding of a text depends on the text before it. The drafted bytes are therefore
encoded together with the last word of the context, the anchor. If the encoding has a token boundary
at the end of the anchor, the ids after it are the draft. If a token spans that place, the drafted
bytes are encoded alone, because the target has already ended its token there.
"""

from codecs import utf_8_decode
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.text.retokenization import TextContext
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

ANCHOR_TOKENS = 8  # target tokens of an anchor at most
MEMO_PAIRS = 1 << 18  # pairs of last target id and drafter id whose `may_follow` is cached
# Stands for the word after white space, because pre-tokenizers often give it the last space.
_WORD = "a"
# Kinds of `_starts`: the token begins with a space, inside a character, or is no text.
_SPACE, _INSIDE, _CONTROL = 1, 2, 3


class _Stretch(NamedTuple):
    """Text of a draft between two control tokens."""

    place: int  # index of the draft in the batch
    anchor: list[int]  # target ids before the data
    data: bytes  # drafted bytes
    text: str  # of anchor and data
    control: int | None  # control token of the target after the text


class FirstToken(NamedTuple):
    """First token of a draft.

    Attributes:
        id: Drafter id.
        known: If the token replaces the last token of the text: number of its leading bytes that
            the text already has. 0 if the token follows the text.
        among: Indices of all candidates that could replace the last token.
    """

    id: int
    known: int = 0
    among: Sequence[int] = ()


class DraftTranslator:
    """Implements `Bridge` methods for drafts. A draft that cannot be translated is only counted."""

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        special: SpecialTokens,
        failures: Counter[str],
    ) -> None:
        self._target, self._special, self._failures = target, special, failures
        # Bytes of a drafter token that is text, or None for any other id.
        self._piece = {
            token_id: piece
            for token_id, piece in enumerate(drafter.token_bytes)
            if token_id not in special.drafter_control
        }.get
        self._same = target.fingerprint == drafter.fingerprint
        self._spaces_behind_control = (
            target.leading_space.applies(first=False),
            drafter.leading_space.applies(first=False),
        )
        self._parted = lru_cache(MEMO_PAIRS)(self._splits)
        self._inner_pairs = _inner_pairs(target.token_bytes)
        self._starts = _starts(target.token_bytes, special.target_control)

    def may_follow(self, context: TextContext, drafter_id: int, known: int) -> bool:
        if self._same:
            return True
        if not context.held:
            last = context.target_ids[-1] if context.target_ids else -1
            return self._parted(last, drafter_id, known)
        piece = self._piece(drafter_id)
        if piece is None:
            return False
        data = piece[known:]
        return data.startswith(context.held) or context.held.startswith(data)

    def _splits(self, last: int, drafter_id: int, known: int) -> bool:
        """Return True if the target's encoding of `last` and the drafter token separates them.

        If it does not, no encoding of a longer text continues `last` with the drafter token. With
        BPE the same neighbors would merge in the whole text. With Unigram a better segmentation of
        a stretch would improve the whole text. Equal scores, as of l|ll and ll|l, may be decided
        either way. The reverse does not hold: with more text, a token may span the place between
        the two. A drafter token need not end where a target token ends, and some pre-tokenizers
        give the last of several spaces to the next word. The result is therefore only a heuristic
        for the first token of a draft, and verification does not depend on it.

        Args:
            last: Target id, or -1 if there is none.
            drafter_id: Any number, because rows of an embedding may have no token.
        """
        piece = self._piece(drafter_id)
        if piece is None:
            return drafter_id in self._special.proposed
        if last < 0 or last in self._special.target_control:
            return True
        data = piece[known:]
        if not self._inner_pairs[self._target.token_bytes[last][-1] << 8 | data[0]]:
            return True  # no target token has these two bytes side by side
        left = len(self._target.token_bytes[last])
        text, used = utf_8_decode(self._target.token_bytes[last] + data, "surrogateescape", False)
        if used <= left:
            return True  # the drafter token is only the beginning of a character
        if data.isspace():
            text += _WORD
        sizes = (len(self._target.token_bytes[token_id]) for token_id in self._target.encode(text))
        return left in accumulate(sizes)

    def longer_last(self, context: TextContext, candidates: Sequence[int]) -> FirstToken | None:
        last = self._piece(context.ids[-1]) if context.ids else None
        if self._same or not last or context.held:
            return None
        if context.target_ids[-1] in self._special.target_control:
            return None  # a control token stands between the last text and the draft
        among: list[int] = []
        for place, drafter_id in enumerate(candidates):
            piece = self._piece(drafter_id)
            if piece is None or not piece.startswith(last):
                continue
            if len(piece) == len(last):
                if not among:
                    return None
                among.append(place)
            elif self.may_follow(context, drafter_id, len(last)):
                among.append(place)
        return FirstToken(candidates[among[0]], len(last), among) if among else None

    def translate(
        self,
        contexts: Sequence[TextContext],
        drafts: Sequence[Sequence[int]],
        limits: Sequence[int],
        known: Sequence[int] = (),
    ) -> list[list[int]]:
        """Implement `Bridge.to_target`."""
        results: list[list[int]] = [[] for _ in contexts]
        stretches = [
            stretch
            for index, (context, draft) in enumerate(zip(contexts, drafts, strict=True))
            if limits[index] > 0 and not context.broken
            for stretch in self._stretches(index, context, draft, known[index] if known else 0)
        ]
        cut: set[int] = set()  # drafts with a stretch that target tokens do not spell completely
        for stretch, ids in zip(stretches, self._encoded(stretches), strict=True):
            index, room = stretch.place, limits[stretch.place] - len(results[stretch.place])
            if index in cut or not room:
                continue
            spelled, whole = self._checked(ids, stretch, room)
            results[index] += spelled
            if not whole:
                cut.add(index)
                if not spelled:
                    self._failures["unencodable"] += 1
            elif stretch.control is not None and len(spelled) < room:
                results[index].append(stretch.control)
        return results

    def ids_covering(self, draft: Sequence[int], proposal: Sequence[int], known: int) -> list[int]:
        covering = []
        count, spare = 0, -known  # draft ids so far, and their surplus bytes over the proposal
        table, controls = self._target.token_bytes, self._special.target_control
        pieces = [*map(self._piece, draft)]
        for token_id in proposal:
            control = token_id in controls
            size = 0 if control else len(table[token_id])
            while (control or spare < size) and count < len(draft):
                if (piece := pieces[count]) is None:
                    break
                spare += len(piece)
                count += 1
            if control:
                target_space, drafter_space = self._spaces_behind_control
                count, spare = min(count + 1, len(draft)), target_space - drafter_space
            spare -= size
            covering.append(count)
        return covering

    def _stretches(
        self, index: int, context: TextContext, draft: Sequence[int], known_bytes: int
    ) -> Iterator[_Stretch]:
        held, anchor = context.held, self._anchor(context.target_ids)
        target_space, drafter_space = context.untouched
        for drafted, control in self._parts(draft):
            data, known_bytes = drafted[known_bytes:], 0
            # Replace the leading space of the drafter's tokenizer by that of the target's.
            if drafter_space and data:
                data = data.removeprefix(b" ")
            if target_space and data:
                data = b" " + data
            if not data.startswith(held):
                if not held.isspace():
                    self._failures["held_mismatch"] += 1
                return
            data = data[len(held) :]
            known = self._target.decode_bytes(anchor)
            text, used = utf_8_decode(known + data, "surrogateescape", False)
            whole = used - len(known) == len(data)
            if not whole:  # the data end inside a character
                data, control = data[: max(used - len(known), 0)], None
            if data or control is not None:
                yield _Stretch(index, anchor, data, text, control)
            if not whole:
                return
            held, anchor = b"", []
            target_space, drafter_space = self._spaces_behind_control

    def _parts(self, draft: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
        """Yield the bytes before each control token, and the target id that the token proposes.

        Stop at an EOS or at a token that proposes nothing.
        """
        data, piece_of = b"", self._piece
        for token_id in draft:
            if (piece := piece_of(token_id)) is not None:
                data += piece
                continue
            if token_id not in self._special.drafter_control:
                self._failures["unknown_id"] += 1
            control = self._special.proposed.get(token_id)
            yield data, control
            if control is None or token_id in self._special.drafter_eos:
                return
            data = b""
        yield data, None

    def _encoded(self, stretches: Sequence[_Stretch]) -> list[list[int]]:
        encoded = self._target.encode_batch([stretch.text for stretch in stretches])
        starts = [self._boundary(*pair) for pair in zip(encoded, stretches, strict=True)]
        alone = [place for place, start in enumerate(starts) if start is None]
        texts = [stretches[place].data.decode("utf-8", "surrogateescape") for place in alone]
        drafted = [ids[start:] for ids, start in zip(encoded, starts, strict=True)]
        for place, ids in zip(alone, self._target.encode_batch(texts), strict=True):
            drafted[place] = ids
        return drafted

    def _anchor(self, target_ids: Sequence[int]) -> list[int]:
        """Return the last ids from the start of a word, at most ANCHOR_TOKENS, no control ids."""
        starts, table, start = self._starts, self._target.token_bytes, len(target_ids)
        furthest = max(0, start - ANCHOR_TOKENS)
        while start > furthest:
            kind = starts[target_ids[start - 1]]
            if kind == _CONTROL:
                break
            start -= 1
            if kind == _SPACE and start and not table[target_ids[start - 1]][-1:].isspace():
                break
        while start < len(target_ids) and starts[target_ids[start]] == _INSIDE:
            start += 1
        return list(target_ids[start:])

    def _boundary(self, ids: list[int], stretch: _Stretch) -> int | None:
        """Return the index in ids at which the data begin, or None if a token spans that place."""
        count = len(stretch.anchor)
        if ids[:count] == stretch.anchor:
            return count
        place = len(self._target.decode_bytes(stretch.anchor))
        sizes = (len(self._target.token_bytes[token_id]) for token_id in ids)
        ends = [*accumulate(sizes, initial=0)]
        return ends.index(place) if place in ends else None

    def _checked(self, ids: Sequence[int], stretch: _Stretch, limit: int) -> tuple[list[int], bool]:
        """Return the longest prefix of ids that spells drafted bytes, and True if it spells all."""
        proposal: list[int] = []
        position, data = 0, stretch.data
        table, control = self._target.token_bytes, self._special.target_control
        for token_id in ids[:limit]:
            piece = table[token_id]
            if token_id in control or not data.startswith(piece, position):
                break
            position += len(piece)
            proposal.append(token_id)
        return proposal, position == len(data)


def _inner_pairs(table: Sequence[bytes]) -> bytes:
    """Return a table, by first byte << 8 | second byte: 1 if some token has these neighbors."""
    data = np.frombuffer(b"".join(table), np.uint8).astype(np.int32)
    pairs = data[:-1] << 8 | data[1:]
    ends = np.cumsum([len(token) for token in table]) - 1  # indices of pairs across two tokens
    inner = np.delete(pairs, np.unique(ends[(ends >= 0) & (ends < len(pairs))]))
    return np.bincount(inner, minlength=1 << 16).astype(bool).tobytes()


def _starts(table: Sequence[bytes], control: Collection[int]) -> bytes:
    """Return the kind of each target id, or 0. UNKNOWN_ID (-1) indexes the last entry."""
    kinds = bytearray(max(len(table), *control) + 2)
    for token_id, piece in enumerate(table):
        if piece:
            kinds[token_id] = _SPACE * (piece[0] == 0x20) + _INSIDE * (0x80 <= piece[0] < 0xC0)
    for token_id in control:
        kinds[token_id] = _CONTROL
    return bytes(kinds)
