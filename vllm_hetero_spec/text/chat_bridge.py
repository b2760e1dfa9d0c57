# SPDX-License-Identifier: Apache-2.0
"""Replacement of the turn markers in a target's prompt by those of the drafter.

A prompt is translated if it begins as the target's chat template does. A template that writes
nothing before a system text requires a user turn in the prompt instead. Each marker becomes what
the drafter's template writes at the same place of the conversation. The texts of turns stay as they
are: a default system prompt of the target is a system turn, and its tools are text. The drafter's
own default system prompt is inserted before a conversation that has no system turn.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_hetero_spec.text.chat_template import (
    ASSISTANT,
    ESCAPE,
    ESCAPED,
    ROLES,
    SYSTEM,
    USER,
    Stream,
    Template,
    Unaligned,
)
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Position in a conversation: ("at", "") is its start, then "in" or "after" the turn of a role.
_State = tuple[str, str]
_START: _State = ("at", "")
_FOLDED = b"\n\n"  # separates a system text from the user text, if the drafter has no system turns


class Marker(NamedTuple):
    """Drafter's replacement for a turn marker of the target.

    Attributes:
        atoms: Special tokens as ids, and text as bytes.
        drafter_space: True if the drafter's leading space belongs to the text that follows.
        target_space: The same for the target.
    """

    atoms: tuple[int | bytes, ...]
    drafter_space: bool
    target_space: bool


Piece = int | bytes | Marker  # control token of the target, text, or turn marker


@dataclass(frozen=True)
class ChatTemplateBridge:
    """Splits prompts of the target into text and turn markers, for all requests of a pair.

    Attributes:
        reason: Clause that explains why no markers are translated. "" if they are.
        roles: Roles whose turns are translated.
        turn_end: Control tokens that end an assistant's turn (target, drafter), if both have one.
    """

    reason: str = ""
    roles: tuple[str, ...] = ()
    turn_end: tuple[int, int] | None = None
    _alignment: "_Alignment | None" = None

    def __str__(self) -> str:
        if not self.reason:
            return f"turn markers are bridged ({', '.join(self.roles)})"
        return f"turn markers are not bridged: {self.reason}"

    def split(self, ids: Sequence[int]) -> list[Piece] | None:
        """Split a prompt (target ids, -1 for an unknown token) into pieces, in one scan.

        Return None if the prompt does not begin as a conversation does.
        """
        rules = self._alignment
        if rules is None or (read := rules.stream(ids)) is None:
            return None
        leading, body = read
        match = rules.start.match(body)
        if match is None:
            return None
        pieces: list[Piece] = [*ids[:leading]]
        position, state = 0, _START
        bare = False  # the last piece ends in a control token
        while match:
            literal = match[0]
            move = rules.moves[literal].get(state)
            if move:
                pieces += rules.plain(body[position : match.start()], bare)
                marker, state = move
                pieces.append(marker)
                position, bare = match.end(), _is_bare(literal)
            match = rules.marker.search(body, match.end())
        return [*pieces, *rules.plain(body[position:], bare)]


def align(
    target: TextTokenizer,
    drafter: TextTokenizer,
    target_chat: Any,
    drafter_chat: Any,
    special: SpecialTokens,
) -> ChatTemplateBridge:
    """Align the chat templates of two tokenizer objects. A failure becomes the `reason`."""
    stream = Stream(target, special.target_control)
    try:
        theirs = Template("target", target_chat, stream)
        ours = Template("drafter", drafter_chat, Stream(drafter, special.drafter_control))
    except Unaligned as reason:
        return ChatTemplateBridge(str(reason))
    roles = tuple(role for role in ROLES if role in theirs.open)
    ends = _first_control(theirs.close[ASSISTANT]), _first_control(ours.close[ASSISTANT])
    turn_end = None if ends[0] is None or ends[1] is None else (ends[0], ends[1])
    return ChatTemplateBridge("", roles, turn_end, _alignment=_Alignment(stream, theirs, ours))


class _Alignment:
    """Map from the target's markers to the drafter's, for each position in a conversation."""

    def __init__(self, stream: Stream, theirs: Template, ours: Template) -> None:
        self.stream, self._theirs, self._ours = stream, theirs, ours
        # Marker of the target -> position before it -> marker of the drafter, position after it.
        self.moves: dict[bytes, dict[_State, tuple[Marker, _State]]] = {}
        self.start = self._read_starts()
        for before in ROLES:
            for after in ROLES:
                self._read_step(before, after)
            self._read_close(before)
        for after in ROLES:
            self._read_open(after)
        self.marker = _any_of(literal for literal in self.moves if literal)

    def plain(self, stream: bytes, bare: bool) -> Iterator[Piece]:
        """Yield the pieces of a stretch without markers, with the spaces that `Stream` removed."""
        for index, part in enumerate(ESCAPED.split(stream)):
            if index % 2:
                yield int(part, 16)
                bare = True
            elif part:
                yield b" " + part if bare and self.stream.spaced else part
                bare = False

    def _read_starts(self) -> re.Pattern[bytes]:
        system = self._theirs.open.get(SYSTEM, b"")
        first, user = self._theirs.steps["", USER], self._theirs.open[USER]
        starts = {system: SYSTEM} if system.strip() else {}
        # If `first` begins with the system header, it has a default system prompt: a system turn.
        if not starts or not first.startswith(system):
            starts[first] = USER
        if ESCAPE in user:
            starts.setdefault(user, USER)
        known = _any_of(starts)
        behind = self._theirs.steps.get((SYSTEM, USER), b"")
        if self._theirs.steps.get(("", SYSTEM)) == b"" and ESCAPE in behind:
            # Nothing marks the beginning of the system text, so require a user turn behind it.
            starts[b""] = SYSTEM
            known = re.compile(known.pattern + b"|(?=(?s:.*?)" + re.escape(behind) + b")")
        for literal, role in starts.items():
            self._add(_START, literal, self._between("", role), ("in", role))
        return known

    def _read_step(self, before: str, after: str) -> None:
        """Add the end of a turn with the beginning of the next one.

        If it has a control token, it also ends turns of other roles, such as tools.
        """
        step = self._theirs.step(before, after)
        for literal in self._theirs.prompts if (before, after) == (USER, ASSISTANT) else [step]:
            if literal and literal.strip():
                self._add(("in", before), literal, self._between(before, after), ("in", after))
                if ESCAPE in literal:
                    ended = self._between(USER, after)
                    for role in ROLES:
                        self._add(("after", role), literal, ended, ("in", after))

    def _read_close(self, before: str) -> None:
        """Add the end of a turn alone. Text without a control token is no reliable end."""
        literal = self._theirs.close.get(before, b"")
        if ESCAPE in literal:
            self._add(("in", before), literal, self._end(before), ("after", before))
            for role in ROLES:
                self._add(("after", role), literal, self._end(USER), ("after", USER))

    def _read_open(self, after: str) -> None:
        literal = self._theirs.open.get(after, b"")
        if ESCAPE in literal:
            for role in ROLES:
                step, end = self._between(role, after), self._end(role)
                rest = step[len(end) :] if step.startswith(end) else self._ours.open.get(after, b"")
                self._add(("after", role), literal, rest, ("in", after))
                self._add(("in", role), literal, step, ("in", after))

    def _between(self, before: str, after: str) -> bytes:
        """Return the drafter's stream between turns. User turns replace missing system turns."""
        step = self._ours.step(before, after)
        if step is not None:
            return step
        if before == SYSTEM and after != ASSISTANT:
            return _FOLDED
        before, after = (USER if role == SYSTEM else role for role in (before, after))
        step = self._ours.step(before, after)
        return self._ours.close[before] if step is None else step

    def _end(self, role: str) -> bytes:
        """Return the drafter's stream after a turn if the next turn is unknown."""
        return self._ours.close.get(role, self._ours.steps.get((SYSTEM, USER), b""))

    def _add(self, state: _State, literal: bytes, ours: bytes, then: _State) -> None:
        parts = enumerate(ESCAPED.split(ours))
        atoms = [int(part, 16) if index % 2 else part for index, part in parts if part]
        replies = then == ("in", ASSISTANT)
        marker = Marker(
            (*(self._ours.bos if state == _START else ()), *atoms),
            drafter_space=replies and self._ours.space_before_reply,
            target_space=(replies and self._theirs.space_before_reply)
            or (self.stream.spaced and _is_bare(literal)),
        )
        self.moves.setdefault(literal, {}).setdefault(state, (marker, then))


def _first_control(literal: bytes) -> int | None:
    escape = ESCAPED.match(literal.lstrip())
    return int(escape[1], 16) if escape else None


def _is_bare(literal: bytes) -> bool:
    """Return True if a stream ends in a control token."""
    return literal[-7:-6] == ESCAPE


def _any_of(literals: Iterable[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(map(re.escape, sorted(literals, key=len, reverse=True))))
