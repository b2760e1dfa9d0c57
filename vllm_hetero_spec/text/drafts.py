# SPDX-License-Identifier: Apache-2.0
"""Drafted ids as target ids, anchored in the target's own last tokens.

A target rarely has the same token for a stretch of text wherever it stands, so the drafted bytes
are encoded together with the word they continue. Where that encoding has a boundary exactly at the
end of the known text, what follows is the draft; where a token spans that place the known text is
not what the target would have written in one go, and the drafted bytes are encoded alone.
"""

from codecs import utf_8_decode
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.text.retokenization import TextContext
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

ANCHOR_TOKENS = 8
# Pairs of a target and a drafter token that may_follow remembers.
MEMO_PAIRS = 1 << 18
# Stands for the word behind white space, which often has the last of it.
_WORD = "a"
# How a token begins, where it matters: see `_starts`.
_SPACE, _INSIDE, _CONTROL = 1, 2, 3


class _Stretch(NamedTuple):
    """Text of a draft between two control tokens.

    Attributes:
        place: The draft's, in the batch.
        anchor: Target ids that spell the bytes before `data`.
        data: Drafted bytes.
        text: Anchor and data.
        control: The target's control token behind the text, None where there is none.
    """

    place: int
    anchor: list[int]
    data: bytes
    text: str
    control: int | None


class FirstToken(NamedTuple):
    """What a draft begins with.

    Attributes:
        id: A drafter id.
        known: Leading bytes of it that the text has already, as its last token: it takes the place
            of that. 0 where it stands behind the text.
        among: Places, among the candidates for that, of all that would have done.
    """

    id: int
    known: int = 0
    among: Sequence[int] = ()


