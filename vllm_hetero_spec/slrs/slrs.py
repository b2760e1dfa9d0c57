# SPDX-License-Identifier: Apache-2.0
"""SLRS-n: push-forward that also proposes target tokens made of several drafter tokens.

An example: the target writes NewYork as one token, the drafter as New|York. Push-forward could
only propose New. SLRS-2 runs the drafter once more behind New, before anything is drawn, and reads
that York follows with probability 0.9. With probability 0.3 for New, draft_probs are now known:
0.27 for NewYork and 0.03 for New, which stands for New and something else. Only then New is drawn
and, from the row behind it, York: NewYork is proposed. Had it been New|Jersey, New would have been
proposed, and the next token drawn afresh from the same row without York.

In general a tree of drafter tokens is laid before the draw: a chain of the likeliest tokens for as
long as what they spell begins a longer target token, and beside its first token a few other likely
ones, the side branches. Draws follow the rows of the tree until one leaves it, and the longest
target token found along them is proposed. Its draft_probs add up, over the places where the tree
may be left, with what probability it is left for which token.

What was drawn behind the proposal is thrown away, and the next token drawn from the row there
without what would have made the proposal longer. (To keep what was drawn and tell the verifier the
plain row would be biased.) A chain that is not drawn costs forwards and no memory: the drawn tokens
take its places. Side branches lie in blocks of their own, and are fed again where they are drawn.
`slrs_n` of `tests/oracle/reference.py` is the readable form.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.slrs.pair_merges import PairMerges
from vllm_hetero_spec.slrs.path import SlrsFeed, SlrsPath
from vllm_hetero_spec.slrs.tree import Node, SlrsCandidate, SlrsTree
from vllm_hetero_spec.verify.noise import DRAFT, choose, keys_of, slices, uniform

# Tokens behind a path that are asked whether they merge; all others count as not merging.
PARTNERS = 64


class MergeSpan(NamedTuple):
    """How far SLRS-n looks ahead.

    Attributes:
        tokens: Drafter tokens that a proposed target token may take, n.
        candidates: The drafter is run one token past so many of the likeliest tokens, m.
    """

    tokens: int = 2
    candidates: int = 1

    @property
    def name(self) -> str:
        """As figures are named: slrs_2, slrs_2_of_8."""
        return f"slrs_{self.tokens}" + (f"_of_{self.candidates}" if self.candidates > 1 else "")


class Slrs:
    """Drafts a batch.

    Args:
        tokens: First target token of each drafter token.
        merges: Target tokens of several drafter tokens.
        ends: Drafter ids after which nothing follows.
        span: Drafter tokens that a proposed target token may take, n.
    """

    def __init__(
        self,
        tokens: TokenMap,
        merges: PairMerges,
        ends: frozenset[int],
        span: int = 2,
    ) -> None:
        self._tokens, self._merges, self._ends = tokens, merges, ends
        self._span = span

    def draft(self, rows: torch.Tensor, paths: Sequence[SlrsPath], feed: SlrsFeed) -> torch.Tensor:
        """Fill the paths.

        Args:
            rows: float32 [B, V_D], probabilities of each path's first drafter token.
            paths: [B].
            feed: The drafter.

        Returns:
            float32 [R, V_T], the rows that `row_of` indexes.
        """
        table = self._tokens.table(sum(path.draws for path in paths))
        used = 0
        heads = {i: rows[i] for i, path in enumerate(paths) if path.draws}
        while heads:
            trees = self._trees(heads, paths, feed)
            self._add_draft_probs(list(trees.values()), table[used : used + len(trees)])
            drawn = self._draw(trees, paths)
            ends = {
                i: self._advance(paths[i], row, drawn[i], tree)
                for row, (i, tree) in enumerate(trees.items(), used)
            }
            heads = self._next_heads(ends, paths, feed)
            used += len(trees)
        return table[:used, :-1]

    def _trees(
        self, heads: dict[int, torch.Tensor], paths: Sequence[SlrsPath], feed: SlrsFeed
    ) -> dict[int, SlrsTree]:
        """The tree of each path, known before anything is drawn."""
        trees = {i: SlrsTree(row) for i, row in heads.items()}
        self._find_candidates(list(trees.values()), [1 + paths[i].side_branches for i in trees])
        for depth in range(1, self._span):
            chains = [
                (i, tree.candidates[0])
                for i, tree in trees.items()
                if tree.candidates and paths[i].steps > depth
            ]
            if not chains:
                break
            sides = [(i, candidate) for i, _ in chains for candidate in trees[i].candidates[1:]]
            fed = [*chains, *sides]
            ids = [candidate.path[-1:] for _, candidate in fed]
            rows = feed([i for i, _ in fed], ids, len(sides))
            likely = rows.topk(min(PARTNERS, rows.shape[-1]), -1)
            e_ids, shares = likely.indices.cpu().numpy(), likely.values.cpu().numpy()
            for line, (i, candidate) in enumerate(fed):
                t_ids = self._merges.among(candidate.path, e_ids[line])
                first = self._merges.spell(candidate.path[0])[0]
                trees[i].add(candidate, first, rows[line], e_ids[line], t_ids, shares[line])
            for line, (i, (path, _)) in enumerate(chains):
                paths[i].ahead = depth
                longer = SlrsCandidate((*path, int(e_ids[line, 0])), float(shares[line, 0]))
                going = depth + 1 < self._span and self._merges.goes_on(longer.path)
                trees[i].candidates = [longer] if going else []
        return trees

    def _find_candidates(self, trees: Sequence[SlrsTree], counts: Sequence[int]) -> None:
        """The likeliest tokens that can merge, so many: the chain's first and its side branches."""
        able = self._merges.mergeable
        for part, rows in _stacks([tree.row for tree in trees]):
            best = (rows[:, : len(able)] * able).topk(min(max(counts[part]), len(able)), -1)
            lines = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            for tree, count, (ids, shares) in zip(trees[part], counts[part], lines, strict=True):
                likely = zip(ids[:count], shares[:count], strict=True)
                tree.candidates = [SlrsCandidate((d,), share) for d, share in likely if share]

    def _add_draft_probs(self, trees: Sequence[SlrsTree], table: torch.Tensor) -> None:
        """What the next proposals are drawn from into rows of a `TokenMap.table`.

        At first every drawn token stands for the first target token that it begins. Node by node,
        what merges behind it moves from the longest token found so far to the merged one.
        """
        for part, rows in _stacks([tree.row for tree in trees]):
            self._tokens.add_draft_probs(rows, table[part])
        nodes = [(line, node) for line, tree in enumerate(trees) for node in tree.nodes.values()]
        if not nodes:
            return
        sizes = [len(node.e_ids) for _, node in nodes]
        places = np.repeat([(line, node.longest) for line, node in nodes], sizes, 0).T
        merged = np.concatenate([node.t_ids for _, node in nodes])
        cells = torch.from_numpy(np.stack([*places, merged])).to(table.device)
        mass = torch.from_numpy(np.concatenate([node.shares for _, node in nodes])).to(table.device)
        table.index_put_((cells[0], cells[1]), -mass, accumulate=True)
        table.index_put_((cells[0], cells[2]), mass, accumulate=True)
        table.clamp_min_(0.0)

    def _draw(
        self, trees: dict[int, SlrsTree], paths: Sequence[SlrsPath]
    ) -> dict[int, tuple[int, ...]]:
        """Draws along each tree, the one that leaves it included."""
        rows = [row for tree in trees.values() for row in tree.rows]
        each = [(paths[i], number) for i, tree in trees.items() for number in range(len(tree.rows))]
        numbers = [[path.seed, path.place, path.numbers + number] for path, number in each]
        seeds, places, index = np.array(numbers, np.int64).T
        shares = torch.from_numpy(uniform(keys_of(seeds, DRAFT), places, index))
        shares = shares.to(rows[0].device)
        drawn = torch.cat([choose(stack, shares[part]) for part, stack in _stacks(rows)])
        every = iter(drawn.tolist())
        taken = {}
        for i, tree in trees.items():
            paths[i].numbers += len(tree.rows)
            taken[i] = tree.path_taken([next(every) for _ in tree.rows])
        return taken

    def _advance(
        self, path: SlrsPath, row: int, drawn: tuple[int, ...], tree: SlrsTree
    ) -> Node | None:
        """Add what was drawn to a path; the node behind which it goes on, without what merges."""
        spelled = self._merges.spell(drawn[0])
        if not len(spelled):  # nothing can be drawn from a row of nothing
            path.steps = 0
            return None
        token, used, fed = spelled[0], 1, 0
        if len(drawn) > 1:
            node = tree.nodes[drawn[:-1]]
            token, used = node.longest_with(drawn[-1])
            fed = 0 if node.side_branch else min(used, len(node.path))
        path.fed, path.ahead = len(path.drafted) + fed, 0
        path.drafted += drawn[:used]
        path.steps -= used
        rest = spelled[1:] if used == 1 else self._merges.rest(drawn[:used], token)
        path.proposal += [token, *rest]
        path.row_of += [row, *[-1] * len(rest)]  # what follows the drawn token is certain
        return tree.nodes.get(drawn[:used])

    def _next_heads(
        self, ends: dict[int, Node | None], paths: Sequence[SlrsPath], feed: SlrsFeed
    ) -> dict[int, torch.Tensor]:
        """The next row of each path that goes on: the one known, or behind what is fed now."""
        rows = {i: node.row for i, node in ends.items() if node and not paths[i].unfed}
        going = {i: node for i, node in ends.items() if self._goes_on(paths[i])}
        if late := [i for i in going if i not in rows]:
            rows |= zip(late, feed(late, [paths[i].unfed for i in late]), strict=True)
        for i in late:
            paths[i].fed = len(paths[i].drafted)
        return {i: node.unmerged(rows[i]) if node else rows[i] for i, node in going.items()}

    def _goes_on(self, path: SlrsPath) -> bool:
        if not path.steps or len(path.proposal) >= path.wanted:
            return False
        return path.drafted[-1] not in self._ends


def _stacks(rows: list[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows [V] as tables [m, V] of a few, and which they are."""
    for part in slices(len(rows), len(rows[0]), rows[0].device):
        yield part, torch.stack(rows[part])
