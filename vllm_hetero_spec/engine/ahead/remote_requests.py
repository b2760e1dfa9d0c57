# SPDX-License-Identifier: Apache-2.0
"""What the drafter process has been told of each text: its KV is accounted for there, not here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable


@dataclass
class RemoteRequest(BlockTable):
    """One text; in the place of its KV blocks.

    Attributes:
        slot: Its number in the drafter process; -1 where none was left.
        serial: Of the commit that told of it last; 0 before the first.
        life: Of the process that was told.
        sent: Its leading ids that were told and still stand; the request's `kv_ids`.
        gone: Ids behind them that were told, and do not stand any more.
        unread: How many ids were new to the process then.
        drafted: What was told to come behind the text then.
        peaks: The drafter's largest probability in the place of each.
        rows: What each of `drafted` was drawn from, see `DraftRecord`; nothing where it is certain.
        seen: Leading tokens of a line behind the text that a verification was given: certain,
            whatever they were drawn from.
    """

    slot: int = -1
    serial: int = 0
    life: int = 0
    sent: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    unread: int = 0
    drafted: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    seen: int = 0


class RemoteRequests:
    """Slots of the drafter process, in the place of a `KVPool`.

    Args:
        slots: How many there are.
        capacity: Blocks of the drafter's KV.
        block_size: Tokens of each.
    """

    def __init__(self, slots: int, capacity: int, block_size: int) -> None:
        self.capacity, self.block_size = capacity, block_size
        self._num_slots = slots
        self._free = list(range(slots))
        self.closed: set[int] = set()  # slots given back, which the process was not told of

    def open(self, ids: Sequence[int], salt: str | None) -> tuple[RemoteRequest, int]:
        """A text of which nothing was told."""
        text = RemoteRequest(salt)
        self.admit(text)
        return text, 0

    def admit(self, text: RemoteRequest) -> bool:
        """Give it a slot, if it has none and one is left; whether it has one."""
        if text.slot < 0 and self._free:
            text.slot = self._free.pop()
        return text.slot >= 0

    def rollback(self, table: BlockTable, num_tokens: int) -> int:
        """Only the first `num_tokens` of what was told still stand."""
        assert isinstance(table, RemoteRequest)
        table.gone[:0] = table.sent[num_tokens:]
        return num_tokens

    def close(self, table: BlockTable) -> None:
        """The text is gone."""
        assert isinstance(table, RemoteRequest)
        if table.slot >= 0:
            self._free.append(table.slot)
            self.closed.add(table.slot)
        table.slot, table.serial = -1, 0

    def reset(self) -> None:
        """All texts are gone."""
        self._free = list(range(self._num_slots))
        self.closed = set(self._free)
