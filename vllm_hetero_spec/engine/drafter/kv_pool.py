# SPDX-License-Identifier: Apache-2.0
"""The drafter's paged KV pool: reference counts, prefix reuse, rollback.

vLLM's own KVCacheManager cannot roll back, which a drafter does in every step, and it changes with
every release. This pool is plain Python over block numbers. The drafter owns the tensors.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# The name of a full block: its parent's name and its own ids. Names are exact, not hashes, so no
# collision can give a request the KV of another context. The root's name is the cache salt.
_Name = tuple[object, tuple[int, ...]]


@dataclass
class BlockTable:
    """The KV blocks of one sequence.

    Attributes:
        salt: Cache salt. Only sequences of equal salt share prefixes.
        row: int32 copy of `blocks` for the attention kernels, padded at the end.
        names: Names of the leading full blocks that this sequence, or another one, has published.
        sound: False if the last forward of this sequence was not checked for finite logits.
        checked: Number of leading names whose blocks are finite: logits behind them were.
    """

    salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    row: np.ndarray = field(default_factory=lambda: np.zeros(16, np.int32))
    names: list[object] = field(default_factory=list)
    sound: bool = True
    checked: int = 0

    @property
    def parent(self) -> object:
        """The name that the next full block's name extends."""
        return self.names[-1] if self.names else ("salt", self.salt)

    def push(self, block: int) -> None:
        if len(self.blocks) == len(self.row):
            self.row = np.concatenate([self.row, np.zeros_like(self.row)])
        self.row[len(self.blocks)] = block
        self.blocks.append(block)


class ForkedTable(NamedTuple):
    """A second sequence that shares a prefix with another one.

    `copy` is (source block, destination block), to copy before either sequence is written again. It
    is None if the prefix ends at a block boundary.
    """

    table: BlockTable
    copy: tuple[int, int] | None = None


