# SPDX-License-Identifier: Apache-2.0
"""Drafted ids as target ids, anchored in the target's own last tokens.

A target rarely has the same token for a stretch of text wherever it stands, so the drafted bytes
are encoded together with the word they continue. Where that encoding has a boundary exactly at the
end of the known text, what follows is the draft; where a token spans that place the known text is
not what the target would have written in one go, and the drafted bytes are encoded alone.
"""

from codecs import utf_8_decode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.text_context import TextContext
from vllm_hetero_spec.text.tokenizer import TextTokenizer

ANCHOR_TOKENS = 8
# Pairs of a target and a drafter token that first_choice remembers.
MEMO_PAIRS = 1 << 18


@dataclass(frozen=True)
class _Job:
    """One request's draft on its way: ``anchor`` target ids spell the bytes before ``data``."""

    index: int
    anchor: list[int]
    data: bytes
    text: str  # anchor and data
    ended: bool  # the drafter drafted EOS after data


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
        self._same = target.fingerprint == drafter.fingerprint
        self._starts_anew: dict[tuple[int, int], bool] = {}
        self._inner_pairs = _inner_pairs(target.token_bytes)

    def first_choice(self, context: TextContext, candidates: Sequence[int]) -> int:
        """The first of the drafter's candidates for its next token that the target may mean.

        A target that has ended a token will not go on with text that belongs to it: after "imp" it
        does not write "ort", or it would have written "import". And the bytes of a character that
        the target has begun are given. Where no candidate will do, the drafter's own first choice.
        A drafter with the target's own tokenizer sees where its tokens end and needs no advice.
        """
        if self._same:
            return candidates[0]
        return next((c for c in candidates if self._continues(context, c)), candidates[0])

    def _continues(self, context: TextContext, drafter_id: int) -> bool:
        table = self._drafter.token_bytes
        if not 0 <= drafter_id < len(table):
            return False  # rows of an embedding that no token has
        data = table[drafter_id]
        if context.held:
            return data.startswith(context.held) or context.held.startswith(data)
        last = context.target_ids[-1] if context.target_ids else -1
        if not data or last < 0 or last in self._special.target_control:
            return True
        if not self._inner_pairs[self._target.token_bytes[last][-1] << 8 | data[0]]:
            return True  # no target token has these two bytes side by side
        known = self._starts_anew.get((last, drafter_id))
        if known is None:
            if len(self._starts_anew) >= MEMO_PAIRS:
                self._starts_anew.clear()
            known = self._starts_anew[last, drafter_id] = self._splits(last, data)
        return known

    def _splits(self, last: int, data: bytes) -> bool:
        """Whether the target ends a token between the bytes of `last` and `data`.

        Two tokens suffice: a sequence of BPE tokens is canonical if all its pairs are.
        """
        left = len(self._target.token_bytes[last])
        text, used = utf_8_decode(self._target.token_bytes[last] + data, "surrogateescape", False)
        if used <= left:
            return True  # nothing but the beginning of a character follows
        for token_id in self._target.encode(text):
            left -= len(self._target.token_bytes[token_id])
            if left <= 0:
                break
        return left == 0

    def translate(
        self,
        contexts: Sequence[TextContext],
        drafts: Sequence[Sequence[int]],
        limits: Sequence[int],
    ) -> list[list[int]]:
        """Target ids for each request's drafted ids, at most ``limits[i]`` of them."""
        results: list[list[int]] = [[] for _ in contexts]
        jobs = []
        for index, (context, draft) in enumerate(zip(contexts, drafts, strict=True)):
            if limits[index] > 0 and not context.broken:
                job = self._prepare(index, context, draft)
                if job is not None:
                    jobs.append(job)
        encoded = self._target.encode_batch([job.text for job in jobs])
        alone: list[_Job] = []
        for job, ids in zip(jobs, encoded, strict=True):
            start = self._boundary(ids, job)
            if start is None:
                alone.append(job)
            else:
                results[job.index] = self._checked(ids[start:], job, limits[job.index])
        if alone:
            texts = [job.data.decode("utf-8", "surrogateescape") for job in alone]
            for job, ids in zip(alone, self._target.encode_batch(texts), strict=True):
                results[job.index] = self._checked(ids, job, limits[job.index])
        return results

    def _prepare(self, index: int, context: TextContext, draft: Sequence[int]) -> _Job | None:
        data, ended = self._drafted_bytes(draft)
        data = self._respaced(data, context)
        if context.held:
            if not data.startswith(context.held):
                self._failures["held_mismatch"] += 1
                return None
            data = data[len(context.held) :]
        anchor = self._anchor(context.target_ids)
        known = self._target.decode_bytes(anchor)
        text, used = utf_8_decode(known + data, "surrogateescape", False)
        drafted = used - len(known)
        if drafted < len(data):
            data, ended = data[: max(drafted, 0)], False
        if not data and not ended:
            return None
        return _Job(index, anchor, data, text, ended)

    def _drafted_bytes(self, draft: Sequence[int]) -> tuple[bytes, bool]:
        """Bytes up to the first control token, and whether that token is an EOS."""
        control = self._special.drafter_control
        table = self._drafter.token_bytes
        parts: list[bytes] = []
        for token_id in draft:
            if token_id in control:
                return b"".join(parts), token_id in self._special.drafter_eos
            if not 0 <= token_id < len(table):
                self._failures["unknown_id"] += 1
                break
            parts.append(table[token_id])
        return b"".join(parts), False

    def _respaced(self, data: bytes, context: TextContext) -> bytes:
        """At the start of a text: the drafter's own leading space out, the target's in."""
        target_space, drafter_space = context.untouched
        if drafter_space and data:
            data = data.removeprefix(b" ")
        if target_space and data:
            data = b" " + data
        return data

    def _anchor(self, target_ids: Sequence[int]) -> list[int]:
        """The last target ids, back to the start of a word, a control token or ANCHOR_TOKENS."""
        table, control = self._target.token_bytes, self._special.target_control
        start = len(target_ids)
        while start > max(0, len(target_ids) - ANCHOR_TOKENS):
            token_id = target_ids[start - 1]
            if token_id in control:
                break
            start -= 1
            if (
                table[token_id][0] == 0x20
                and start
                and not _ends_in_space(target_ids, start, table)
            ):
                break
        while start < len(target_ids) and 0x80 <= table[target_ids[start]][0] < 0xC0:
            start += 1
        return list(target_ids[start:])

    def _boundary(self, ids: Sequence[int], job: _Job) -> int | None:
        """Index in ids where the drafted text starts, None where a token spans that place."""
        count = len(job.anchor)
        if list(ids[:count]) == job.anchor:
            return count
        left = len(self._target.decode_bytes(job.anchor))
        for index, token_id in enumerate(ids):
            if left <= 0:
                return index if left == 0 else None
            left -= len(self._target.token_bytes[token_id])
        return len(ids) if left == 0 else None

    def _checked(self, ids: Sequence[int], job: _Job, limit: int) -> list[int]:
        """The longest prefix of ids that is text and spells the drafted bytes, then EOS if due."""
        proposal: list[int] = []
        position = 0
        for token_id in ids[:limit]:
            piece = self._target.token_bytes[token_id]
            if token_id in self._special.target_control or not job.data.startswith(piece, position):
                break
            position += len(piece)
            proposal.append(token_id)
        if job.ended and position == len(job.data) and len(proposal) < limit:
            if self._special.target_eos is not None:
                proposal.append(self._special.target_eos)
        elif not proposal:
            self._failures["unencodable"] += 1
        return proposal


def _inner_pairs(table: Sequence[bytes]) -> bytes:
    """For each two bytes, first << 8 | second, whether some token has them side by side."""
    data = np.frombuffer(b"".join(table), np.uint8).astype(np.int32)
    pairs = data[:-1] << 8 | data[1:]
    ends = np.cumsum([len(token) for token in table]) - 1  # pairs that straddle two tokens
    inner = np.delete(pairs, np.unique(ends[(ends >= 0) & (ends < len(pairs))]))
    return np.bincount(inner, minlength=1 << 16).astype(bool).tobytes()


def _ends_in_space(target_ids: Sequence[int], end: int, table: Sequence[bytes]) -> bool:
    return table[target_ids[end - 1]][-1:].isspace()
