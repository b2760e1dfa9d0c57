# SPDX-License-Identifier: Apache-2.0
"""SLRS-n: push-forward that also proposes target tokens made of several drafter tokens.

Example: the target writes NewYork as one token, the drafter as New|York. Push-forward can only
propose New. SLRS-2 first runs the drafter after New, which has probability 0.3, and York follows
with 0.9. So draft_probs are 0.27 for NewYork and 0.03 for New. Then New is drawn and, from the row
after it, York: NewYork is proposed. If Jersey is drawn instead, New is proposed, and the next token
is drawn again from the same row without York.

In general a tree of drafter tokens is built before the draw. It has a chain of the most likely
tokens, as long as a longer target token begins with their bytes. Beside the chain's first token it
has a few other likely tokens, the side branches. Draws follow the tree until one leaves it. The
longest target token along them is proposed, and its draft_probs are summed over all draws that
propose it.

Tokens drawn after the proposal are discarded. The next token is drawn from the row there, without
the tokens that would have made the proposal longer; to keep the drawn token with the plain row
would be biased. An undrawn chain costs forwards but no memory, because drawn tokens overwrite its
KV. Side branches have KV blocks of their own and are fed again if they are drawn.
Readable form: `slrs_n` of `tests/oracle/reference.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.slrs.merges import Merges
from vllm_hetero_spec.slrs.tree import Node, SlrsCandidate, SlrsTree
from vllm_hetero_spec.verify.noise import DRAFT, choose, keys_of, slices, uniform

PARTNERS = 64  # most likely tokens after a path that may merge; others count as not merging


class SlrsFeed(Protocol):
    """Forward of the drafter."""

    def __call__(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        """Feed ids to paths, after their `written` tokens.

        Args:
            indices: Indices of the paths, [n].
            ids: At least one per path, [n].
            side_branches: Number of last entries that are side branches: they do not change the KV
                of their requests.

        Returns:
            Probabilities of the next drafter token, float32 [n, V_D].
        """


@dataclass
class SlrsPath:
    """Draft of one request.

    Attributes:
        steps: Number of drafter tokens that may still be drawn.
        wanted: Draft length in target tokens at which drafting stops.
        side_branches: Number of tokens that can be fed in one step beside the chain.
        fed: Number of leading tokens of `drafted` with KV.
        ahead: Number of undrawn tokens of the chain with KV, after the `fed` ones.
        row_of: Row of `draft_probs` of each target id; -1 if it was certain.
        numbers: Count of random numbers already used.
    """

    steps: int
    wanted: int
    side_branches: int = 0
    drafted: list[int] = field(default_factory=list)
    fed: int = 0
    ahead: int = 0
    proposal: list[int] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    seed: int = 0
    place: int = 0
    numbers: int = 0

    @property
    def written(self) -> int:
        """Number of tokens of the draft and its chain with KV."""
        return self.fed + self.ahead

    @property
    def unfed(self) -> list[int]:
        """Last tokens of the draft, which have no KV yet."""
        return self.drafted[self.fed :]

    @property
    def draws(self) -> int:
        """Largest number of target tokens that a new path may draw."""
        return max(0, min(self.steps, self.wanted))


class MergeSpan(NamedTuple):
    """Size of the trees of SLRS-n.

    Attributes:
        tokens: Drafter tokens that a proposed target token may take, n.
        candidates: Number of most likely tokens after which the drafter is run, m.
    """

    tokens: int
    candidates: int


@dataclass(frozen=True, kw_only=True)
class SlrsMethod(SampledMethod):
    """A sampled drafting method that may use SLRS-n; `merging` has its longer target tokens."""

    merging: Merges
    merge_span: MergeSpan


class Slrs:
    """Drafts a batch by SLRS-n; `span` is n, and `ends` are drafter ids that end a draft."""

    def __init__(self, tokens: TokenMap, merges: Merges, ends: frozenset[int], span: int) -> None:
        self._tokens, self._merges, self._ends, self._span = tokens, merges, ends, span

    def draft(self, rows: torch.Tensor, paths: Sequence[SlrsPath], feed: SlrsFeed) -> torch.Tensor:
        """Fill the paths with drafts; synchronizes with the device.

        `rows`, float32 [B, V_D], are probabilities of each path's first drafter token. Returns
        draft_probs, float32 [R, V_T], which `row_of` of the paths indexes.
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
        """Set the most likely mergeable tokens: the chain's first token and the side branches."""
        able = self._merges.mergeable
        for part, rows in _stacks([tree.row for tree in trees]):
            best = (rows[:, : len(able)] * able).topk(min(max(counts[part]), len(able)), -1)
            lines = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            for tree, count, (ids, shares) in zip(trees[part], counts[part], lines, strict=True):
                likely = zip(ids[:count], shares[:count], strict=True)
                tree.candidates = [SlrsCandidate((d,), share) for d, share in likely if share]

    def _add_draft_probs(self, trees: Sequence[SlrsTree], table: torch.Tensor) -> None:
        """Add the draft_probs of the next proposals to rows of a `TokenMap.table`.

        At first each drafter token counts for its first target token. Then, node by node, the
        probability of merging tokens moves from the longest token so far to the merged one.
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
        """Draw along each tree, up to and including the token that leaves it."""
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
        """Add drawn tokens to a path; return the node at which it continues, if there is one."""
        spelled = self._merges.spell(drawn[0])
        if not len(spelled):  # the row had no tokens that may be drawn
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
        path.row_of += [row, *[-1] * len(rest)]  # the further tokens are certain
        return tree.nodes.get(drawn[:used])

    def _next_heads(
        self, ends: dict[int, Node | None], paths: Sequence[SlrsPath], feed: SlrsFeed
    ) -> dict[int, torch.Tensor]:
        """Return the next row of each unfinished path: a row of its tree, or of a new forward."""
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
    """Yield slices of rows [V] stacked as tables [m, V], which bounds the memory."""
    for part in slices(len(rows), len(rows[0]), rows[0].device):
        yield part, torch.stack(rows[part])
