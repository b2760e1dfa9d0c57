# SPDX-License-Identifier: Apache-2.0
"""Layout of draft trees in the target's batch: branch sequences over scratch KV blocks.

Attention supports sequences, not trees. So the main path of a tree is its request's own sequence,
like a chain, and every branch is an additional sequence. A branch shares the request's full KV
blocks and has scratch blocks from the block on in which the step begins. It recomputes the tokens
that it shares with other paths, so that it reads no KV that another sequence writes in this step.

Before the forward, the request's last partial block is copied to the first scratch block of each
branch (`tails`). If the accepted path ends on a branch, its scratch blocks are copied over the
request's own (`blocks_to_copy`). A block that the root has filled is excluded: it is correct
already, and the prefix cache may share it. Scratch blocks are reserved for one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.trees.walk import NO_NODE, ROOT


class TreeRows(NamedTuple):
    """Rows of a draft in the target's forward, after the row of the root.

    Every prefix is a tree too, so the rows may be truncated anywhere.

    Attributes:
        tokens: Target ids, including recomputed tokens (also the root).
        parents: Index of each token's parent, ROOT, or NO_NODE for a recomputed token.
        counts: Number of rows of each sequence. The first is the main path, including the root.
    """

    tokens: list[int]
    parents: list[int]
    counts: list[int]

    def fitted(self, length: int, branches: int) -> "TreeRows":
        """Return the rows that can be verified with at most so many branches.

        They are truncated or padded with NO_NODE to `length`, the scheduled draft length. Padding
        belongs to the last sequence, which writes KV for it: attention may read all KV of a tile.
        """
        counts: list[int] = []
        left = length + 1
        for count in self.counts[: branches + 1]:
            if left:
                counts.append(min(count, left))
                left -= counts[-1]
        nodes = sum(counts) - 1
        behind = length - nodes
        counts[-1] += behind
        return TreeRows(self.tokens[:length], self.parents[:nodes] + [NO_NODE] * behind, counts)

    def end(self, emitted: Sequence[int]) -> tuple[int, int]:
        """Return the sequence and depth at which the walk with these emitted tokens ended.

        The last token was chosen there. The KV of its ancestors is in the same sequence.
        """
        at = ROOT
        for token in emitted[:-1]:
            at = next(
                node
                for node, parent in enumerate(self.parents)
                if parent == at and self.tokens[node] == token
            )
        sequence = int(np.searchsorted(np.cumsum(self.counts), at + 1, "right"))
        return sequence, len(emitted) - 1


def lay_out(
    root: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    values: Sequence[float],
    *,
    branches: int,
    rows: int,
) -> TreeRows:
    """Lay out a tree as rows: the main path of most valuable children, then the best branches.

    Args:
        root: The request's last token.
        tokens, parents, values: As in `ScoredTree`.
        branches, rows: Largest numbers; `rows` includes recomputed tokens but not the root's row.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    laid = TreeRows([], [], [])
    place = {ROOT: ROOT}  # row of each node
    # Heap of possible next paths: (minus the sum of its values, shared nodes, own nodes).
    paths: list[tuple[float, list[int], list[int]]] = []

    def offer(above: list[int], first: int) -> None:
        own = [first]
        while own[-1] in children:
            own.append(max(children[own[-1]], key=values.__getitem__))
        heappush(paths, (-sum(values[node] for node in own), above, own))

    if ROOT in children:
        offer([], max(children[ROOT], key=values.__getitem__))
    while paths and len(laid.counts) <= branches:
        _, above, own = heappop(paths)
        again = [root, *(tokens[node] for node in above)] if laid.counts else []
        own = own[: max(0, rows - len(laid.tokens) - len(again))]
        if not own:
            continue
        laid.tokens.extend(again)
        laid.parents.extend([NO_NODE] * len(again))
        for node in own:
            place[node] = len(laid.tokens)
            laid.tokens.append(tokens[node])
            laid.parents.append(place[parents[node]])
        path = [*above, *own]
        for depth in range(len(above) + bool(laid.counts), len(path)):
            for child in children[path[depth - 1] if depth else ROOT]:
                if child != path[depth]:
                    offer(path[:depth], child)
        laid.counts.append(1 + len(path))
    return laid if laid.counts else TreeRows([], [], [1])


