# SPDX-License-Identifier: Apache-2.0
"""The turn markers of a target's prompt, replaced by the drafter's own.

A prompt is bridged where it begins as the target's template begins, or has a user's turn in it if
that puts nothing before a system's text. Then every marker becomes what the drafter's template
writes at that place of a conversation; the texts of turns are untouched, and so is whatever else
the target's template adds: its default system prompt is a system turn, its tools are text. The
drafter's own default system prompt stands before a conversation without one.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_hetero_spec.text.chat_template import (
    ASSISTANT,
    ESCAPE,
    ESCAPED,
    ROLES,
    SYSTEM,
    USER,
    Chat,
    Stream,
    Template,
    Unaligned,
)
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Where in a conversation: at its start, "in" a role's turn, or "after" one.
_State = tuple[str, str]
_START: _State = ("at", "")
# A drafter without system turns reads the system's text at the head of the user's, set apart so.
_FOLDED = b"\n\n"


class Marker(NamedTuple):
    """What the drafter sees in place of a turn marker.

    Attributes:
        atoms: Its special tokens as ids, text as bytes.
        drafter_space: A space of the drafter's comes with the text that follows, not before.
        target_space: The same of the target's.
    """

    atoms: tuple[int | bytes, ...]
    drafter_space: bool
    target_space: bool


Piece = int | bytes | Marker  # a control token of the target, text, a turn marker


@dataclass(frozen=True)
class ChatTemplateBridge:
    """Recognises the target's turns in a prompt and says what the drafter sees in their place.

    Attributes:
        reason: Why nothing is bridged, a clause; "" where something is.
        roles: Whose turns are.
        turn_end: Control tokens of target and drafter that end an assistant's turn, where both have
            one.
        counts: Prompts bridged and marker bytes replaced ("prompts", "bytes"), so far.
    """

    reason: str = ""
    roles: tuple[str, ...] = ()
    turn_end: tuple[int, int] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    _alignment: "_Alignment | None" = None

    @property
    def active(self) -> bool:
        return self._alignment is not None

    def __str__(self) -> str:
        if self.active:
            return f"turn markers are bridged ({', '.join(self.roles)})"
        return f"turn markers are not bridged: {self.reason}"

    def split(self, ids: Sequence[int]) -> list[Piece] | None:
        """A prompt in pieces, in order; costs one scan of it.

        Args:
            ids: Target ids, or -1 for an unknown one.

        Returns:
            The pieces; None where the prompt does not begin as a conversation does.
        """
        rules = self._alignment
        read = None if rules is None else rules.stream(ids)
        if rules is None or read is None:
            return None
        leading, body = read
        match = rules.start.match(body)
        if match is None:
            return None
        pieces: list[Piece] = [*ids[:leading]]
        position, state = 0, _START
        bare = False  # the last piece ended in a control token
        self.counts["prompts"] += 1
        while match:
            literal = match[0]
            move = rules.moves[literal].get(state)
            if move:
                pieces += rules.plain(body[position : match.start()], bare)
                marker, state = move
                pieces.append(marker)
                position, bare = match.end(), _is_bare(literal)
                self.counts["bytes"] += len(rules.stream.literal(literal))
            match = rules.marker.search(body, match.end())
        return [*pieces, *rules.plain(body[position:], bare)]


def align(
    target: TextTokenizer,
    drafter: TextTokenizer,
    target_chat: Chat | None,
    drafter_chat: Chat | None,
    special: SpecialTokens,
) -> ChatTemplateBridge:
    """Bridge two chat templates, or say why not. Never raises."""
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
    """Which marker of the target becomes which of the drafter, by where the conversation is."""

    def __init__(self, stream: Stream, theirs: Template, ours: Template) -> None:
        self.stream, self._theirs, self._ours = stream, theirs, ours
        # Target's marker -> where it is met -> what the drafter sees, and where that leads.
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
        """A stretch without markers, with the spaces that the stream leaves out."""
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
        if not starts or not first.startswith(system):  # else a default system prompt: a turn
            starts[first] = USER
        if ESCAPE in user:
            starts.setdefault(user, USER)
        known = _any_of(starts)
        behind = self._theirs.steps.get((SYSTEM, USER), b"")
        if self._theirs.steps.get(("", SYSTEM)) == b"" and ESCAPE in behind:
            # The system's text has nothing in front: it is one where a user's turn follows.
            starts[b""] = SYSTEM
            known = re.compile(known.pattern + b"|(?=(?s:.*?)" + re.escape(behind) + b")")
        for literal, role in starts.items():
            self._add(_START, literal, self._between("", role), ("in", role))
        return known

    def _read_step(self, before: str, after: str) -> None:
        """A turn's end and the next one's beginning, which also ends turns of other roles."""
        step = self._theirs.step(before, after)
        for literal in self._theirs.prompts if (before, after) == (USER, ASSISTANT) else [step]:
            if literal and literal.strip():
                self._add(("in", before), literal, self._between(before, after), ("in", after))
                if ESCAPE in literal:
                    ended = self._between(USER, after)
                    for role in ROLES:
                        self._add(("after", role), literal, ended, ("in", after))

    def _read_close(self, before: str) -> None:
        """A turn's end alone. Text alone is too little to tell that a turn has ended."""
        literal = self._theirs.close.get(before, b"")
        if ESCAPE in literal:
            self._add(("in", before), literal, self._end(before), ("after", before))
            for role in ROLES:
                self._add(("after", role), literal, self._end(USER), ("after", USER))

    def _read_open(self, after: str) -> None:
        """A turn's beginning alone."""
        literal = self._theirs.open.get(after, b"")
        if ESCAPE in literal:
            for role in ROLES:
                step, end = self._between(role, after), self._end(role)
                rest = step[len(end) :] if step.startswith(end) else self._ours.open.get(after, b"")
                self._add(("after", role), literal, rest, ("in", after))
                self._add(("in", role), literal, step, ("in", after))

    def _between(self, before: str, after: str) -> bytes:
        """The drafter's stream between two turns; without system turns, the user's stand in."""
        step = self._ours.step(before, after)
        if step is not None:
            return step
        if before == SYSTEM and after != ASSISTANT:
            return _FOLDED
        before, after = (USER if role == SYSTEM else role for role in (before, after))
        step = self._ours.step(before, after)
        return self._ours.close[before] if step is None else step

    def _end(self, role: str) -> bytes:
        """The drafter's stream behind a turn that is followed by none that is known."""
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
    """The control token that a stream begins with, white space aside."""
    escape = ESCAPED.match(literal.lstrip())
    return int(escape[1], 16) if escape else None


def _is_bare(literal: bytes) -> bool:
    """Whether a stream ends in a control token."""
    return literal[-7:-6] == ESCAPE


def _any_of(literals: Iterable[bytes]) -> re.Pattern[bytes]:
    """Matches the longest of the literals."""
    return re.compile(b"|".join(map(re.escape, sorted(literals, key=len, reverse=True))))
