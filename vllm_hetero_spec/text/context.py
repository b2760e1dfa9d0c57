# SPDX-License-Identifier: Apache-2.0
"""The interface of a context, and the context for equal tokenizers."""

from collections.abc import Sequence
from typing import Protocol


class Context(Protocol):
    """The target ids of one request, translated into drafter ids.

    Attributes:
        ids: Drafter ids of the text so far. Read-only for callers.
        broken: True after a failed translation: do not draft for this request.
        num_dropped: Number of old ids that were removed because the text became too long. They do
            not count in an index into `ids`.
    """

    ids: list[int]
    broken: bool
    num_dropped: int

    @property
    def held(self) -> bytes:
        """Bytes at the end that are not in `ids`: of a begun character, or one space of a word."""

    @property
    def num_target(self) -> int:
        """Number of target ids appended so far."""

    @property
    def ratio(self) -> float:
        """Drafter ids per target id, in the text that is kept."""

    def append(self, target_ids: Sequence[int]) -> int:
        """Append target ids. Return c, such that `ids[:c]` are unchanged by the call."""


class IdentityContext:
    """Context for equal tokenizers. Its ids are the target's own.

    If there are more than `longest` ids, BOS and the last `longest // 2` of them are kept.
    """

    held = b""
    broken = False
    ratio = 1.0

    def __init__(self, longest: int | None = None, bos_id: int | None = None) -> None:
        self.ids: list[int] = []
        self.num_dropped = 0
        self._longest, self._bos_id = longest, bos_id

    @property
    def num_target(self) -> int:
        return self.num_dropped + len(self.ids)

    def append(self, target_ids: Sequence[int]) -> int:
        kept = len(self.ids)
        self.ids.extend(target_ids)
        if self._longest is None or len(self.ids) <= self._longest:
            return kept
        first = int(self.ids[0] == self._bos_id)
        start = len(self.ids) - self._longest // 2
        del self.ids[first:start]
        self.num_dropped += start - first
        return first
