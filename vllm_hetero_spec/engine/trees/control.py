# SPDX-License-Identifier: Apache-2.0
"""Policy of draft trees: which drafts are trees, which of their tokens are verified, their values.

Values are learnt from the emitted tokens: at each visited node, which child was next. This includes
children that were found but not verified.
"""

import sys
from collections.abc import Collection, Sequence
from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import NamedTuple

import numpy as np

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.tasks import DraftTask, DraftTiming
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl, PlanPolicy, StepPlan
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView, TreeRoom
from vllm_hetero_spec.lookahead.controllers import Controller, LookaheadPlan
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics
from vllm_hetero_spec.trees.growth import Children, ScoredTree, TreeCandidates
from vllm_hetero_spec.trees.layout import TreeRows, lay_out
from vllm_hetero_spec.trees.pricing import PricedTree, trim
from vllm_hetero_spec.trees.values import (
    ChildChances,
    TreeValues,
    greedy_evidence,
    race_evidence,
)
from vllm_hetero_spec.trees.walk import NO_NODE, ROOT

# Nodes to price per allowed node of a tree; others are not worth a row.
_PRICED = 2
_NEARLY_FULL = 2  # rows; a tree that leaves fewer unused might have used more


class _PendingTree(NamedTuple):
    """A tree in verification; `tree`, `children` and `evidence` include all candidates."""

    tree: ScoredTree
    children: Children
    evidence: np.ndarray
    raced: bool
    nodes: int = 0
    branches: int = 0
    chain: Sequence[int] = ()


