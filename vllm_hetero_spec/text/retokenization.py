# SPDX-License-Identifier: Apache-2.0
"""One request's text as drafter ids, growing with the target's.

Only the open tail is encoded again when text arrives. Everything before the cut is frozen, so a
step costs what its new text costs, whatever the length of the context. The cut moves to a place
where no token and no pre-tokenizer looks across: between a non-space character and a space, after
checking that encoding from there gives the same ids.

A text that outgrows what the drafter is to read goes on from its last part: half of what is kept at
most, so that there is room to grow, and the drafter reads each id about twice.
"""

from codecs import utf_8_decode
from collections import Counter
from collections.abc import Sequence

from vllm_hetero_spec.text import cuts
from vllm_hetero_spec.text.chat_bridge import ChatTemplateBridge, Marker, Piece
from vllm_hetero_spec.text.special_tokens import UNKNOWN_ID, SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Of a prompt, the last so many target ids for each id that is kept are read, in bytes a token.
_PROMPT, _TOKEN_BYTES = 2, 4
# Target ids for each id that is kept, of which half go where text gives few or no drafter ids.
_TARGET = 8
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that begin no character


class TextContext:
    """A context of two different tokenizers.

    Invariant after settle(): ids[:cut] are frozen and ids[cut:] are the drafter's encoding of tail.
    """

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        special: SpecialTokens,
        failures: Counter[str],
        chat: ChatTemplateBridge,
        longest: int | None = None,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._special, self._failures, self._chat = special, failures, chat
        starts_with_bos = drafter.adds_bos and drafter.bos_id is not None
        self.ids: list[int] = [drafter.bos_id] if starts_with_bos else []  # type: ignore[list-item]
        self.target_ids: list[int] = []
        self.broken = False
        self.held = b""
        self.num_dropped = 0
        self._longest, self._begins = longest, len(self.ids)  # ids in front that always stay
        self._target_dropped = 0
        self._cut, self._tail = len(self.ids), ""
        self._lost = 0  # bytes of the tail that are counted as such
        self._strip_space = target.leading_space.applies(first=True)
        self._add_space = drafter.leading_space.applies(first=True)

    @property
    def num_target(self) -> int:
        return self._target_dropped + len(self.target_ids)

    @property
    def ratio(self) -> float:
        return len(self.ids) / max(len(self.target_ids), 1)

    @property
    def tail(self) -> str:
        """Text since the cut; undecodable bytes are lone surrogates."""
        return self._tail

    @property
    def untouched(self) -> tuple[bool, bool]:
        """Whether a dummy space of (target, drafter) is still to come before the next text."""
        return self._strip_space, self._add_space

    def append(self, target_ids: Sequence[int]) -> int:
        """Take in target ids; ids[:c] are unchanged by the call, c is returned."""
        kept = self.take(target_ids)
        return min(kept, self.commit_prefix(self._drafter.encode_batch([self._tail])[0]))

    def take(self, target_ids: Sequence[int]) -> int:
        """First half of append: the text is in tail, to be encoded and handed to settle()."""
        if target_ids and not 0 <= min(target_ids) <= max(target_ids) < self._target.vocab_size:
            target_ids = [self._known(token_id) for token_id in target_ids]
        if self.target_ids:
            return self._take_plain(target_ids)
        if self._chat.active and target_ids:
            return self._take_prompt(target_ids)
        return self._take_plain(self._last_of(target_ids))

    def _last_of(self, target_ids: Sequence[int]) -> Sequence[int]:
        """Of the first ids of a context, those behind which half of what is kept will be found."""
        if self._longest is None or len(target_ids) <= _PROMPT * self._longest:
            return target_ids
        self._target_dropped = len(target_ids) - _PROMPT * self._longest
        return target_ids[self._target_dropped :]

    def _take_prompt(self, target_ids: Sequence[int]) -> int:
        """The first ids of a context: turn markers in them are the drafter's own to the drafter."""
        pieces = self._chat.split(target_ids)
        if pieces is None:
            return self._take_plain(self._last_of(target_ids))
        kept = len(self.ids)
        for piece in self._last_pieces(pieces):
            if isinstance(piece, Marker):
                self._take_marker(piece)
            elif isinstance(piece, bytes):
                self._take_bytes(piece)
            else:
                self._take_control(piece)
        self.target_ids.extend(self._last_of(target_ids))
        return kept

    def _last_pieces(self, pieces: list[Piece]) -> list[Piece]:
        """Of a prompt's pieces, those behind which half of what is kept will be found."""
        if self._longest is None:
            return pieces
        room, at = _PROMPT * _TOKEN_BYTES * self._longest, len(pieces)
        while at and room > 0:
            at -= 1
            piece = pieces[at]
            room -= len(piece) if isinstance(piece, bytes) else 1
        first = pieces[at] if at < len(pieces) else b""
        if room < 0 and isinstance(first, bytes):
            return [first[-room:].lstrip(_CONTINUATION), *pieces[at + 1 :]]
        return pieces[at:]

    def _take_plain(self, target_ids: Sequence[int]) -> int:
        """Ids of a context whose turn markers stay what they are, in runs between control tokens.

        A prompt is one long run: token by token, its text would be copied for each of them.
        """
        control, kept, start = self._special.target_control, len(self.ids), 0
        if not control.isdisjoint(target_ids):
            for at, token_id in enumerate(target_ids):
                if token_id in control:
                    self._take_run(target_ids[start:at])
                    kept = min(kept, self._take_control(token_id))
                    self.target_ids.append(token_id)
                    start = at + 1
        self._take_run(target_ids[start:])
        return kept

    def _take_run(self, target_ids: Sequence[int]) -> None:
        self.target_ids.extend(target_ids)
        self._take_bytes(self._target.decode_bytes(target_ids))

    def commit_prefix(self, tail_ids: Sequence[int]) -> int:
        """Second half of append: the drafter's ids of tail. Returns c of this half."""
        self._count_lost(tail_ids)
        tail_ids = self._split_as_target(tail_ids)
        kept = self._replace_tail(tail_ids)
        if len(tail_ids) > cuts.TAIL_TOKENS or len(self._tail) > cuts.TAIL_CHARACTERS:
            cut = self._cut
            kept = min(kept, self._advance(tail_ids))
            if self._lost and self._cut > cut:
                self._lost = self._drafter.lost_bytes(self._tail, self.ids[self._cut :])
        if self._longest is None:
            return kept
        if len(self.ids) > self._longest:
            self._drop(self._longest // 2)
            kept = self._begins
        if len(self.target_ids) > _TARGET * self._longest:
            self._drop_target(len(self.target_ids) // 2)
        return kept

    def _drop(self, keep: int) -> None:
        """Give up all but about the last `keep` ids, and as much of the target's."""
        size, begins = len(self.ids), self._begins
        start = cuts.fresh_start(
            self._drafter, self.ids, max(size - keep, begins), max(self._cut, begins)
        )
        dropped = start - begins
        del self.ids[begins:start]
        self.num_dropped += dropped
        self._cut -= dropped
        self._drop_target(min(len(self.target_ids) * dropped // size, len(self.target_ids) - 1))

    def _drop_target(self, count: int) -> None:
        self._target_dropped += count
        del self.target_ids[:count]

    def _count_lost(self, tail_ids: Sequence[int]) -> None:
        """Bytes that the drafter's ids of the tail lack are a failure, once each."""
        lost = self._drafter.lost_bytes(self._tail, tail_ids)
        if lost > self._lost:
            self._failures["unencodable"] += lost - self._lost
            self._lost = lost

    def _split_as_target(self, tail_ids: Sequence[int]) -> Sequence[int]:
        """Ids of a tail that ends in space, as if a word followed where the target says so.

        Pre-tokenizers leave the last space of a run to the word after it. At the end of a text no
        word follows, the run becomes one token, and after that the drafter expects more space. A
        target that has split a run which it could have written as one token is done with it.
        """
        if not tail_ids or not self._tail[-1].isspace():
            return tail_ids
        ours = self._drafter.token_bytes[tail_ids[-1]]
        theirs = self._target.token_bytes[self.target_ids[-1]]
        if len(ours) <= len(theirs) or not theirs.isspace():
            return tail_ids
        run = self._tail[len(self._tail.rstrip()) :]
        joined = self._target.encode(run)
        if not joined or len(self._target.token_bytes[joined[-1]]) <= len(theirs):
            return tail_ids
        followed = self._drafter.encode(self._tail + cuts.ANY_WORD)
        ends_in_word = (
            followed and self._drafter.token_bytes[followed[-1]] == cuts.ANY_WORD.encode()
        )
        return followed[:-1] if ends_in_word else tail_ids

    def _known(self, token_id: int) -> int:
        if 0 <= token_id < self._target.vocab_size:
            return token_id
        self._failures["unknown_id"] += 1
        return UNKNOWN_ID

    def _take_bytes(self, data: bytes) -> None:
        if not data:
            return
        if self._strip_space:
            self._strip_space = False
            data = data.removeprefix(b" ")
        data = self.held + data
        text, used = utf_8_decode(data, "surrogateescape", False)
        self.held = data[used:]
        self._take_text(text)

    def _take_text(self, text: str) -> None:
        if text and self._add_space:
            self._add_space = False
            if not (self._drafter.leading_space.unless_present and text[0] == " "):
                text = " " + text
        self._tail += text

    def _take_control(self, token_id: int) -> int:
        kept = len(self.ids)
        if token_id == self._target.bos_id and not self.target_ids:
            return kept
        mapped = self._special.to_drafter(token_id)
        if isinstance(mapped, bytes):
            self._take_bytes(mapped)
        else:
            kept = self._take_special(mapped)
        self._strip_space = self._target.leading_space.applies(first=False)
        return kept

    def _take_special(self, drafter_id: int) -> int:
        """A special token of the drafter ends the tail."""
        self._take_text(self.held.decode("utf-8", "surrogateescape"))
        self.held = b""
        tail_ids = self._drafter.encode_batch([self._tail])[0]
        self._count_lost(tail_ids)
        kept = self._replace_tail(tail_ids)
        self.ids.append(drafter_id)
        self._cut, self._tail, self._lost = len(self.ids), "", 0
        self._add_space = self._drafter.leading_space.applies(first=False)
        return kept

    def _take_marker(self, marker: Marker) -> None:
        """A turn marker of the target, in the drafter's words."""
        self._strip_space = False
        for atom in marker.atoms:
            if isinstance(atom, bytes):
                self._take_bytes(atom)
            elif [atom] == self.ids and atom == self._drafter.bos_id and not self._tail:
                self._add_space = self._drafter.leading_space.applies(first=False)
            else:
                self._take_special(atom)
        self._strip_space = marker.target_space
        self._add_space |= marker.drafter_space

    def _replace_tail(self, tail_ids: Sequence[int]) -> int:
        kept = self._cut + _common_prefix(self.ids[self._cut :], tail_ids)
        self.ids[kept:] = tail_ids[kept - self._cut :]
        return kept

    def _advance(self, tail_ids: Sequence[int]) -> int:
        """Move the cut towards the end of the tail; returns how many ids stay as they are."""
        at = cuts.word_cut(self._drafter, self._tail)
        if not at or not self._cut_at(at, tail_ids):
            at = cuts.spaceless_cut(self._drafter, self._tail, tail_ids)
            if (not at or not self._cut_at(at, tail_ids)) and len(
                self._tail
            ) > cuts.TAIL_CHARACTERS:
                return self._force_cut()
        return len(self.ids)

    def _cut_at(self, at: int, tail_ids: Sequence[int]) -> bool:
        right = self._drafter.encode_batch([self._tail[at:]])[0]
        if not right or list(tail_ids[-len(right) :]) != right:
            return False
        self._cut += len(tail_ids) - len(right)
        self._tail = self._tail[at:]
        return True

    def _force_cut(self) -> int:
        at = cuts.forced_cut(self._drafter, self._tail)
        left, right = self._drafter.encode_batch([self._tail[:at], self._tail[at:]])
        kept = self._replace_tail([*left, *right])
        self._cut += len(left)
        self._tail = self._tail[at:]
        return kept


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))
