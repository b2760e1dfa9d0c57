# SPDX-License-Identifier: Apache-2.0
"""How a target computes the rows of draft trees: side sequences over scratch blocks.

A target's attention knows sequences, not trees. So a tree's main path is its request's own
sequence, as a chain is, and every other path is a sequence beside it: with the request's full
blocks, and scratch blocks from the one on that the step begins in. The tokens that a path shares
with those before it are fed again at its beginning, so that all it reads of this step is its own.

Before the forward, what the request's last block holds already is copied to the first scratch block
of each branch (`tails`). After a walk that ended on a branch, its scratch blocks replace the
request's own (`blocks_to_copy`), except a block that the root has filled: it is right already, and
may be published. Scratch blocks are reserved for one step.

Plain arrays: nothing here knows a model runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.trees.walk import NO_NODE, ROOT


class TreeRows(NamedTuple):
    """A request's draft as its target is fed it, behind the row of the root.

    Every beginning of it is a tree too: it may be cut anywhere.

    Attributes:
        tokens: Target ids; tokens that are fed again, the root's as well, stand among them.
        parents: Of each token its parent among them, ROOT, or NO_NODE for one that is fed again.
        counts: Rows of each sequence; those of the first, the main path, begin with the root's.
    """

    tokens: list[int]
    parents: list[int]
    counts: list[int]

    def fitted(self, length: int, branches: int) -> "TreeRows":
        """What of it can be verified, `length` long; what is behind that is no node.

        Args:
            length: Tokens of the draft that the target is fed: fewer or more than there are.
            branches: Side sequences that it may have.
        """
        counts: list[int] = []
        left = length + 1
        for count in self.counts[: branches + 1]:
            if left:
                counts.append(min(count, left))
                left -= counts[-1]
        nodes = sum(counts) - 1
        behind = length - nodes
        return TreeRows(self.tokens[:length], self.parents[:nodes] + [NO_NODE] * behind, counts)

    def end(self, emitted: Sequence[int]) -> tuple[int, int]:
        """Where the walk that emitted these tokens ended: the sequence, and the depth in it.

        The last of them was chosen there. Its ancestors' KV lies in the same sequence.
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
    """A tree as rows: the main path, the likeliest child each time, then the most valuable others.

    Args:
        root: The request's last token.
        tokens: Of the tree, each behind its parent.
        parents: Index of each token's parent, ROOT for one that continues the text itself.
        values: Of each token, not above its parent's.
        branches: Side sequences at most.
        rows: Rows behind the root's at most, with what is fed again.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    laid = TreeRows([], [], [])
    place = {ROOT: ROOT}  # of each node among the rows
    # Paths that may come next, the most valuable first: minus its values, the nodes above, its own.
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
    """A step's sequences where some drafts are trees: each request's own, its sides behind it.

    Tokens keep the order in which they are scheduled. Sequences are numbered through the step.

    Attributes:
        request_of: int64 [S], of each sequence.
        counts: int64 [S], its rows in this step.
        depths: int64 [M], of the rows of side sequences, positions behind `starts`;
        rows: int64 [M], their places among the step's tokens;
        slots: int64 [M], where their KV is written, -1 for a row that fills a draft up.
        lines: int64 [C, 3], sequence, column and scratch block: how the lines of the sides differ
            from their requests' in the block table.
        tails: int64 [T, 3], request, column and scratch block: what is copied to scratch before the
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
        """int64 [S + 1], of each sequence among the step's tokens."""
        return np.concatenate([[0], self.counts.cumsum()])

    def blocks_to_copy(
        self, request: int, sequence: int, start: int, depth: int, size: int
    ) -> np.ndarray:
        """int64 [n, 2], column and scratch block: what is copied over a request's own blocks.

        Args:
            request: Of the step.
            sequence: Where its walk ended, numbered among its own; the main one has nothing to
                copy.
            start: Its tokens that had KV before the step.
            depth: At which it ended.
            size: Of a block, in tokens.
        """
        number = int(np.searchsorted(self.request_of, request)) + sequence
        own = self.lines[self.lines[:, 0] == number, 1:]
        columns = own[:, 0]
        return own[(columns >= (start + 1) // size) & (columns <= (start + depth) // size)]


def plan_branches(
    starts: Sequence[int],
    lengths: Sequence[int],
    counts: Sequence[Sequence[int]],
    size: int,
    scratch: Sequence[int],
) -> BranchPlan:
    """The sequences of a step.

    Args:
        starts: Tokens of each request that have KV, [B].
        lengths: Rows that are scheduled for each request, [B].
        counts: Rows of each request's sequences (`TreeRows.fitted`); rows behind them fill the
            draft up, and count with the last.
        size: Of a block, in tokens.
        scratch: Blocks to be lent, at least `scratch_blocks` in all.
    """
    number = np.array([len(own) for own in counts], np.int64)
    request_of = np.arange(len(number)).repeat(number)
    real = np.array([count for own in counts for count in own], np.int64)
    last = number.cumsum() - 1
    fed = real.copy()
    fed[last] += np.array(lengths, np.int64) - np.add.reduceat(real, last - number + 1)
    is_side = np.ones(len(fed), bool)
    is_side[last - number + 1] = False
    side = np.flatnonzero(is_side)
    start = np.array(starts, np.int64)[request_of[side]]
    column = start // size
    blocks = (start + real[side] - 1) // size - column + 1
    lent = np.array(scratch[: blocks.sum()], np.int64)
    first = blocks.cumsum() - blocks  # of each side among the blocks that are lent
    of, depths = _counted(fed[side])
    slots = np.full(len(of), -1)
    written = depths < real[side][of]
    at, position = of[written], (start[of] + depths)[written]
    slots[written] = lent[first[at] + position // size - column[at]] * size + position % size
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
    """Blocks that the side sequences of a request are lent; arguments as of `plan_branches`."""
    return sum((start + count - 1) // size - start // size + 1 for count in counts[1:])


def _counted(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each index as often as its count, and 0, 1, ... for each."""
    of = np.arange(len(counts)).repeat(counts)
    return of, np.arange(len(of)) - (counts.cumsum() - counts)[of]
