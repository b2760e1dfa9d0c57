# SPDX-License-Identifier: Apache-2.0
"""The text that a chat template writes before, between and after the turns of a conversation.

`Template` renders conversations of sentinel texts, tokenizes them like prompts and cuts them at the
sentinels. The parts are streams. A stream consists of the bytes of the ids, with an escape for each
control token and without the tokenizer's own leading spaces. In a stream a marker is found even if
its text was merged with other text, and text that resembles a control token is not mistaken for it.
"""

import re
from collections.abc import Sequence
from typing import Any

from vllm_hetero_spec.text.tokenizer import TextTokenizer

SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")
# Never a byte of UTF-8. Six hexadecimal digits of the token id follow.
ESCAPE = b"\xff"
ESCAPED = re.compile(rb"\xff(.{6})")
_SPACED = re.compile(rb"(\xff.{6}) ")
_SENTINELS = {role: f"Qz{role.title()}Zq" for role in (*ROLES, "again")}


class Unaligned(Exception):
    """Two chat templates cannot be aligned. The message is a clause."""


class Stream:
    """Converts ids of one tokenizer to a byte string with escapes."""

    def __init__(self, tokenizer: TextTokenizer, control: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        # The additional last entry belongs to the id -1 of an unknown token.
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
        """Return the number of leading BOS tokens and the rest, or None if text has the escape."""
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
        """Return a stream in which the content of special tokens replaces their escapes."""
        text = self.tokenizer.special_text

        def content(match: re.Match[bytes]) -> bytes:
            return text.get(int(match[1], 16), "").encode("utf-8", "surrogateescape")

        return ESCAPED.sub(content, stream)


class Template:
    """Streams of one chat template before, between and after turns.

    Raises:
        Unaligned: The texts of a conversation are not found in its rendering.
    """

    def __init__(self, side: str, tokenizer: Any, stream: Stream) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise Unaligned(f"the {side} has no chat template")
        self._side, self._tokenizer, self._stream = side, tokenizer, stream
        self.bos: tuple[int, ...] = ()
        turns = (USER, ASSISTANT, USER)
        first, reply, again, end = self._between(turns)
        *_, prompt = self._between(turns, add_generation_prompt=True)
        *_, ended = self._between((USER, ASSISTANT))
        # In "[/INST] Hi" the space belongs to the reply: a prompt without a reply lacks it.
        self.space_before_reply = reply == prompt + b" "
        reply = prompt if self.space_before_reply else reply
        close_user, close_reply = _common(end, reply), _common(ended, again)
        opened = reply[len(close_user) :]
        self.steps = {("", USER): first, (USER, ASSISTANT): reply, (ASSISTANT, USER): again}
        self.close = {USER: close_user, ASSISTANT: close_reply}
        self.open = {USER: again[len(close_reply) :], ASSISTANT: opened}
        if not all(step.strip() for step in self.steps.values()) or self.open[USER] == opened:
            raise Unaligned(f"the {side}'s chat template does not mark turns by their role")
        # A generation prompt that continues after the header ("<think>") is header and text.
        ends_turn = opened.strip() and prompt == end
        self.prompts = [reply, *([] if ends_turn or prompt.startswith(reply) else [prompt])]
        self._read_system(first)

    def _read_system(self, first: bytes) -> None:
        try:
            start, then, *_ = self._between((SYSTEM, USER, ASSISTANT, USER))
        except Unaligned:
            return
        self.steps["", SYSTEM], self.steps[SYSTEM, USER] = start, then
        if start != first:  # otherwise the system text is part of the first user turn
            self.open[SYSTEM] = self._header(start)
        if then.endswith(self.open[USER]):
            self.close[SYSTEM] = then[: len(then) - len(self.open[USER])]

    def _header(self, start: bytes) -> bytes:
        """Return the header before a system text, without text that the template itself adds.

        If the headers of user and assistant differ only in the role's name, the system header is
        expected to have the same form.
        """
        user, reply = (self._stream.literal(self.open[role]) for role in (USER, ASSISTANT))
        name = USER.encode()
        if user.count(name) != 1 or user.replace(name, ASSISTANT.encode()) != reply:
            return start
        header = user.replace(name, SYSTEM.encode())
        heads = (start[:at] for at in range(len(start)))
        return next((head for head in heads if self._stream.literal(head) == header), start)

    def step(self, before: str, after: str) -> bytes | None:
        """Return the stream between two turns ("" is the start), or None if it is unknown."""
        known = self.steps.get((before, after))
        if known is None and before in self.close and self.open.get(after):
            return self.close[before] + self.open[after]
        return known

    def _between(self, roles: Sequence[str], add_generation_prompt: bool = False) -> list[bytes]:
        texts = [_SENTINELS[role] for role in roles]
        if len(set(roles)) < len(roles):
            texts[-1] = _SENTINELS["again"]
        messages = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False
            )
            # Special tokens in the rendered text are recognized, and none are added.
            ids = self._tokenizer.encode(rendered, add_special_tokens=False)
            count, body = self._stream(ids) or (0, b"")
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
    """Return the longest common prefix that does not cut an escape."""
    pairs = enumerate(zip(first, second, strict=False))
    size = next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
    cut = first.rfind(ESCAPE, max(0, size - 6), size)
    return first[: size if cut < 0 else cut]
