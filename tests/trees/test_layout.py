# SPDX-License-Identifier: Apache-2.0
"""Draft trees laid out as side sequences: which KV slots each row reads and writes.

A toy attention of plain numbers replaces the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hetero_spec.trees.layout import (
    BranchPlan,
    TreeRows,
    lay_out,
    plan_branches,
    scratch_blocks,
)
from vllm_hetero_spec.trees.walk import NO_NODE, ROOT, TreeBatch, greedy_walk

VOCABULARY, LAYERS, GOAL = 3, 2, 25
OWN = 64  # blocks of each request; higher blocks are scratch
Tree = tuple[list[int], list[int], list[float]]  # tokens, parents, values


def states_of(text: Sequence[int]) -> list[int]:
    """Return the state of the model at each position of a text, computed without a cache.

    A state depends on all positions up to its own.
    """
    states = [hash(pair) for pair in enumerate(text)]
    for _ in range(LAYERS):
        states = [hash(tuple(states[: place + 1])) for place in range(len(states))]
    return states


def chosen(state: int) -> int:
    return hash((state, 7)) % VOCABULARY


def alone(text: Sequence[int], count: int) -> list[int]:
    """Return the text with `count` more tokens that the target chooses alone."""
    text = list(text)
    for _ in range(count):
        text.append(chosen(states_of(text)[-1]))
    return text


@dataclass
class Target:
    """KV blocks, and a forward pass over sequences with block tables, as in attention kernels."""

    size: int  # tokens per block
    fault: str = ""  # a fault to inject, "" for none
    # The content of each slot, for each layer.
    cells: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in range(LAYERS)])
    slots: list[int] = field(default_factory=list)  # of each row of the last forward pass

    def copy(self, source: int, goal: int) -> None:
        for cells in self.cells:
            for place in range(self.size):
                cells[goal * self.size + place] = cells.get(source * self.size + place, -1)

    def forward(
        self, tokens: list[int], starts: list[int], plan: BranchPlan, tables: list[list[int]]
    ) -> list[int]:
        """Return the states of all rows; the inputs are built as in a model runner."""
        query, own = plan.query_starts, plan.request_of
        first = np.array(starts)[own]
        lines = [list(tables[request]) for request in own]
        for sequence, column, block in plan.lines:
            lines[sequence][column] = block
        if self.fault != "no tails":
            for request, column, block in plan.tails:
                self.copy(tables[request][column], block)
        owner = np.arange(len(plan.counts)).repeat(plan.counts)
        # Positions and slots of chains first, then the side rows replace theirs.
        main = np.searchsorted(own, own)
        position = first[owner] + np.arange(len(tokens)) - query[main[owner]]
        places = zip(owner, position.tolist(), strict=True)
        self.slots = [self._slot(tables[own[s]], p) for s, p in places]
        for row, depth, slot in zip(plan.rows, plan.depths, plan.slots, strict=True):
            self.slots[row] = int(slot)
            if self.fault != "positions of a chain":
                position[row] = first[owner[row]] + depth
        states = [hash(pair) for pair in zip(position.tolist(), tokens, strict=True)]
        for cells in self.cells:
            cells |= zip(self.slots, states, strict=True)
            for sequence, line in enumerate(lines if not self.fault else ()):
                end = first[sequence] + plan.counts[sequence]  # a kernel may read all up to here
                assert all(cells.get(self._slot(line, p), -1) != -1 for p in range(end))
            sees = (first - query[:-1])[owner] + np.arange(len(tokens)) + 1
            states = [
                hash(tuple(cells.get(self._slot(lines[s], p), -1) for p in range(count)))
                for s, count in zip(owner, sees.tolist(), strict=True)
            ]
        return states

    def _slot(self, line: list[int], position: int) -> int:
        return line[position // self.size] * self.size + position % self.size


def random_tree(generator: np.random.Generator, truth: Sequence[int], nodes: int) -> Tree:
    """Parents first, values falling along paths; tokens often follow the target's text `truth`."""
    values: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(nodes):
        head = list(values)[generator.integers(len(values))]
        on_course = head == tuple(truth[: len(head)]) and len(head) < len(truth)
        right = on_course and generator.random() < 0.7
        token = truth[len(head)] if right else int(generator.integers(VOCABULARY))
        values.setdefault((*head, token), values[head] * float(generator.uniform(0.2, 0.9)))
    paths = list(values)
    parents = [paths.index(path[:-1]) - 1 for path in paths[1:]]
    return [path[-1] for path in paths[1:]], parents, list(values.values())[1:]


