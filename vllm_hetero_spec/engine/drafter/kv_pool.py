# SPDX-License-Identifier: Apache-2.0
"""The drafter's paged KV pool: reference counts, prefix reuse, roll back.

vLLM's own KVCacheManager cannot roll back, which a drafter does in every step, and changes with
every release. This pool is plain Python over block numbers; the tensors belong to the drafter.

A block is in exactly one of three states: held (reference count > 0), cached (count 0, contents
still findable by prefix, oldest evicted first) or free. Only full blocks of accepted context are
ever published for reuse. A block is never written while it is findable, or while a second sequence
holds it: rolling back into one gives it up.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# What a full block holds is named by its parent's name and its own ids: exact, so no collision can
# ever hand one request the KV of another text. The root's name is the request's cache salt.
_Name = tuple[object, tuple[int, ...]]


@dataclass
class BlockTable:
    """The blocks of one sequence.

    Attributes:
        salt: Prefixes are shared only between equal salts.
        blocks: Block numbers in order of position; `row` mirrors them for the attention kernels.
        names: Names of the leading blocks that are published, or whose contents another
            sequence had published before.
        sound: Whether the drafter's logits behind all of it were finite, as far as they were read.
    """

    salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    row: np.ndarray = field(default_factory=lambda: np.zeros(16, np.int32))
    names: list[object] = field(default_factory=list)
    sound: bool = True

    @property
    def parent(self) -> object:
        """What the next full block's name builds on."""
        return self.names[-1] if self.names else ("salt", self.salt)

    def push(self, block: int) -> None:
        """Append a block."""
        if len(self.blocks) == len(self.row):
            self.row = np.concatenate([self.row, np.zeros_like(self.row)])
        self.row[len(self.blocks)] = block
        self.blocks.append(block)


class ForkedTable(NamedTuple):
    """A second sequence with the beginning of another.

    Attributes:
        table: Its blocks.
        copy: A block to copy, and where to, before either sequence is written again; None where
            the beginning ends with a block.
    """

    table: BlockTable
    copy: tuple[int, int] | None = None


class KVPool:
    """Block numbers 1..num_blocks-1; block 0 is never handed out (padding writes go there).

    Args:
        num_blocks: Blocks in the tensors, with block 0.
        block_size: Tokens per block.
        clean: Puts finite numbers into blocks; nothing to do for a pool without tensors.
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
        self._cached: OrderedDict[int, None] = OrderedDict()  # count 0 but findable, oldest first
        self._by_name: dict[_Name, int] = {}
        self._name_of: dict[int, _Name] = {}
        self._uid_of: dict[int, int] = {}
        self._next_uid = 0

    def reset(self) -> None:
        """Forget everything; every BlockTable handed out before is void."""
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._refs = [0] * self.num_blocks
        for known in (self._cached, self._by_name, self._name_of, self._uid_of):
            known.clear()

    def suspect(self) -> None:
        """Some KV is not finite: what is in a block is cleaned before that is handed out again.

        Kernels may read a block to its end, and weigh what is behind a text by 0: NaN stays NaN.
        """
        self._suspect = set(range(1, self.num_blocks))

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out in all."""
        return self.num_blocks - 1

    @property
    def held(self) -> int:
        """Blocks in use by some sequence."""
        return self.capacity - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `grow` can hand out now, evicting cached ones."""
        return len(self._free) + len(self._cached)

    def open(self, ids: Sequence[int], salt: str | None) -> tuple[BlockTable, int]:
        """A table for a new sequence, with the longest findable prefix of its context.

        Args:
            ids: Drafter ids of the context. At least the last is left to compute.
            salt: The request's cache salt.

        Returns:
            The table, and the number of leading tokens whose KV it holds already.
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
        reused = len(table.blocks) * size
        self.reused_tokens += reused
        return table, reused

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens. All or nothing; False where blocks do not suffice."""
        need = -(-num_tokens // self.block_size) - len(table.blocks)
        if need <= 0:
            return True
        if need > self.available:
            return False
        for _ in range(need):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            table.push(block)
        if self._suspect and (unclean := self._suspect.intersection(table.blocks[-need:])):
            self._suspect -= unclean
            self._clean(sorted(unclean))
        return True

    def publish(self, table: BlockTable, ids: Sequence[int], num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens` of `ids`. O(new blocks).

        Their KV must be written, and they should not change any more: a published block that is
        rolled back has to be given up.
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

    def fork(self, table: BlockTable, num_tokens: int) -> ForkedTable | None:
        """A second sequence behind the first `num_tokens` tokens of a table, whose KV is written.

        Args:
            table: Of the first, which may go on or be closed as if there were no other.
            num_tokens: Tokens that both have; full blocks of them are shared.

        Returns:
            None where a block has to be copied and none is left.
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
        """Let a table go on as one of its forks: it takes those blocks, and gives back its own.

        Args:
            table: Goes on.
            branch: From `fork`; empty afterwards.
        """
        self.close(table)
        table.blocks, table.row, table.names = branch.blocks, branch.row, branch.names
        branch.blocks, branch.row, branch.names = [], np.zeros(16, np.int32), []

    def rollback(self, table: BlockTable, num_tokens: int) -> int:
        """Keep the KV of the first `num_tokens` tokens; the rest will be written anew.

        Returns:
            How many tokens are kept: fewer than asked where the last of them lie in a block that
            others may read, which is then given up rather than overwritten.
        """
        keep = num_tokens // self.block_size
        del table.names[keep:]
        for block in table.blocks[keep:]:
            if self._refs[block] > 1 or block in self._name_of:  # others than its holder may read
                break
        else:
            return num_tokens
        self._give_back(table, keep)
        return keep * self.block_size

    def close(self, table: BlockTable) -> None:
        """Give all blocks back; published ones stay findable until evicted."""
        self._give_back(table, 0)
        table.names.clear()
        table.sound = True

    def _give_back(self, table: BlockTable, keep: int) -> None:
        """Give back all blocks but the first; unsound ones are cleaned before others get them."""
        if not table.sound:
            self._suspect.update(table.blocks[keep:])
        for block in reversed(table.blocks[keep:]):
            self._release(block)
        del table.blocks[keep:]

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._name_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._by_name[self._name_of.pop(block)]
        del self._uid_of[block]
        return block
