# SPDX-License-Identifier: Apache-2.0
"""Translation of trees of drafter tokens to trees of target tokens, for greedy requests."""

from collections.abc import Callable, Collection, Sequence

from vllm_hetero_spec.text.context import Context
from vllm_hetero_spec.trees.growth import ScoredTree, TreeBuilder
from vllm_hetero_spec.trees.walk import ROOT

# Signature of `Bridge.to_target`.
Translate = Callable[[Sequence[Context], Sequence[Sequence[int]], Sequence[int]], list[list[int]]]


def beside_a_chain(
    chain: Sequence[int],
    tokens: Sequence[Sequence[int]],
    shares: Sequence[Sequence[float]],
    ends: Collection[int] = (),
) -> TreeBuilder:
    """Return the tree of a drafted chain and of the other likely tokens of its rows.

    `tokens` are the most likely drafter ids of each row, including the chain's.
    """
    growth, node = TreeBuilder(ends), ROOT
    for token, beside, probabilities in zip(chain, tokens, shares, strict=True):
        children = growth.offer(node, beside, probabilities)
        node = children[list(beside).index(token)]
    return growth


def text_trees(
    growths: Sequence[TreeBuilder],
    contexts: Sequence[Context],
    limits: Sequence[int],
    to_target: Translate,
    leaves: int,
) -> list[ScoredTree]:
    """Translate trees of drafter tokens, one per request, to trees in order of decreasing value.

    Args:
        limits: Largest depth of each tree, in target tokens.
        to_target: Translates all paths in one call.
        leaves: Largest number of unfed nodes to translate per request, in addition to its fed ones.
    """
    found = [list(growth.leaves(leaves)) for growth in growths]
    counts = list(map(len, found))
    texts = iter(
        to_target(
            [
                context
                for context, count in zip(contexts, counts, strict=True)
                for _ in range(count)
            ],
            [path for own in found for path, _ in own],
            [limit for limit, count in zip(limits, counts, strict=True) for _ in range(count)],
        )
    )
    trees = []
    for own in found:
        spelt = [next(texts) for _ in own]
        tree = ScoredTree.spelt(spelt, [mass for _, mass in own])
        trees.append(tree.best(len(tree.tokens)))
    return trees
