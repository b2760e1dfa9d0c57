# SPDX-License-Identifier: Apache-2.0
"""SLRS-n: push-forward that also proposes target tokens made of several drafter tokens.

Before anything is drawn, a chain of the likeliest drafter tokens is fed for as long as what they
spell begins a longer target token, and beside its first token a few other likely ones: a tree.
Draws follow its rows until one leaves it; the longest target token found along them is proposed.
The rows are known beforehand, and so is the law of the proposal: over the places where the tree may
be left, with what probability it is left for which token. `verify.reference.slrs_n` is the readable
form.

What was drawn behind the proposal is thrown away, and the next token drawn afresh from the known
row there, without what would have made the proposal longer. (To keep a drawn token and tell the
verifier the plain row would be biased.) Feeding a chain that is not drawn costs forwards and no
memory: the drawn tokens take its places. Others are fed aside and fed again where they are drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.draft.tree import Heir, Link, Tree
from vllm_hetero_spec.verify.noise import Noise, choose, slices

# Tokens behind a path that are asked whether they merge; all others count as not merging.
PARTNERS = 64


class Merging(Protocol):
    """What drafter tokens in a row are to the target."""

    mergeable: torch.Tensor  # float32 [V_D], 1 where `goes_on` of a single drafter token, else 0

    def goes_on(self, path: Sequence[int]) -> bool:
        """Whether some target token spells the tokens of a path and goes on."""

    def among(self, path: Sequence[int], e_ids: np.ndarray) -> np.ndarray:
        """For each e the target token that it ends or holds the end of, -1 where there is none.

        It begins where the path does and is longer than the path.
        """

    def spell(self, d: int) -> Sequence[int]:
        """Target tokens of a drafter token."""

    def rest(self, path: Sequence[int], merged: int) -> Sequence[int]:
        """Target tokens of what a path spells behind the merged token that begins it."""


class Feed(Protocol):
    """The drafter, as a path sees it."""

    def __call__(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], aside: int = 0
    ) -> torch.Tensor:
        """Feed ids to paths, behind the `written` ones.

        Args:
            indices: Of the paths, [n].
            ids: At least one for each.
            aside: The last so many leave nothing behind, one place of `Path.asides` for each.

        Returns:
            float32 [n, V_D], the rows that follow, as probabilities.
        """


class Reach(NamedTuple):
    """How far SLRS-n looks ahead.

    Attributes:
        span: Drafter tokens that a proposed target token may take, n.
        candidates: Drafter tokens that are looked behind at each step, m.
    """

    span: int = 2
    candidates: int = 1

    @property
    def name(self) -> str:
        """As figures are named: slrs_2, slrs_2_of_8."""
        return f"slrs_{self.span}" + (f"_of_{self.candidates}" if self.candidates > 1 else "")


DEFAULT_REACH = Reach()


@dataclass
class Path:
    """One request's draft.

    Attributes:
        steps: Drafter tokens that it may still draw.
        wanted: Target tokens after which it stops.
        asides: Tokens that can be fed aside in one step, beside the chain.
        drafted: Drafter ids; the KV of the first `fed` is written.
        ahead: Tokens of the chain whose KV is written behind those, not drawn yet.
        proposal: Target ids.
        law_of: Index into the laws of each target id, -1 where it was certain.
    """

    steps: int
    wanted: int
    asides: int = 0
    drafted: list[int] = field(default_factory=list)
    fed: int = 0
    ahead: int = 0
    proposal: list[int] = field(default_factory=list)
    law_of: list[int] = field(default_factory=list)

    def propose(self, first: int, law: int, rest: Sequence[int]) -> None:
        """Add a drawn target token and the certain ones behind it."""
        self.proposal += [first, *rest]
        self.law_of += [law, *[-1] * len(rest)]

    @property
    def written(self) -> int:
        """Tokens of the draft and its chain whose KV is written."""
        return self.fed + self.ahead

    @property
    def unfed(self) -> list[int]:
        """The end of the draft that has no KV yet."""
        return self.drafted[self.fed :]

    @property
    def laws(self) -> int:
        """How many laws a new path may come to have."""
        return max(0, min(self.steps, self.wanted))


class Slrs:
    """Drafts a batch.

    Args:
        tokens: First target token of each drafter token.
        merging: Of the pair.
        ends: Drafter ids after which nothing follows.
        noise: Uniform numbers of the batch.
        span: Drafter tokens that a proposed target token may take, n.
    """

    def __init__(
        self,
        tokens: TokenMap,
        merging: Merging,
        ends: frozenset[int],
        noise: Noise,
        span: int = 2,
    ) -> None:
        self._tokens, self._merging, self._ends = tokens, merging, ends
        self._noise, self._span = noise, span

    def draft(self, rows: torch.Tensor, paths: Sequence[Path], feed: Feed) -> torch.Tensor:
        """Fill the paths.

        Args:
            rows: float32 [B, V_D], law of each path's first drafter token.
            paths: [B].
            feed: The drafter.

        Returns:
            float32 [R, V_T], the laws that `law_of` indexes.
        """
        # One column more than the target has: see TokenMap.add_laws.
        laws = rows.new_zeros((sum(path.laws for path in paths), self._tokens.width + 1))
        used = 0
        heads = {i: rows[i] for i, path in enumerate(paths) if path.laws}
        while heads:
            trees = self._trees(heads, paths, feed)
            self._add_laws(list(trees.values()), laws[used : used + len(trees)])
            drawn = self._draw(trees)
            ends = {
                i: self._advance(paths[i], law, drawn[i], tree)
                for law, (i, tree) in enumerate(trees.items(), used)
            }
            heads = self._next_heads(ends, paths, feed)
            used += len(trees)
        return laws[:used, :-1]

    def _trees(
        self, heads: dict[int, torch.Tensor], paths: Sequence[Path], feed: Feed
    ) -> dict[int, Tree]:
        """The tree of each path, known before anything is drawn."""
        trees = {i: Tree(row) for i, row in heads.items()}
        self._find_heirs(list(trees.values()), [paths[i].asides for i in trees])
        for depth in range(1, self._span):
            going = [i for i, tree in trees.items() if tree.heirs and paths[i].steps > depth]
            if not going:
                break
            fed = [(i, trees[i].heirs[0]) for i in going]
            aside = [(i, heir) for i in going for heir in trees[i].heirs[1:]]
            fed += aside
            rows = feed([i for i, _ in fed], [heir.path[-1:] for _, heir in fed], len(aside))
            likely = rows.topk(min(PARTNERS, rows.shape[-1]), -1)
            e_ids, shares = likely.indices.cpu().numpy(), likely.values.cpu().numpy()
            for line, (i, heir) in enumerate(fed):
                self._add(trees[i], heir, rows[line], e_ids[line], shares[line])
            for line, i in enumerate(going):
                paths[i].ahead = depth
                trees[i].heirs = self._grown(trees[i].heirs[0], e_ids[line], shares[line])
        return trees

    def _find_heirs(self, trees: Sequence[Tree], asides: Sequence[int]) -> None:
        """The likeliest tokens that can merge: the chain's first, and so many beside it."""
        able = self._merging.mergeable
        for part, rows in _stacks([tree.row for tree in trees]):
            count = min(1 + max(asides[part]), len(able))
            best = (rows[:, : len(able)] * able).topk(count, -1)
            lines = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            for tree, most, (ids, shares) in zip(trees[part], asides[part], lines, strict=True):
                heirs = [Heir((d,), share) for d, share in zip(ids, shares, strict=True) if share]
                tree.heirs = heirs[: 1 + most]

    def _add(
        self, tree: Tree, heir: Heir, row: torch.Tensor, e_ids: np.ndarray, shares: np.ndarray
    ) -> None:
        """Add an heir to its tree; `e_ids` are the likeliest tokens of its row, with `shares`."""
        first = self._merging.spell(heir.path[0])[0]
        tree.add(heir, first, row, e_ids, self._merging.among(heir.path, e_ids), shares)

    def _grown(self, heir: Heir, e_ids: np.ndarray, shares: np.ndarray) -> list[Heir]:
        """What may prolong the chain behind its newest token."""
        longer = Heir((*heir.path, int(e_ids[0])), float(shares[0]))
        if len(longer.path) < self._span and self._merging.goes_on(longer.path):
            return [longer]
        return []

    def _add_laws(self, trees: Sequence[Tree], psi: torch.Tensor) -> None:
        """The laws of the next proposals into zeros [n, V_T + 1].

        At first every drawn token stands for the first target token that it begins. Link by link,
        what merges behind it moves from the longest token found so far to the merged one.
        """
        for part, rows in _stacks([tree.row for tree in trees]):
            self._tokens.add_laws(rows, psi[part])
        links = [(line, link) for line, tree in enumerate(trees) for link in tree.links.values()]
        if not links:
            return
        sizes = [len(link.e_ids) for _, link in links]
        places = np.repeat([(line, link.longest) for line, link in links], sizes, 0).T
        merged = np.concatenate([link.t_ids for _, link in links])
        table = torch.from_numpy(np.stack([*places, merged])).to(psi.device)
        mass = torch.from_numpy(np.concatenate([link.shares for _, link in links])).to(psi.device)
        psi.index_put_((table[0], table[1]), -mass, accumulate=True)
        psi.index_put_((table[0], table[2]), mass, accumulate=True)
        psi.clamp_min_(0.0)

    def _draw(self, trees: dict[int, Tree]) -> dict[int, tuple[int, ...]]:
        """Draws along each tree, the one that leaves it included."""
        rows = [row for tree in trees.values() for row in tree.rows]
        counts = [0] * (max(trees) + 1)
        for i, tree in trees.items():
            counts[i] = len(tree.links) + 1
        uniform = self._noise.uniform(counts)
        drawn = torch.cat([choose(stack, uniform[part]) for part, stack in _stacks(rows)])
        every = iter(drawn.tolist())
        return {
            i: tree.followed([next(every) for _ in range(counts[i])]) for i, tree in trees.items()
        }

    def _advance(self, path: Path, law: int, drawn: tuple[int, ...], tree: Tree) -> Link | None:
        """Add what was drawn to a path; the link behind which it goes on, without what merges."""
        spelled = self._merging.spell(drawn[0])
        if not len(spelled):  # nothing can be drawn from a row of nothing
            path.steps = 0
            return None
        token, used, fed = spelled[0], 1, 0
        if len(drawn) > 1:
            link = tree.links[drawn[:-1]]
            token, used = link.found(drawn[-1])
            fed = 0 if link.aside else min(used, len(link.path))
        path.fed, path.ahead = len(path.drafted) + fed, 0
        path.drafted += drawn[:used]
        path.steps -= used
        rest = spelled[1:] if used == 1 else self._merging.rest(drawn[:used], token)
        path.propose(token, law, rest)
        return tree.links.get(drawn[:used])

    def _next_heads(
        self, ends: dict[int, Link | None], paths: Sequence[Path], feed: Feed
    ) -> dict[int, torch.Tensor]:
        """The next row of each path that goes on: the one known, or behind what is fed now."""
        rows = {i: link.row for i, link in ends.items() if link and not paths[i].unfed}
        going = {i: link for i, link in ends.items() if self._goes_on(paths[i])}
        if late := [i for i in going if i not in rows]:
            rows |= zip(late, feed(late, [paths[i].unfed for i in late]), strict=True)
        for i in late:
            paths[i].fed = len(paths[i].drafted)
        return {i: link.unmerged(rows[i]) if link else rows[i] for i, link in going.items()}

    def _goes_on(self, path: Path) -> bool:
        if not path.steps or len(path.proposal) >= path.wanted:
            return False
        return path.drafted[-1] not in self._ends


def _stacks(rows: list[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows [V] as tables [m, V] of a few, and which they are."""
    for part in slices(len(rows), len(rows[0]), rows[0].device):
        yield part, torch.stack(rows[part])