class Service:
    """Requests that verify a random tree in each step, until each has GOAL tokens."""

    def __init__(self, seed: int, fault: str = "") -> None:
        self.random, self.fault = np.random.default_rng(seed), fault
        count = int(self.random.integers(1, 4))
        self.size = int(self.random.choice([1, 2, 4, 8]))
        lengths = self.random.integers(1, 12, size=count)
        self.texts = [self.random.integers(VOCABULARY, size=n).tolist() for n in lengths]
        self.truths = [alone(text, GOAL + 12) for text in self.texts]
        self.ends = [len(text) + GOAL for text in self.texts]
        self.tables = [list(range(OWN * i, OWN * (i + 1))) for i in range(count)]
        self.scratch = list(range(OWN * count, OWN * count + 300))
        if fault == "blocks lent twice":
            self.scratch = self.scratch[:1] * 300
        self.target = Target(self.size, fault)
        self.side_walks = 0

    def run(self) -> bool:
        """Return True if the output of each request is that of the target alone."""
        fed = list(map(len, self.texts))
        plan = plan_branches([0] * len(fed), [[n] for n in fed], self.size, [])
        states = self.target.forward(list(chain(*self.texts)), [0] * len(fed), plan, self.tables)
        for text, end in zip(self.texts, np.cumsum(fed), strict=True):
            text.append(chosen(states[end - 1]))
        while any(len(text) < end for text, end in zip(self.texts, self.ends, strict=True)):
            self.step()
        done = zip(self.texts, self.truths, self.ends, strict=True)
        return all(text[:end] == truth[:end] for text, truth, end in done)

    def drafts(self) -> Iterator[tuple[TreeRows, int]]:
        """Yield drafts with their lengths: unchanged, shortened or filled up."""
        for text, truth in zip(self.texts, self.truths, strict=True):
            course, nodes = truth[len(text) : len(text) + 6], int(self.random.integers(10))
            tree = random_tree(self.random, course, nodes)
            laid = lay_out(text[-1], *tree, branches=int(self.random.integers(6)), rows=24)
            length = len(laid.tokens)
            if self.random.random() < 0.3:
                length = int(self.random.integers(length + 4))
            yield laid.fitted(length, int(self.random.integers(6))), length

    def step(self) -> None:
        drafts, lengths = zip(*self.drafts(), strict=True)
        starts = [len(text) - 1 for text in self.texts]
        counts = [draft.counts for draft in drafts]
        plan = plan_branches(starts, counts, self.size, self.scratch)
        tokens: list[int] = []
        for text, draft, length in zip(self.texts, drafts, lengths, strict=True):
            tokens += [text[-1], *draft.tokens, *[0] * (length - len(draft.tokens))]
        states = self.target.forward(tokens, starts, plan, self.tables)
        parents = [draft.parents for draft in drafts]
        trees = TreeBatch.of(torch.tensor(tokens), parents)
        if not self.fault:
            self.check_rows(trees, states)
            self.check_writes(plan, starts, counts)
        verdict = greedy_walk(trees, torch.tensor(list(map(chosen, states))))
        for i, (text, draft) in enumerate(zip(self.texts, drafts, strict=True)):
            emitted = verdict.tokens[i, : verdict.accepted[i] + 1].tolist()
            sequence, depth = draft.end(emitted)
            home = plan.blocks_to_copy(i, sequence, starts[i], depth, self.size).tolist()
            self.side_walks += sequence > 0
            assert bool(home) == (sequence > 0)
            for column, block in home if self.fault != "no way home" else ():
                assert (column + 1) * self.size > starts[i] + 1, "it may have been published"
                self.target.copy(block, self.tables[i][column])
            text += emitted

    def check_rows(self, trees: TreeBatch, states: list[int]) -> None:
        """Each node's row has read exactly its text and its path."""
        of, parents = trees.request_of.tolist(), trees.parents.tolist()
        texts: dict[int, list[int]] = {}
        for row, depth in enumerate(trees.depths.tolist()):
            if depth == 0:
                texts[row] = self.texts[of[row]]
            elif depth > 0:
                texts[row] = [*texts[parents[row]], int(trees.tokens[row])]
        for row, text in texts.items():
            assert states[row] == states_of(text)[-1]

    def check_writes(self, plan: BranchPlan, starts: list[int], counts: list[list[int]]) -> None:
        """Side rows write only scratch blocks, others their request's; each block is lent once."""
        lent = plan.lines[:, 2].tolist()
        each = zip(starts, counts, strict=True)
        assert len(set(lent)) == len(lent) == sum(scratch_blocks(*x, self.size) for x in each)
        assert set(lent) <= set(self.scratch)
        blocks = np.array(self.target.slots) // self.size
        owner = np.arange(len(plan.counts)).repeat(plan.counts)
        side = np.isin(np.arange(len(blocks)), plan.rows)
        for sequence in range(len(plan.counts)):
            own = set(plan.lines[plan.lines[:, 0] == sequence, 2])
            wrote = set(blocks[side & (owner == sequence)])
            assert wrote <= own
        request = plan.request_of[owner]
        assert (blocks[~side] // OWN == request[~side]).all()


@given(seed=st.integers(0, 1 << 30))
def test_output_with_trees_is_that_of_the_target(seed: int) -> None:
    assert Service(seed).run()


def test_walks_end_on_side_paths() -> None:
    """This must happen often, or the test above proves little."""
    services = [Service(seed) for seed in range(20)]
    assert all(service.run() for service in services)
    assert sum(service.side_walks for service in services) > 50


@pytest.mark.parametrize(
    "fault", ["no tails", "positions of a chain", "no way home", "blocks lent twice"]
)
def test_faults_are_caught(fault: str) -> None:
    right = [Service(seed, fault).run() for seed in range(20)]
    assert sum(right) < 10


# ------------------------------------------------------------------------------- the arrays


@given(seed=st.integers(0, 1 << 30), branches=st.integers(0, 6), rows=st.integers(0, 30))
def test_a_layout(seed: int, branches: int, rows: int) -> None:
    """The main path is first, ancestors are included. Without tight bounds all nodes are."""
    generator = np.random.default_rng(seed)
    tokens, parents, values = random_tree(generator, [], int(generator.integers(15)))
    laid = lay_out(77, tokens, parents, values, branches=branches, rows=rows)
    assert sum(laid.counts) - 1 == len(laid.tokens) == len(laid.parents) <= rows
    assert len(laid.counts) <= branches + 1
    whole = paths_of(tokens, parents)
    found = paths_of(laid.tokens, laid.parents)
    nodes = [path for path in found if path]
    assert len(set(nodes)) == len(nodes)
    assert set(nodes) <= set(whole)
    # Each sequence is a path from the root: rows that are fed again, then its own nodes.
    row = 0
    for place, count in enumerate(laid.counts):
        fed = ([77] if not place else []) + laid.tokens[row : row + count - (not place)]
        assert fed[0] == 77
        if count > 1:
            assert tuple(fed[1:]) == found[row + count - 1 - (not place)]
        row += count - (not place)
    value = dict(zip(whole, values, strict=True))
    if laid.counts[0] > 1:
        for depth, path in enumerate(found[: laid.counts[0] - 1]):
            beside = [v for p, v in value.items() if p[:-1] == path[:-1]]
            assert len(path) == depth + 1
            assert value[path] == max(beside)
    unbounded = lay_out(77, tokens, parents, values, branches=99, rows=999)
    assert {path for path in paths_of(unbounded.tokens, unbounded.parents) if path} == set(whole)
    leaves = set(whole) - {path[:-1] for path in whole}
    assert len(unbounded.counts) == max(1, len(leaves))


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each node, or () for a row that is no node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, token) if parent != NO_NODE else ())
    return paths