class DraftTranslator:
    """Turns the drafts of a batch into target ids; never raises for a draft it cannot turn."""

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        special: SpecialTokens,
        failures: Counter[str],
    ) -> None:
        self._target, self._drafter = target, drafter
        self._special, self._failures = special, failures
        # The bytes of a drafter token that is text; None for any other id.
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
        """See `Bridge.may_follow`."""
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
        """Whether the target, given the bytes of `last` and of a drafter token alone, parts them.

        If not, then no text of the target goes on with tokens that spell the latter after `last`.
        For a stretch of tokens of a longer text is what the target makes of the stretch alone: BPE
        would merge the same neighbours in the whole, and a segmentation of the stretch that a
        Unigram model scores higher would raise the score of the whole. (Equal scores, as of l|ll
        and ll|l, may be decided either way.) The reverse does not hold: with more text before or
        behind, a token may span a place where these two are parted. Nor does a drafter token need
        to end where one of the target does, and some pre-tokenizers look further: they give the
        last of several spaces to the word behind them, so that spaces are judged with a word. So
        this is advice with which a draft begins; what is proposed is verified whatever it says.

        Args:
            last: Target id; -1 for none.
            drafter_id: Any number: rows of an embedding may have no token.
            known: Leading bytes of the drafter token that the target has written already.
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
            return True  # nothing but the beginning of a character follows
        if data.isspace():
            text += _WORD
        for token_id in self._target.encode(text):
            left -= len(self._target.token_bytes[token_id])
            if left <= 0:
                break
        return left == 0

    def longer_last(self, context: TextContext, candidates: Sequence[int]) -> FirstToken | None:
        """See `Bridge.longer_last`."""
        last = self._piece(context.ids[-1]) if context.ids else None
        if self._same or not last or context.held:
            return None
        if context.target_ids[-1] in self._special.target_control:
            return None  # it stands between the last text and what follows
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
        """Target ids for each request's drafted ids: see `Bridge.to_target`."""
        results: list[list[int]] = [[] for _ in contexts]
        stretches = [
            stretch
            for index, (context, draft) in enumerate(zip(contexts, drafts, strict=True))
            if limits[index] > 0 and not context.broken
            for stretch in self._stretches(index, context, draft, known[index] if known else 0)
        ]
        cut: set[int] = set()  # drafts of which the target's tokens have not spelled all so far
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
        """See `Bridge.ids_covering`."""
        covering = []
        count, spare = 0, -known  # drafted ids so far, and their bytes beyond those of the proposal
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
            if drafter_space and data:  # the drafter's own space before text out, the target's in
                data = data.removeprefix(b" ")
            if target_space and data:
                data = b" " + data
            if not data.startswith(held):
                self._failures["held_mismatch"] += 1
                return
            data = data[len(held) :]
            known = self._target.decode_bytes(anchor)
            text, used = utf_8_decode(known + data, "surrogateescape", False)
            whole = used - len(known) == len(data)
            if not whole:  # the beginning of a character
                data, control = data[: max(used - len(known), 0)], None
            if data or control is not None:
                yield _Stretch(index, anchor, data, text, control)
            if not whole:
                return
            held, anchor = b"", []
            target_space, drafter_space = self._spaces_behind_control

    def _parts(self, draft: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
        """Bytes up to each control token, with what it proposes; ends with the draft or its EOS."""
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
        """Target ids of the data of each stretch."""
        encoded = self._target.encode_batch([stretch.text for stretch in stretches])
        starts = [self._boundary(*pair) for pair in zip(encoded, stretches, strict=True)]
        alone = [place for place, start in enumerate(starts) if start is None]
        if not alone:
            return [ids[start:] for ids, start in zip(encoded, starts, strict=True)]
        texts = [stretches[place].data.decode("utf-8", "surrogateescape") for place in alone]
        ids_of = [ids[start:] for ids, start in zip(encoded, starts, strict=True)]
        for place, ids in zip(alone, self._target.encode_batch(texts), strict=True):
            ids_of[place] = ids
        return ids_of

    def _anchor(self, target_ids: Sequence[int]) -> list[int]:
        """The last target ids, back to the start of a word, a control token or ANCHOR_TOKENS."""
        starts, start = self._starts, len(target_ids)
        furthest = max(0, start - ANCHOR_TOKENS)
        while start > furthest:
            kind = starts[target_ids[start - 1]]
            if kind == _CONTROL:
                break
            start -= 1
            if kind == _SPACE and start and not self._ends_in_space(target_ids[start - 1]):
                break
        while start < len(target_ids) and starts[target_ids[start]] == _INSIDE:
            start += 1
        return list(target_ids[start:])

    def _ends_in_space(self, token_id: int) -> bool:
        return self._target.token_bytes[token_id][-1:].isspace()

    def _boundary(self, ids: list[int], stretch: _Stretch) -> int | None:
        """Index in ids where the drafted text starts, None where a token spans that place."""
        count = len(stretch.anchor)
        if ids[:count] == stretch.anchor:
            return count
        left = len(self._target.decode_bytes(stretch.anchor))
        for index, token_id in enumerate(ids):
            if left <= 0:
                return index if left == 0 else None
            left -= len(self._target.token_bytes[token_id])
        return len(ids) if left == 0 else None

    def _checked(self, ids: Sequence[int], stretch: _Stretch, limit: int) -> tuple[list[int], bool]:
        """The longest prefix of ids that is text and spells drafted bytes; whether all of them."""
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
    """For each two bytes, first << 8 | second, whether some token has them side by side."""
    data = np.frombuffer(b"".join(table), np.uint8).astype(np.int32)
    pairs = data[:-1] << 8 | data[1:]
    ends = np.cumsum([len(token) for token in table]) - 1  # pairs that straddle two tokens
    inner = np.delete(pairs, np.unique(ends[(ends >= 0) & (ends < len(pairs))]))
    return np.bincount(inner, minlength=1 << 16).astype(bool).tobytes()


def _starts(table: Sequence[bytes], control: Collection[int]) -> bytes:
    """How each target token begins: with a space, inside a character, or otherwise; and which are
    no text. UNKNOWN_ID has the last place."""
    kinds = bytearray(max(len(table), *control) + 2)
    for token_id, piece in enumerate(table):
        if piece:
            kinds[token_id] = _SPACE * (piece[0] == 0x20) + _INSIDE * (0x80 <= piece[0] < 0xC0)
    for token_id in control:
        kinds[token_id] = _CONTROL
    return bytes(kinds)
