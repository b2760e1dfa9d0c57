# SPDX-License-Identifier: Apache-2.0
"""Incremental translation of a request's target ids into drafter ids.

New text is encoded together with the tail only. The ids before the cut are frozen, so the cost of a
step does not depend on the context length. The cut moves to a space after a non-space if encoding
from there gives the same ids. If there are too many drafter ids, the last half of the maximum is
kept. This leaves room to grow, and the drafter reads each id about twice.
"""

from codecs import utf_8_decode
from collections import Counter
from collections.abc import Sequence

from vllm_hetero_spec.text import cuts
from vllm_hetero_spec.text.chat_bridge import ChatTemplateBridge, Marker, Piece
from vllm_hetero_spec.text.special_tokens import UNKNOWN_ID, SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Target ids of a prompt that are translated per drafter id kept, and an estimate of bytes per id.
_PROMPT, _TOKEN_BYTES = 2, 4
_TARGET = 8  # target ids stored per drafter id kept; limits memory if text gives few drafter ids
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that do not begin a character


class TextContext:
    """Context for different tokenizers, for the lifetime of one request.

    After `commit_prefix`, the ids before the cut are frozen and the others encode `tail`, the text
    after the cut. Undecodable bytes in it are lone surrogates.
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
        self._begun = b""  # first bytes of a character
        self._space = b""  # the last space of the tail if it is kept for the next word
        self.num_dropped = 0
        self._longest, self._begins = longest, len(self.ids)  # leading ids that are never dropped
        self._target_dropped = 0
        self._cut, self.tail = len(self.ids), ""
        self._lost = 0  # bytes of the tail already counted as lost
        self._strip_space = target.leading_space.applies(first=True)
        self._add_space = drafter.leading_space.applies(first=True)

    @property
    def held(self) -> bytes:
        return self._space + self._begun

    @property
    def num_target(self) -> int:
        return self._target_dropped + len(self.target_ids)

    @property
    def ratio(self) -> float:
        return len(self.ids) / max(len(self.target_ids), 1)

    @property
    def untouched(self) -> tuple[bool, bool]:
        """For (target, drafter): True if the tokenizer puts a dummy space before the next text."""
        return self._strip_space, self._add_space

    def append(self, target_ids: Sequence[int]) -> int:
        kept = self.take(target_ids)
        return min(kept, self.commit_prefix(self._drafter.encode_batch([self.tail])[0]))

    def take(self, target_ids: Sequence[int]) -> int:
        """Run the first half of `append`. The caller passes ids of `tail` to `commit_prefix`."""
        size = self._target.vocab_size
        if target_ids and not 0 <= min(target_ids) <= max(target_ids) < size:
            target_ids = [i if 0 <= i < size else UNKNOWN_ID for i in target_ids]
            self._failures["unknown_id"] += target_ids.count(UNKNOWN_ID)
        if self.target_ids:
            return self._take_plain(target_ids)
        return self._take_prompt(target_ids)

    def _last_of(self, target_ids: Sequence[int]) -> Sequence[int]:
        """Return the last ids of a prompt, enough for the half of `_longest` that is kept."""
        if self._longest is None or len(target_ids) <= _PROMPT * self._longest:
            return target_ids
        self._target_dropped = len(target_ids) - _PROMPT * self._longest
        return target_ids[self._target_dropped :]

    def _take_prompt(self, target_ids: Sequence[int]) -> int:
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
        """Limit the pieces of a prompt to the last ones, as `_last_of` limits ids."""
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
        control, kept, start = self._special.target_control, len(self.ids), 0
        # Take runs between control tokens: one id at a time would copy a prompt's text for each id.
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
        """Run the second half of `append`, with the drafter's ids of `tail`. Return its c."""
        self._count_lost(tail_ids)
        self._space = b""
        tail_ids = self._split_as_target(tail_ids)
        kept = self._replace_tail(tail_ids)
        if len(tail_ids) > cuts.TAIL_TOKENS or len(self.tail) > cuts.TAIL_CHARACTERS:
            cut = self._cut
            kept = min(kept, self._advance(tail_ids))
            if self._lost and self._cut > cut:
                lost = self._drafter.lost_bytes(self.tail, self.ids[self._cut :])
                self._lost = max(lost - len(self._space), 0)
        if self._longest is None:
            return kept
        if len(self.ids) > self._longest:
            self._drop(self._longest // 2)
            kept = self._begins
        if len(self.target_ids) > _TARGET * self._longest:
            self._drop_target(len(self.target_ids) // 2)
        return kept

    def _drop(self, keep: int) -> None:
        """Keep about the last `keep` ids, and the same share of the target ids."""
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
        """Count each byte that the drafter's ids of the tail lack as one failure, once."""
        lost = self._drafter.lost_bytes(self.tail, tail_ids)
        if lost > self._lost:
            self._failures["unencodable"] += lost - self._lost
            self._lost = lost

    def _split_as_target(self, tail_ids: Sequence[int]) -> Sequence[int]:
        """Encode a tail that ends in white space as if a word followed, if that is likely.

        Pre-tokenizers give the last space of a run to the next word. At the end of a text the run
        becomes one token, after which the drafter expects more white space. The run is complete if
        the target split what it could write as one token, and most likely behind a paragraph. It is
        also complete if the target writes it apart from a word, as Gemma writes an indentation. The
        last space is then held, because the drafter's next token begins with it.
        """
        if not tail_ids or not self.tail[-1].isspace() or self.target_ids[-1] == UNKNOWN_ID:
            return tail_ids
        text = self.tail.rstrip()
        run, line = self.tail[len(text) :], text.rpartition("\n")[2]
        if self._target_writes_apart(run):
            followed = self._drafter.encode(self.tail + cuts.ANY_WORD)
            if self._word_of(followed) == b" " + cuts.ANY_WORD.encode():
                self._space = b" "
                return followed[:-1]
        if not run.endswith("\n\n") or line[:1].isspace():
            ours = self._drafter.token_bytes[tail_ids[-1]]
            theirs = self._target.token_bytes[self.target_ids[-1]]
            if len(ours) <= len(theirs) or not theirs.isspace():
                return tail_ids
            joined = self._target.encode(run)
            if not joined or len(self._target.token_bytes[joined[-1]]) <= len(theirs):
                return tail_ids
        followed = self._drafter.encode(self.tail + cuts.ANY_WORD)
        return followed[:-1] if self._word_of(followed) == cuts.ANY_WORD.encode() else tail_ids

    def _word_of(self, ids: Sequence[int]) -> bytes:
        return self._drafter.token_bytes[ids[-1]] if ids else b""

    def _target_writes_apart(self, run: str) -> bool:
        """Return True if the target ends white space with its last token, whatever word follows."""
        if run[-1] != " ":
            return False
        last = self._target.encode(run + cuts.ANY_WORD)[-2:]
        return last[0] == self.target_ids[-1] and (
            self._target.token_bytes[last[-1]] == cuts.ANY_WORD.encode()
        )

    def _take_bytes(self, data: bytes) -> None:
        if not data:
            return
        if self._strip_space:
            self._strip_space = False
            data = data.removeprefix(b" ")
        data = self._begun + data
        text, used = utf_8_decode(data, "surrogateescape", False)
        self._begun = data[used:]
        self._take_text(text)

    def _take_text(self, text: str) -> None:
        if text and self._add_space:
            self._add_space = False
            if not (self._drafter.leading_space.unless_present and text[0] == " "):
                text = " " + text
        self.tail += text

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
        self._take_text(self._begun.decode("utf-8", "surrogateescape"))
        self._begun = self._space = b""
        tail_ids = self._drafter.encode_batch([self.tail])[0]
        self._count_lost(tail_ids)
        kept = self._replace_tail(tail_ids)
        self.ids.append(drafter_id)
        self._cut, self.tail, self._lost = len(self.ids), "", 0
        self._add_space = self._drafter.leading_space.applies(first=False)
        return kept

    def _take_marker(self, marker: Marker) -> None:
        self._strip_space = False
        for atom in marker.atoms:
            if isinstance(atom, bytes):
                self._take_bytes(atom)
            elif [atom] == self.ids and atom == self._drafter.bos_id and not self.tail:
                self._add_space = self._drafter.leading_space.applies(first=False)
            else:
                self._take_special(atom)
        self._strip_space = marker.target_space
        self._add_space |= marker.drafter_space

    def _replace_tail(self, tail_ids: Sequence[int]) -> int:
        pairs = enumerate(zip(self.ids[self._cut :], tail_ids, strict=False), self._cut)
        shorter = min(len(self.ids), self._cut + len(tail_ids))
        kept = next((at for at, (old, new) in pairs if old != new), shorter)
        self.ids[kept:] = tail_ids[kept - self._cut :]
        return kept

    def _advance(self, tail_ids: Sequence[int]) -> int:
        """Move the cut towards the end of the tail. Return the number of unchanged leading ids."""
        at = cuts.word_cut(self._drafter, self.tail)
        if not at or not self._cut_at(at, tail_ids):
            at = cuts.spaceless_cut(self._drafter, self.tail, tail_ids)
            if (not at or not self._cut_at(at, tail_ids)) and len(self.tail) > cuts.TAIL_CHARACTERS:
                return self._force_cut()
        return len(self.ids)

    def _cut_at(self, at: int, tail_ids: Sequence[int]) -> bool:
        if self._space:  # as `_split_as_target` encodes the tail
            right = self._drafter.encode(self.tail[at:] + cuts.ANY_WORD)[:-1]
        else:
            right = self._drafter.encode_batch([self.tail[at:]])[0]
        if not right or list(tail_ids[-len(right) :]) != right:
            return False
        self._cut += len(tail_ids) - len(right)
        self.tail = self.tail[at:]
        return True

    def _force_cut(self) -> int:
        at = cuts.forced_cut(self._drafter, self.tail)
        left, right = self._drafter.encode_batch([self.tail[:at], self.tail[at:]])
        kept = self._replace_tail([*left, *right])
        self._cut += len(left)
        self.tail, self._space = self.tail[at:], b""
        return kept