@dataclass(frozen=True)
class BranchPlan:
    """The S sequences of a step with draft trees: each request's own, followed by its branches.

    Tokens keep the order in which they are scheduled.

    Attributes:
        request_of: int64 [S], request of each sequence.
        counts: int64 [S], rows of each sequence in this step.
        depths: int64 [M], position of each branch row, relative to the request's computed tokens.
        rows: int64 [M], index of each branch row among the step's tokens.
        slots: int64 [M], slot of each branch row's KV.
        lines: int64 [C, 3], (sequence, column, scratch block): block table entries of branches that
            differ from their request's.
        tails: int64 [T, 3], (request, column, scratch block): blocks to copy to scratch before the
            forward.
    """

    request_of: np.ndarray
    counts: np.ndarray
    depths: np.ndarray
    rows: np.ndarray
    slots: np.ndarray
    lines: np.ndarray
    tails: np.ndarray

    @property
    def query_starts(self) -> np.ndarray:
        """int64 [S + 1], index of each sequence's first row among the step's tokens."""
        return np.concatenate([[0], self.counts.cumsum()])

    def blocks_to_copy(
        self, request: int, sequence: int, start: int, depth: int, size: int
    ) -> np.ndarray:
        """Return (column, scratch block) of blocks to copy over a request's own, int64 [n, 2].

        Args:
            sequence: The branch at which its walk ended, counted from 1 within the request.
            start: Number of the request's tokens with KV before the step.
        """
        number = int(np.searchsorted(self.request_of, request)) + sequence
        own = self.lines[self.lines[:, 0] == number, 1:]
        columns = own[:, 0]
        return own[(columns >= (start + 1) // size) & (columns <= (start + depth) // size)]


def plan_branches(
    starts: Sequence[int], counts: Sequence[Sequence[int]], size: int, scratch: Sequence[int]
) -> BranchPlan:
    """Plan the sequences of a step.

    Args:
        starts: Number of tokens with KV of each request, [B].
        counts: Rows of each request's sequences (`TreeRows.fitted`).
        scratch: Free scratch blocks, at least the sum of `scratch_blocks` over the requests.
    """
    number = np.array([len(own) for own in counts], np.int64)
    request_of = np.arange(len(number)).repeat(number)
    fed = np.array([count for own in counts for count in own], np.int64)
    is_side = np.ones(len(fed), bool)
    is_side[number.cumsum() - number] = False
    side = np.flatnonzero(is_side)
    start = np.array(starts, np.int64)[request_of[side]]
    column = start // size
    blocks = (start + fed[side] - 1) // size - column + 1
    lent = np.array(scratch[: blocks.sum()], np.int64)
    first = blocks.cumsum() - blocks  # index of each branch's first block in `lent`
    of, depths = _counted(fed[side])
    position = start[of] + depths
    slots = lent[first[of] + position // size - column[of]] * size + position % size
    line_of, ahead = _counted(blocks)
    begun = start % size > 0
    return BranchPlan(
        request_of,
        fed,
        depths,
        (fed.cumsum() - fed)[side][of] + depths,
        slots,
        np.stack([side[line_of], column[line_of] + ahead, lent], 1),
        np.stack([request_of[side], column, lent[first]], 1)[begun],
    )


def scratch_blocks(start: int, counts: Sequence[int], size: int) -> int:
    """Return the number of scratch blocks of a request's branches; arguments as `plan_branches`."""
    return sum((start + count - 1) // size - start // size + 1 for count in counts[1:])


def _counted(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat each index `counts` times; also return 0, 1, ... within each index."""
    of = np.arange(len(counts)).repeat(counts)
    return of, np.arange(len(of)) - (counts.cumsum() - counts)[of]
