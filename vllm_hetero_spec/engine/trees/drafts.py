# SPDX-License-Identifier: Apache-2.0
"""Builds trees of target tokens from a drafting round: its chains and their alternatives."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.tasks import DraftTask, TopCandidates
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.text.bridge import Bridge
from vllm_hetero_spec.trees.growth import (
    Chances,
    RaceTreeBuilder,
    TreeBuilder,
    TreeCandidates,
    text_trees,
)

# Unfed nodes to translate per request; each takes 10 us. Measured on a pair of code models: 24
# improve trees of 16 nodes by 2 %, and trees of 8 nodes not at all.
_LEAVES = 12


class DrafterBranch(NamedTuple):
    """A branch of a draft tree in drafter tokens, from the end of the context.

    It shares its first `leaves` tokens with the chain. `beside` has its top candidates, unused at
    the shared positions.
    """

    tokens: list[int]
    beside: TopCandidates
    leaves: int


@dataclass(slots=True)
class BranchTokens:
    """Drafter tokens of one request, over one or more rounds.

    Attributes:
        chain: Drafter ids.
        beside: Top candidates of the chain's rows, in parts.
    """

    task: DraftTask
    chain: list[int] = field(default_factory=list)
    beside: list[TopCandidates] = field(default_factory=list)
    forks: list[DrafterBranch] = field(default_factory=list)


class TreeDrafts:
    """Builds trees from the results of drafting rounds; `sampling` is None if all are greedy."""

    def __init__(self, bridge: Bridge, sampling: SampledMethod | None, stats: DraftStats) -> None:
        self._bridge, self._sampling, self._stats = bridge, sampling, stats
        proposed, ends = bridge.special.proposed, bridge.drafter_eos
        self._ends = ends
        self._target_ends = frozenset(proposed[end] for end in ends if end in proposed)

    def greedy(self, followed: Sequence[BranchTokens], drafts: Sequence[Draft]) -> list[Draft]:
        """Return greedy drafts with their candidates, translated in one call."""
        began = time.perf_counter()
        trees = text_trees(
            [self._grown(of) for of in followed],
            [of.task.state.context for of in followed],
            [of.task.lookahead for of in followed],
            self._bridge.to_target,
            _LEAVES,
        )
        drafts = [
            draft._replace(explored=TreeCandidates(tree))
            for draft, tree in zip(drafts, trees, strict=True)
        ]
        self._stats.translate_seconds += time.perf_counter() - began
        return drafts

    def raced(self, followed: BranchTokens, draft: Draft, chances: Chances) -> Draft:
        """Return a raced draft with its candidates."""
        assert self._sampling is not None
        lookahead = followed.task.lookahead
        growth = RaceTreeBuilder(self._sampling.spell, chances, self._target_ends)
        (beside,) = followed.beside
        self._race_along(growth, followed.chain, beside, 0, lookahead)
        for path, rows, leaves in followed.forks:
            self._race_along(growth, path, rows, leaves + 1, lookahead)
        near = np.flatnonzero(growth.tree.children().depth < lookahead).tolist()
        leads, shares = ([of[n] for n in near] for of in (growth.leads, growth.shares))
        return draft._replace(explored=TreeCandidates(growth.tree.only(near), leads, shares))

    def _race_along(
        self,
        growth: RaceTreeBuilder,
        path: Sequence[int],
        rows: TopCandidates,
        known: int,
        lookahead: int,
    ) -> None:
        """Add the arrivals after the tokens of a path, except its first `known` tokens."""
        columns = rows.tokens, rows.fed, rows.speeds, rows.shares
        node = growth.to_feed(path[:known]) if self._ends.isdisjoint(path[:known]) else None
        for drafted, *arrivals in list(zip(path, *columns, strict=True))[known:]:
            if node is None or len(growth.path(node)) >= lookahead:
                return
            growth.arrived(node, arrivals)
            node = None if drafted in self._ends else growth.to_feed([drafted], node)

    def _grown(self, followed: BranchTokens) -> TreeBuilder:
        beside = TopCandidates(*map(np.concatenate, zip(*followed.beside, strict=True)))
        tokens, shares = beside.tokens.tolist(), beside.shares.tolist()
        chain = self._ended(followed.chain, tokens)
        if chain:
            context = followed.task.state.context
            fitting = set(self._bridge.first_choices(context, tokens[0])) | {chain[0]}
            known = list(zip(tokens[0], shares[0], strict=True))
            left = 1.0 - sum(share for token, share in known if token not in fitting)
            tokens[0] = [token for token, _ in known if token in fitting]
            shares[0] = [share / max(left, share) for token, share in known if token in fitting]
        growth = TreeBuilder(self._ends)
        growth.offer_along(chain, tokens, shares)
        for path, rows, leaves in followed.forks:
            own = leaves + 1
            node = growth.to_feed(path[:own])
            if node is not None:
                behind = rows.tokens[own:].tolist()
                rest = self._ended(path[own:], behind)
                growth.offer_along(rest, behind, rows.shares[own:].tolist(), node)
        return growth

    def _ended(self, path: Sequence[int], tokens: list[list[int]]) -> Sequence[int]:
        """Return a path up to its end token; add each of its tokens to its row of `tokens`."""
        end = next((place for place, d in enumerate(path, 1) if d in self._ends), len(path))
        for drafted, known in zip(path[:end], tokens, strict=False):
            if drafted not in known:  # it ties with the last one, or was preferred to all
                known[-1] = drafted
        return path[:end]