class TreePolicy(PlanPolicy):
    """The trees of one engine.

    Args:
        branches: Statistics for the controller; None if it does not use them.

    Attributes:
        rows: Rows that the largest of the last trees could use, including recomputed ones.
        side_tokens_accepted: Number of accepted tokens outside the drafter's chain.
    """

    def __init__(
        self, values: TreeValues, branches: BranchStatistics | None, stats: DraftStats
    ) -> None:
        self._values, self._branches, self._stats = values, branches, stats
        self.rows, self.side_tokens_accepted = sys.maxsize, 0
        # Of the present step.
        self._room: TreeRoom | None = None
        self._only_looks = False  # True if only chains are verified
        self._requests: dict[str, RequestView] = {}
        self._valued: dict[str, _PendingTree] = {}
        self._verifying: dict[str, _PendingTree] = {}

    def race_chances(
        self,
        parent: np.ndarray,
        rank: np.ndarray,
        depth: np.ndarray,
        leads: np.ndarray,
        shares: np.ndarray,
    ) -> np.ndarray:
        """Return P[the child is next] for children of races; a `trees.growth.Chances`."""
        return self._values.race.shares(parent, rank, depth, race_evidence(leads, shares))

    def observe(self, step: StepView) -> int:
        again = 0
        tested: tuple[list[tuple[_PendingTree, list[int], list[bool]]], ...] = [], []
        for request in step.requests if self._verifying else ():
            found = self._verifying.get(request.req_id)
            if found is None or not request.new_tokens:
                continue
            del self._verifying[request.req_id]
            if request.num_drafted == found.nodes:  # otherwise it was shortened or dropped
                again += found.branches * (request.num_tokens - len(request.new_tokens))
                kept = request.new_tokens[: request.num_accepted]
                along = takewhile(lambda pair: pair[0] == pair[1], zip(kept, found.chain))  # noqa: B905
                self.side_tokens_accepted += len(kept) - sum(1 for _ in along)
                children, taken = found.tree.tested(request.new_tokens)
                if children:
                    tested[found.raced].append((found, children, taken))
        for req_id in self._verifying.keys() - step.live:
            del self._verifying[req_id]
        kinds = self._values.greedy, self._values.race
        for chances, of_kind in zip(kinds, tested, strict=True):
            if of_kind:
                _learn(chances, of_kind)
        self._room, self._valued = step.trees, {}
        self._requests = {request.req_id: request for request in step.requests}
        if self._branches is not None:
            self._branches.room = self._has_room
        return again

    @property
    def _has_room(self) -> bool:
        return self._room is not None and self._room.branches > 0

    def plan(self, plan: StepPlan, chosen: LookaheadPlan) -> StepPlan:
        self._only_looks = chosen.probe or chosen.trees.looks  # chains cost less
        paths = chosen.trees.paths if self._has_room else 0
        rows = self.rows if paths and any(plan.lookahead) and not self._only_looks else 0
        return plan._replace(paths=paths, rows=rows)

    def paths_of(self, task: DraftTask, planned: int) -> int:
        """Return the drafter paths of a request's tree. Count why it is a chain if it is one."""
        if not task.lookahead or self._room is None:
            return 0
        params = self._requests[task.req_id].params
        alike = not params.random or (task.draw is not None and task.draw.races)
        because = params.keeps_chain if alike else "drawn"
        because = because or ("" if self._has_room else "no_room")
        because = because or ("" if planned else "not_worth_it")
        if because:
            self._stats.keep_chain(because)
        return 0 if because else planned

    def drafted(self, timing: DraftTiming) -> None:
        if timing.trees and self._branches is not None:
            self._branches.found(timing.trees, timing.tree_seconds)

    def trim(self, drafts: Sequence[Draft], control: LookaheadControl) -> list[Draft]:
        """Also lays out trees."""
        growing = [draft for draft in drafts if draft.explored is not None]
        if not growing:
            return control.trim_chains(drafts)
        own = {d.req_id for d in growing if self._requests[d.req_id].params.lookahead is not None}
        if self._branches is not None:
            self._record([draft for draft in growing if draft.req_id not in own], self._branches)
        if self._only_looks:
            growing = [draft for draft in growing if draft.req_id in own]
        grown = {draft.req_id for draft in growing}
        chains = control.trim_chains([draft for draft in drafts if draft.req_id not in grown])
        for draft in chains:
            if draft.explored is not None:  # to learn from its tree, too
                self._verifying[draft.req_id] = self._known(draft)._replace(nodes=len(draft.tokens))
        if not growing:
            return chains
        rows = len(self._requests) + sum(len(draft.tokens) for draft in chains)
        trees = self._trimmed(growing, own, rows, control.controller)
        for chain, tree in zip(growing, trees, strict=True):
            control.expect(chain, tree.common(chain.tokens))
        return chains + trees

    def _trimmed(
        self, drafts: Sequence[Draft], own: Collection[str], rows: int, prices: Controller
    ) -> list[Draft]:
        """Return as drafts the candidates that are worth verifying: trees or chains.

        Args:
            own: Requests with a draft length of their own: their rows have no price.
            rows: Other rows of the target's next step.
        """
        assert self._room is not None
        began = perf_counter()
        most, room = _PRICED * self._room.nodes, self._room
        known = [self._known(draft) for draft in drafts]
        best = [tree.tree.best(most) for tree in known]
        kept: list[list[bool]] = [[True] * len(tree.tokens) for tree in best]
        priced = [place for place, draft in enumerate(drafts) if draft.req_id not in own]
        trees = [self._priced(drafts[place].req_id, best[place], prices) for place in priced]
        free = (keep for keep, draft in zip(kept, drafts, strict=True) if draft.req_id in own)
        fixed = rows + sum(min(room.nodes, len(keep)) for keep in free)
        for place, keep in zip(
            priced, trim(trees, lambda more: prices.row_price(fixed + more)), strict=True
        ):
            kept[place] = keep
        made, self.rows = [], 0
        for draft, tree, found, keep in zip(drafts, best, known, kept, strict=True):
            rows_of = self._laid_out(draft.req_id, tree.only(np.flatnonzero(keep).tolist()), room)
            made.append(_draft(draft.req_id, rows_of))
            full = len(rows_of.tokens) + _NEARLY_FULL > room.rows
            self.rows = max(self.rows, sys.maxsize if full else len(rows_of.tokens))
            nodes, branches = len(made[-1].tokens), len(rows_of.counts) - 1
            self._verifying[draft.req_id] = found._replace(
                nodes=nodes, branches=branches, chain=draft.tokens
            )
        if self._branches is not None:
            self._branches.trimmed(len(made), perf_counter() - began)
        return made

    def _record(self, drafts: Sequence[Draft], branches: BranchStatistics) -> None:
        """Add to the statistics what drafts have beside their chains."""
        began = perf_counter()
        for draft in drafts:
            request = self._requests[draft.req_id]
            branches.add(*self._beside(draft), request.num_tokens, request.params.random)
        branches.found(0, perf_counter() - began)

    def _beside(self, draft: Draft) -> tuple[list[int], list[float], list[int]]:
        """Return depths, values and recomputed rows of the best nodes beside a draft's chain."""
        assert self._room is not None
        tree = self._known(draft).tree.best(self._room.nodes)
        depths, on_chain = tree.depths, {ROOT}
        beside, again = list[int](), list[int]()
        nodes = zip(tree.tokens, tree.parents, depths, strict=True)
        for node, (token, parent, depth) in enumerate(nodes):
            if parent in on_chain and draft.tokens[depth - 1 : depth] == [token]:
                on_chain.add(node)
            else:
                beside.append(node)
                again.append(depth if parent in on_chain else 0)
        return [depths[node] for node in beside], [tree.values[node] for node in beside], again

    def _known(self, draft: Draft) -> _PendingTree:
        """Return the candidates of a draft with their learnt values; cached for the step."""
        if draft.req_id in self._valued:
            return self._valued[draft.req_id]
        assert draft.explored is not None
        explored: TreeCandidates = draft.explored
        tree, leads, shares = explored
        children, raced = tree.children(), leads is not None
        evidence = greedy_evidence(children.shares)
        if leads is not None:
            evidence = race_evidence(np.array(leads), np.array(shares))
        if tree.tokens:
            chances = self._values[raced].shares(*children[:3], evidence)
            tree = tree.revalued(chances.tolist())
        known = _PendingTree(tree, children, evidence, raced, chain=draft.tokens)
        self._valued[draft.req_id] = known
        return known

    def _priced(self, req_id: str, tree: ScoredTree, prices: Controller) -> PricedTree:
        read = self._branches.read_seconds if self._branches is not None else 0.0
        side = prices.tokens_per_second * read * self._requests[req_id].num_tokens
        return PricedTree(tree.parents, tree.values, side, tree.depths)

    def _laid_out(self, req_id: str, tree: ScoredTree, room: TreeRoom) -> TreeRows:
        """Return rows of the best tokens that fit.

        If branches do not fit, choose the best among the tokens that can be placed.
        """
        own = tree.best(room.nodes)
        root = int(self._requests[req_id].token_ids[-1])
        laid_out = partial(lay_out, branches=room.branches, rows=room.rows)
        rows = laid_out(root, *own)
        if len(rows.parents) - rows.parents.count(NO_NODE) == len(own.tokens):
            return rows
        numbers = range(len(tree.tokens))
        more = laid_out(ROOT, numbers, tree.parents, tree.values)
        placed = [n for n, p in zip(more.tokens, more.parents, strict=True) if p != NO_NODE]
        return laid_out(root, *tree.only(sorted(placed)).best(room.nodes))


def _draft(req_id: str, rows: TreeRows) -> Draft:
    if len(rows.counts) == 1:
        return Draft.chain(req_id, rows.tokens)
    place, tokens, parents = {ROOT: ROOT}, list[int](), list[int]()
    for row, (token, parent) in enumerate(zip(rows.tokens, rows.parents, strict=True)):
        if parent != NO_NODE:
            place[row] = len(tokens)
            tokens.append(token)
            parents.append(place[parent])
    return Draft(req_id, tokens, parents, rows=rows)


def _learn(
    chances: ChildChances, tested: Sequence[tuple[_PendingTree, list[int], list[bool]]]
) -> None:
    parts, nodes = [], 0
    for found, at, taken in tested:
        children, evidence = found.children, found.evidence[at]
        parent = children.parent[at] + nodes
        parts.append((parent, children.rank[at], children.depth[at], evidence, np.array(taken)))
        nodes += len(found.tree.tokens) + 1
    parents, *rest = map(np.concatenate, zip(*parts, strict=True))
    _, numbers = np.unique(parents, return_inverse=True)
    chances.observe(numbers, *rest)
