# SPDX-License-Identifier: Apache-2.0
"""State of each request as last sent to the drafter process, which manages the KV itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class RemoteRequest:
    """State of one request, from `open` to `close`.

    Attributes:
        slot: Its slot in the process; -1 if it has none.
        serial: Number of the last update that contained it; 0 before the first.
        life: `SupervisedProcess.life` of the process that received that update.
        sent: Leading ids that were sent and are still valid; the request's `kv_ids`.
        gone: Ids after them that were sent and are no longer valid.
        unread: Number of ids that were new in the last update.
        drafted: `RequestUpdate.drafted` of the last update.
        peaks: For each of `drafted`, the drafter's largest probability at its position.
        rows: For each of `drafted`, the row it was sampled from, see `DraftRecord`; empty if it is
            certain.
        seen: Leading tokens of a continuation that a verification has received. They are certain,
            whatever they were sampled from: see `sampled_records`.
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
    """Slots of a drafter process whose KV pool has `capacity` blocks; a `Pool`."""

    def __init__(self, slots: int, capacity: int, block_size: int) -> None:
        self.capacity, self.block_size = capacity, block_size
        self._num_slots = slots
        self._free = list(range(slots))
        self.closed: set[int] = set()  # slots given back, but not sent yet

    def open(self, ids: Sequence[int], salt: str | None) -> tuple[RemoteRequest, int]:
        text = RemoteRequest()
        self.admit(text)
        return text, 0

    def admit(self, text: RemoteRequest) -> bool:
        """Give a request a free slot if it has none. Return True if it has one."""
        if text.slot < 0 and self._free:
            text.slot = self._free.pop()
        return text.slot >= 0

    def rollback(self, table: RemoteRequest, num_tokens: int) -> int:
        table.gone[:0] = table.sent[num_tokens:]
        return num_tokens

    def close(self, table: RemoteRequest) -> None:
        if table.slot >= 0:
            self._free.append(table.slot)
            self.closed.add(table.slot)
        table.slot, table.serial = -1, 0

    def reset(self) -> None:
        self._free = list(range(self._num_slots))
        self.closed = set(self._free)
