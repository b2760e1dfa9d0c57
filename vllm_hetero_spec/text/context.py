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
    """

    ids: list[int]
    held: bytes
    broken: bool

    @property
    def num_target(self) -> int:
        """Number of target ids taken in."""

    def append(self, target_ids: Sequence[int]) -> int:
        """Take in target ids; ids[:c] are unchanged by the call, c is returned."""


class IdentityContext:
    """A context of two equal tokenizers: the target's ids themselves."""

    held = b""
    broken = False

    def __init__(self) -> None:
        self.ids: list[int] = []

    @property
    def num_target(self) -> int:
        return len(self.ids)

    def append(self, target_ids: Sequence[int]) -> int:
        kept = len(self.ids)
        self.ids.extend(target_ids)
        return kept
