# SPDX-License-Identifier: Apache-2.0
"""One request as drafter ids: what every kind of context offers, and the trivial kind."""

from collections.abc import Sequence
from typing import Protocol


class Context(Protocol):
    """One request: the target ids taken in so far, seen as drafter ids.

    Attributes:
        ids: Drafter ids of the text so far; read-only for callers.
        held: Incomplete UTF-8 character at the end, not yet in `ids`.
        broken: Translation failed: do not draft for this request.
        num_dropped: Leading ids that were given up, because the text outgrew what is kept of it.
            Ids are numbered by what is left.
    """

    ids: list[int]
    held: bytes
    broken: bool
    num_dropped: int

    @property
    def num_target(self) -> int:
        """Number of target ids taken in."""

    @property
    def ratio(self) -> float:
        """Drafter ids for each target id, in the text that is kept."""

    def append(self, target_ids: Sequence[int]) -> int:
        """Take in target ids; ids[:c] are unchanged by the call, c is returned."""


class IdentityContext:
    """A context of two equal tokenizers: the target's ids themselves.

    Args:
        longest: Ids kept at most: past it, the last half of them.
        bos_id: Kept in front of them.
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