def test_the_most_valuable_paths_come_first() -> None:
    """The value of a path is that of the nodes it adds; its own side paths come after it."""
    tokens = [1, 2, 3, 4, 5, 6]
    parents = [ROOT, ROOT, ROOT, 1, 3, 1]
    laid = lay_out(9, tokens, parents, [0.5, 0.2, 0.25, 0.15, 0.1, 0.04], branches=2, rows=20)
    assert laid.tokens == [1, 9, 2, 4, 5, 9, 3]
    assert laid.parents == [ROOT, NO_NODE, ROOT, 2, 3, NO_NODE, ROOT]
    assert laid.counts == [2, 4, 2]
    assert laid.end([2, 4, 7]) == (1, 2)
    assert laid.end([7]) == (0, 0)
    # The second side path is cut, so that only the root is fed again.
    assert laid.fitted(6, 9).counts == [2, 4, 1]
    # Only the first side path remains; filler rows follow it.
    fitted = laid.fitted(7, 1)
    assert (fitted.counts, fitted.parents[-2:]) == ([2, 6], [NO_NODE] * 2)


@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 16]),
)
def test_chains_are_not_changed(starts: list[int], seed: int, size: int) -> None:
    """Prompts and drafts without branches are one sequence each, and no block is lent."""
    generator = np.random.default_rng(seed)
    laid = []
    for length in generator.integers(7, size=len(starts)).tolist():
        ids = list(range(length))
        laid.append(lay_out(9, ids, range(-1, length - 1), [0.5] * length, branches=3, rows=9))
        assert laid[-1] == TreeRows(ids, list(range(-1, length - 1)), [length + 1])
        assert laid[-1].fitted(length, 3) == laid[-1]
    rows = [len(draft.tokens) + 1 for draft in laid]
    plan = plan_branches(starts, [draft.counts for draft in laid], size, [])
    assert plan.request_of.tolist() == list(range(len(starts)))
    assert plan.counts.tolist() == rows
    assert not any(map(len, (plan.rows, plan.depths, plan.slots, plan.lines, plan.tails)))
    assert plan.query_starts.tolist() == [0, *np.cumsum(rows)]
