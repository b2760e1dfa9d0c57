# SPDX-License-Identifier: Apache-2.0
"""What drafters may write, as trees of target tokens."""

from collections.abc import Callable, Collection, Sequence

from vllm_hetero_spec.text.context import Context
from vllm_hetero_spec.trees.growth import ScoredTree, TreeBuilder
from vllm_hetero_spec.trees.walk import ROOT

# See `Bridge.to_target`.
Translate = Callable[[Sequence[Context], Sequence[Sequence[int]], Sequence[int]], list[list[int]]]


def beside_a_chain(
    chain: Sequence[int],
    tokens: Sequence[Sequence[int]],
    shares: Sequence[Sequence[float]],
    ends: Collection[int] = (),
) -> TreeBuilder:
    """What is known once a chain was drafted: its tokens, and the others of the rows before them.

    Args:
        chain: Drafter ids.
        tokens: The likeliest of each row, among them that of the chain.
        shares: Their probabilities.
        ends: Drafter ids that nothing follows.
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
    """The target tokens that spell what may be written, each with all that begins with it.

    Args:
        growths: Of drafter tokens, one for each request.
        contexts: Of the requests.
        limits: Depth of each request's tree at most, in target tokens.
        to_target: Translates; called once.
        leaves: Paths of each request that are translated, beside what its fed nodes leave.

    Returns:
        Trees with the most valuable tokens first.
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