class KVPool:
    """Allocates the blocks 1..num_blocks-1. Block 0 is reserved for padding writes.

    A block is held (reference count > 0), cached (count 0, contents findable by prefix, evicted
    oldest first) or free. Only full blocks of accepted context are published for reuse. A block is
    never written while it is findable, or while two sequences hold it: a rollback into such a block
    releases it.

    `clean` overwrites blocks with finite numbers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clean: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._clean, self._suspect = clean, set[int]()
        self.reused_tokens = 0
        self._free = list(range(num_blocks - 1, 0, -1))
        self._refs = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_name: dict[_Name, int] = {}
        self._name_of: dict[int, _Name] = {}
        self._uid_of: dict[int, int] = {}
        self._next_uid = 0

    def reset(self) -> None:
        """Forget all blocks. Every `BlockTable` returned before becomes invalid."""
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._refs = [0] * self.num_blocks
        for known in (self._cached, self._by_name, self._name_of, self._uid_of):
            known.clear()

    def suspect(self) -> None:
        """Mark all blocks as possibly non-finite. Each is cleaned before it is allocated again.

        No block stays findable, so that no later request reads non-finite KV by its prefix.
        Kernels may read a block beyond the end of a sequence and multiply by 0, and 0 times NaN is
        NaN.
        """
        self._suspect = set(range(1, self.num_blocks))
        self._forget(list(self._name_of))

    @property
    def capacity(self) -> int:
        """Number of blocks that can be allocated in total."""
        return self.num_blocks - 1

    @property
    def held(self) -> int:
        """Number of blocks that sequences hold."""
        return self.capacity - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Number of blocks that `grow` can allocate now, by eviction of cached ones."""
        return len(self._free) + len(self._cached)

    def open(self, ids: Sequence[int], salt: str | None) -> tuple[BlockTable, int]:
        """Create a table with the longest findable prefix of a context.

        Also return its number of leading tokens whose KV exists. At least the last of the drafter
        `ids` is left to compute.
        """
        table = BlockTable(salt=salt)
        size = self.block_size
        for start in range(0, len(ids) - size, size):
            block = self._by_name.get((table.parent, tuple(ids[start : start + size])))
            if block is None:
                break
            self._cached.pop(block, None)
            self._refs[block] += 1
            table.push(block)
            table.names.append(self._uid_of[block])
        table.checked, reused = len(table.names), len(table.blocks) * size
        self.reused_tokens += reused
        return table, reused

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens in total, or return False without a change."""
        need = -(-num_tokens // self.block_size) - len(table.blocks)
        if need <= 0:
            return True
        if need > self.available:
            return False
        for _ in range(need):
            if not self._free:
                self._forget([next(iter(self._cached))])  # evicts the oldest
            block = self._free.pop()
            self._refs[block] = 1
            table.push(block)
        if self._suspect and (unclean := self._suspect.intersection(table.blocks[-need:])):
            self._suspect -= unclean
            self._clean(sorted(unclean))
        return True

    def publish(self, table: BlockTable, ids: Sequence[int], num_tokens: int) -> None:
        """Make full blocks among the first `num_tokens` of `ids` findable. O(new blocks).

        Their KV must be written. They should be final, because a rollback into a published block
        releases it.
        """
        size = self.block_size
        while (len(table.names) + 1) * size <= num_tokens:
            start = len(table.names) * size
            name = (table.parent, tuple(ids[start : start + size]))
            block = self._by_name.get(name)
            if block is None:
                block = table.blocks[len(table.names)]
                self._by_name[name] = block
                self._name_of[block] = name
                self._uid_of[block] = self._next_uid
                self._next_uid += 1
            table.names.append(self._uid_of[block])
        if table.sound:
            table.checked = len(table.names)

    def fork(self, table: BlockTable, num_tokens: int) -> ForkedTable | None:
        """Create a second sequence after the first `num_tokens` tokens of a table.

        Their KV must be written; full blocks are shared. Either sequence may continue or be closed
        independently. Return None if a block must be copied and none is available.
        """
        whole, rest = divmod(num_tokens, self.block_size)
        if rest and not self.available:
            return None
        forked = BlockTable(salt=table.salt, names=table.names[:whole])
        for block in table.blocks[:whole]:
            self._refs[block] += 1
            forked.push(block)
        if not rest:
            return ForkedTable(forked)
        self.grow(forked, num_tokens)
        return ForkedTable(forked, (table.blocks[whole], forked.blocks[whole]))

    def adopt(self, table: BlockTable, branch: BlockTable) -> None:
        """Replace the blocks of a table by those of its fork, which is empty afterwards."""
        self.close(table)
        table.blocks, table.row, table.names = branch.blocks, branch.row, branch.names
        branch.blocks, branch.row, branch.names = [], np.zeros(16, np.int32), []

    def rollback(self, table: BlockTable, num_tokens: int) -> int:
        """Keep the KV of the first `num_tokens` tokens; later positions may be overwritten.

        Return the number of kept tokens. It is smaller if the last ones are in a findable or shared
        block, which must not be overwritten and is released.
        """
        keep = num_tokens // self.block_size
        del table.names[keep:]
        table.checked = min(table.checked, keep)
        for block in table.blocks[keep:]:
            if self._refs[block] > 1 or block in self._name_of:  # shared or findable
                break
        else:
            return num_tokens
        self._give_back(table, keep)
        return keep * self.block_size

    def close(self, table: BlockTable) -> None:
        """Release all blocks. Published ones stay findable until eviction."""
        self._give_back(table, 0)
        table.names.clear()
        table.sound, table.checked = True, 0

    def _give_back(self, table: BlockTable, keep: int) -> None:
        """Release all blocks from index `keep` on; clean and forget those that were not checked."""
        if not table.sound:
            unchecked = table.blocks[max(keep, table.checked) :]
            self._suspect.update(unchecked)
            self._forget([block for block in unchecked if self._refs[block] == 1])
        for block in reversed(table.blocks[keep:]):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._name_of:
                self._cached[block] = None
            else:
                self._free.append(block)
        del table.blocks[keep:]

    def _forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable; cached ones become free."""
        for block in blocks:
            if block in self._name_of:
                del self._by_name[self._name_of.pop(block)]
                del self._uid_of[block]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)
