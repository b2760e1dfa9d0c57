# SPDX-License-Identifier: Apache-2.0
"""SLRS-n: push-forward that also proposes target tokens made of several drafter tokens.

Before anything is drawn, a chain of the likeliest drafter tokens is fed for as long as what they
spell begins a longer target token. Draws follow its rows until one leaves it; the longest target
token found along them is proposed. The rows are known beforehand, and so is the law of the
proposal: over the places where the chain may be left, with what probability it is left for which
token. `verify.reference.slrs_n` is the readable form.

What was drawn behind the proposal is thrown away, and the next token drawn afresh from the known
row there, without what would have made the proposal longer. (To keep a drawn token and tell the
verifier the plain row would be biased.) Feeding tokens that are not drawn costs forwards and no
memory: the drawn ones take their places.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from vllm_hetero_spec.draft.chain import Chain
from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.verify.noise import Noise, choose, slices

# Tokens behind a chain that are asked whether they merge; all others count as not merging.
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


# Feeds one id to each path named, behind the `written` ones, and returns the rows [n, V_D] that
# follow, as probabilities.
Feed = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


@dataclass
class Path:
    """One request's draft.

    Attributes:
        steps: Drafter tokens that it may still draw.
        wanted: Target tokens after which it stops.
        drafted: Drafter ids; the KV of the first `fed` is written.
        ahead: Tokens of the chain whose KV is written behind those, not drawn yet.
        proposal: Target ids.
        law_of: Index into the laws of each target id, -1 where it was certain.
    """

    steps: int
    wanted: int
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
            chains = self._chains(heads, paths, feed)
            self._add_laws(list(chains.values()), laws[used : used + len(chains)])
            drawn = self._draw(chains)
            heads = {}
            for law, (i, chain) in enumerate(chains.items(), used):
                row = self._advance(paths[i], law, drawn[i], chain)
                if row is not None and self._goes_on(paths[i]):
                    heads[i] = row
            used += len(chains)
            heads |= self._refed([i for i in chains if i not in heads], paths, feed)
            heads = dict(sorted(heads.items()))
        return laws[:used, :-1]

    def _chains(
        self, heads: dict[int, torch.Tensor], paths: Sequence[Path], feed: Feed
    ) -> dict[int, Chain]:
        """The chain of each path, known before anything is drawn."""
        chains = {i: Chain(row) for i, row in heads.items()}
        every = list(chains.values())
        able = self._merging.mergeable
        for part, rows in _stacks([chain.row for chain in every]):
            best = (rows[:, : len(able)] * able).max(-1)
            tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            for chain, top in zip(every[part], tops, strict=True):
                chain.heir = top if top[1] > 0 else None
        for depth in range(1, self._span):
            going = {i: c for i, c in chains.items() if c.heir and paths[i].steps > depth}
            if not going:
                break
            rows = feed(list(going), [chain.heir[0] for chain in going.values() if chain.heir])
            likely = rows.topk(min(PARTNERS, rows.shape[-1]), -1)
            e_ids, shares = likely.indices.cpu().numpy(), likely.values.cpu().numpy()
            for line, (i, chain) in enumerate(going.items()):
                paths[i].ahead = depth
                self._prolong(chain, rows[line], e_ids[line], shares[line])
        return chains

    def _prolong(
        self, chain: Chain, row: torch.Tensor, e_ids: np.ndarray, shares: np.ndarray
    ) -> None:
        """Add the heir to a chain; `e_ids` are the likeliest tokens of its row, with `shares`."""
        assert chain.heir is not None
        path = [*chain.tokens, chain.heir[0]]
        first = self._merging.spell(path[0])[0]
        chain.prolong(first, row, e_ids, self._merging.among(path, e_ids), shares)
        if len(path) + 1 < self._span and self._merging.goes_on([*path, e_ids[0]]):
            chain.heir = int(e_ids[0]), float(shares[0])

    def _add_laws(self, chains: Sequence[Chain], psi: torch.Tensor) -> None:
        """The laws of the next proposals into zeros [n, V_T + 1].

        At first every drawn token stands for the first target token that it begins. Link by link,
        what merges behind it moves from the longest token found so far to the merged one.
        """
        for part, rows in _stacks([chain.row for chain in chains]):
            self._tokens.add_laws(rows, psi[part])
        links = [(line, link) for line, chain in enumerate(chains) for link in chain.links]
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

    def _draw(self, chains: dict[int, Chain]) -> dict[int, list[int]]:
        """Draws along each chain, the one that leaves it included."""
        rows = [row for chain in chains.values() for row in chain.rows]
        counts = [0] * (max(chains) + 1)
        for i, chain in chains.items():
            counts[i] = len(chain.links) + 1
        uniform = self._noise.uniform(counts)
        drawn = torch.cat([choose(stack, uniform[part]) for part, stack in _stacks(rows)])
        every = iter(drawn.tolist())
        return {
            i: chain.followed([next(every) for _ in range(counts[i])])
            for i, chain in chains.items()
        }

    def _advance(self, path: Path, law: int, drawn: list[int], chain: Chain) -> torch.Tensor | None:
        """Add what was drawn to a path; its next row where that is known."""
        spelled = self._merging.spell(drawn[0])
        if not len(spelled):  # nothing can be drawn from a row of nothing
            path.steps = 0
            return None
        followed = len(drawn) - 1
        token, used = spelled[0], 1
        if followed:
            merged = chain.links[followed - 1].merged(drawn[-1])
            token, used = chain.found(merged, followed)
        path.fed, path.ahead = len(path.drafted) + min(used, followed), 0
        path.drafted += drawn[:used]
        path.steps -= used
        rest = spelled[1:] if used == 1 else self._merging.rest(drawn[:used], token)
        path.propose(token, law, rest)
        return None if used == len(drawn) else chain.links[used - 1].unmerged()

    def _refed(
        self, indices: Sequence[int], paths: Sequence[Path], feed: Feed
    ) -> dict[int, torch.Tensor]:
        """Rows of paths that go on behind a token that has not been fed yet."""
        going = [i for i in indices if self._goes_on(paths[i])]
        if not going:
            return {}
        rows = feed(going, [paths[i].drafted[-1] for i in going])
        for i in going:
            paths[i].fed = len(paths[i].drafted)
        return dict(zip(going, rows, strict=True))

    def _goes_on(self, path: Path) -> bool:
        if not path.steps or len(path.proposal) >= path.wanted:
            return False
        return path.drafted[-1] not in self._ends


def _stacks(rows: list[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows [V] as tables [m, V] of a few, and which they are."""
    for part in slices(len(rows), len(rows[0]), rows[0].device):
        yield part, torch.stack(rows[part])
