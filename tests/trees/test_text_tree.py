# SPDX-License-Identifier: Apache-2.0
"""Trees through text: spellings, joins, and the target's verdict on a tree."""

from collections.abc import Sequence

import numpy as np
import pytest
from contexts import opened
from test_layout import paths_of
from toys import toy

from vllm_hetero_spec.text.bridge import Bridge, make_bridge
from vllm_hetero_spec.trees.growth import ScoredTree, TreeBuilder, text_trees
from vllm_hetero_spec.trees.walk import ROOT

LETTERS = [bytes([letter]) for letter in b"abcdefgh "]


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    """A target that joins "ab", "abc" and "gh", and a drafter of letters that joins "de"."""
    return make_bridge(toy([*LETTERS, b"ab", b"abc", b"gh"]), toy([*LETTERS, b"de"]))


def test_the_value_of_a_token_is_that_of_all_texts_that_begin_with_it(bridge: Bridge) -> None:
    """The letters after the drafter's "a" determine if it is a part of "ab", "abc" or neither."""
    growth = TreeBuilder()
    (a, de) = growth.offer(ROOT, [0, 9], [0.6, 0.3])
    b, _ = growth.offer(a, [1, 3], [0.5, 0.5])
    growth.offer(b, [2, 4], [0.9, 0.1])
    growth.offer(de, [5], [1.0])
    (tree,) = text_trees([growth], [opened(bridge, [8, 6])], [9], bridge.to_target, 20)
    worth = dict(zip(paths_of(tree.tokens, tree.parents), tree.values, strict=True))
    assert worth == pytest.approx(
        {(10,): 0.27, (9,): 0.03, (9, 4): 0.03, (0,): 0.3, (0, 3): 0.3}
        | {(3,): 0.3, (3, 4): 0.3, (3, 4, 5): 0.3}
    )
    assert tree.values == sorted(tree.values, reverse=True)


def test_requests_are_translated_together(bridge: Bridge) -> None:
    """Each request has its own context and depth. One of them has no draft."""
    calls = []

    def to_target(*arguments: Sequence) -> list[list[int]]:
        calls.append(len(arguments[0]))
        return bridge.to_target(*arguments)

    first, nothing, last = TreeBuilder(), TreeBuilder(), TreeBuilder()
    first.offer(ROOT, [0, 1], [0.5, 0.4])
    (node,) = last.offer(ROOT, [9], [0.5])
    last.offer(node, [6], [0.5])
    contexts = [opened(bridge, [8, 6]), opened(bridge, [8]), opened(bridge, [8, 0])]
    trees = text_trees([first, nothing, last], contexts, [4, 4, 2], to_target, 20)
    assert calls == [4]
    found = [paths_of(tree.tokens, tree.parents) for tree in trees]
    assert found == [[(0,), (1,)], [], [(3,), (3, 4)]]


def test_siblings_of_a_chain(bridge: Bridge) -> None:
    """Known rows of the drafter give other spellings as siblings, without more steps."""
    growth = TreeBuilder()
    growth.offer_along([0, 1, 2], [[0, 9], [3, 1], [2, 3]], [[0.8, 0.1], [0.2, 0.7], [0.6, 0.3]])
    assert None not in [growth.to_feed(path) for path in ([0, 1, 2], [0, 1, 3], [0, 3], [9])]
    assert growth.to_feed([0, 1]) is None  # it has been fed already
    (tree,) = text_trees([growth], [opened(bridge, [8])], [9], bridge.to_target, 20)
    worth = dict(zip(paths_of(tree.tokens, tree.parents), tree.values, strict=True))
    # The rows do not contain what else may follow "ab" and "a", so these are leaves too.
    assert worth == pytest.approx(
        {(10,): 0.8 * 0.7 * 0.6, (9,): 0.8 * 0.7 * 0.4, (9, 3): 0.8 * 0.7 * 0.3}
        | {(0,): 0.8 * 0.3, (0, 3): 0.8 * 0.2, (3,): 0.1, (3, 4): 0.1}
    )


def test_nodes_that_the_target_has_tested() -> None:
    tree = ScoredTree.spelt([[1, 2], [1, 3], [4]], [0.3, 0.2, 0.25]).best(9)
    assert paths_of(tree.tokens, tree.parents) == [(1,), (1, 2), (4,), (1, 3)]
    children = tree.children()
    assert children.parent.tolist() == [0, 1, 0, 1]
    assert children.rank.tolist() == [0, 0, 1, 1]
    assert children.depth.tolist() == [0, 1, 0, 1]
    assert children.shares == pytest.approx([0.5, 0.6, 0.25, 0.4])
    assert tree.tested([1, 3, 7]) == ([0, 2, 1, 3], [True, False, False, True])
    assert tree.tested([1, 8]) == ([0, 2, 1, 3], [True, False, False, False])
    assert tree.tested([8, 1]) == ([0, 2], [False, False])
    again = tree.revalued(children.shares.tolist())
    assert again.values == pytest.approx(tree.values)
    assert tree.revalued([0.9, 0.5, 0.1, 0.2]).values == pytest.approx([0.9, 0.45, 0.1, 0.18])
    nothing = ScoredTree([], [], [])
    assert nothing.tested([1]) == ([], [])
    assert nothing.children().shares.dtype == np.float64
