# SPDX-License-Identifier: Apache-2.0
"""What a chat template writes before, between and behind the turns of a conversation.

It is asked by rendering conversations of sentinel texts, which are tokenized as a prompt is and
cut at the sentinels. What is cut is a stream: the bytes of the ids, with an escape for each control
token and without the spaces that a tokenizer itself puts before text. In a stream a marker is found
wherever it stands and whatever its text was merged with, and text that merely looks like a control
token is none.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_hetero_spec.text.tokenizer import TextTokenizer

SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")
# Never a byte of UTF-8; six hexadecimal digits of the id follow.
ESCAPE = b"\xff"
ESCAPED = re.compile(rb"\xff(.{6})")
_SPACED = re.compile(rb"(\xff.{6}) ")
_SENTINELS = {role: f"Qz{role.title()}Zq" for role in (*ROLES, "again")}


@dataclass(frozen=True)
class Chat:
    """The chat template of a tokenizer with transformers' methods."""

    tokenizer: Any

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The conversation as text; raises whatever the template raises."""
        rendered: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return rendered

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: special tokens in it are such, and nothing is added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def chat_of(tokenizer: Any) -> Chat | None:
    """The chat template of a tokenizer object, None where it has none."""
    return Chat(tokenizer) if getattr(tokenizer, "chat_template", None) else None


class Unaligned(Exception):
    """Why two templates cannot be bridged, as a clause."""


class Stream:
    """A tokenizer's ids as one byte string with escapes."""

    def __init__(self, tokenizer: TextTokenizer, control: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        # One entry more than ids, for the id -1 of an unknown token.
        self._pieces = [*tokenizer.token_bytes, b""]
        for token_id in control:
            if -1 <= token_id < tokenizer.vocab_size:
                self._pieces[token_id] = escaped(token_id)
        table = enumerate(tokenizer.token_bytes)
        self._confusing = {i for i, data in table if ESCAPE in data and i not in control}
        self._start_spaced = tokenizer.leading_space.applies(first=True)
        self.spaced = tokenizer.leading_space.applies(first=False)
        self._bos = b"" if tokenizer.bos_id is None else escaped(tokenizer.bos_id)

    def __call__(self, ids: Sequence[int]) -> tuple[int, bytes] | None:
        """Number of leading BOS tokens and what follows; None for text that holds the escape."""
        if not self._confusing.isdisjoint(ids):
            return None
        body = b"".join([self._pieces[token_id] for token_id in ids])
        count = 0
        while self._bos and body.startswith(self._bos):
            body = body[len(self._bos) :]
            count += 1
        if self._start_spaced:
            body = body.removeprefix(b" ")
        return count, _SPACED.sub(rb"\1", body) if self.spaced else body

    def literal(self, stream: bytes) -> bytes:
        """A stream as a reader sees it: special tokens by their content."""
        text = self.tokenizer.special_text

        def content(match: re.Match[bytes]) -> bytes:
            return text.get(int(match[1], 16), "").encode("utf-8", "surrogateescape")

        return ESCAPED.sub(content, stream)


class Template:
    """What one side's template writes before, between and behind turns, as streams.

    Args:
        side: "target" or "drafter", for the message.
        chat: The template.
        stream: Of its tokenizer.

    Raises:
        Unaligned: A conversation cannot be found again in its rendering.
    """

    def __init__(self, side: str, chat: Chat | None, stream: Stream) -> None:
        if chat is None:
            raise Unaligned(f"the {side} has no chat template")
        self._side, self._chat, self._stream = side, chat, stream
        self.bos: tuple[int, ...] = ()
        turns = (USER, ASSISTANT, USER)
        first, reply, again, end = self._between(turns)
        *_, prompt = self._between(turns, add_generation_prompt=True)
        *_, ended = self._between((USER, ASSISTANT))
        # In "[/INST] Hi" the space is there only once there is a reply.
        self.space_before_reply = reply == prompt + b" "
        reply = prompt if self.space_before_reply else reply
        close_user, close_reply = _common(end, reply), _common(ended, again)
        opened = reply[len(close_user) :]
        self.steps = {("", USER): first, (USER, ASSISTANT): reply, (ASSISTANT, USER): again}
        self.close = {USER: close_user, ASSISTANT: close_reply}
        self.open = {USER: again[len(close_reply) :], ASSISTANT: opened}
        if not all(step.strip() for step in self.steps.values()) or self.open[USER] == opened:
            raise Unaligned(f"the {side}'s chat template does not mark turns by their role")
        # A generation prompt that goes on past the header ("<think>") ends in text.
        ends_turn = opened.strip() and prompt == end
        self.prompts = [reply, *([] if ends_turn or prompt.startswith(reply) else [prompt])]
        self._read_system(first)

    def _read_system(self, first: bytes) -> None:
        """Steps of system turns, where the template has such."""
        try:
            start, then, *_ = self._between((SYSTEM, USER, ASSISTANT, USER))
        except Unaligned:
            return
        self.steps["", SYSTEM], self.steps[SYSTEM, USER] = start, then
        if start != first:  # else it is text within the user's first turn
            self.open[SYSTEM] = self._header(start)
        if then.endswith(self.open[USER]):
            self.close[SYSTEM] = then[: len(then) - len(self.open[USER])]

    def _header(self, start: bytes) -> bytes:
        """What comes before a system's text, without the text that the template itself adds.

        Where turns begin alike but for the role's name, so does the system's.
        """
        user, reply = (self._stream.literal(self.open[role]) for role in (USER, ASSISTANT))
        name = USER.encode()
        if user.count(name) != 1 or user.replace(name, ASSISTANT.encode()) != reply:
            return start
        header = user.replace(name, SYSTEM.encode())
        heads = (start[:at] for at in range(len(start)))
        return next((head for head in heads if self._stream.literal(head) == header), start)

    def step(self, before: str, after: str) -> bytes | None:
        """What stands between two turns ("" before the first); None where that is not known."""
        known = self.steps.get((before, after))
        if known is None and before in self.close and self.open.get(after):
            return self.close[before] + self.open[after]
        return known

    def _between(self, roles: Sequence[str], add_generation_prompt: bool = False) -> list[bytes]:
        """Streams before, between and behind the texts of turns of these roles."""
        texts = [_SENTINELS[role] for role in roles]
        if len(set(roles)) < len(roles):
            texts[-1] = _SENTINELS["again"]
        messages = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
        try:
            rendered = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
            count, body = self._stream(self._chat.encode(rendered)) or (0, b"")
        except Exception as error:
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise Unaligned(
                f"the {self._side}'s chat template cannot be rendered: {cause}"
            ) from error
        bos = self._stream.tokenizer.bos_id
        self.bos = () if bos is None else (bos,) * min(count, 1)
        parts: list[bytes] = []
        for text in map(str.encode, texts):
            part, marker, body = body.partition(text)
            if not marker or text in body:
                raise Unaligned(
                    f"the {self._side}'s chat template does not keep the texts of a conversation"
                )
            parts.append(part)
        return [*parts, body]


def escaped(token_id: int) -> bytes:
    return ESCAPE + b"%06x" % token_id


def _common(first: bytes, second: bytes) -> bytes:
    """The longest common prefix that cuts no escape."""
    pairs = enumerate(zip(first, second, strict=False))
    size = next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
    cut = first.rfind(ESCAPE, max(0, size - 6), size)
    return first[: size if cut < 0 else cut]
