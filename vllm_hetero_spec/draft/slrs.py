# SPDX-License-Identifier: Apache-2.0
"""SLRS-2: push-forward that also proposes target tokens made of two drafter tokens.

Before a drafter token is drawn, the likeliest one that can merge is fed, and the row behind it
tells how much of its mass belongs to merged target tokens: the law of the proposal moves it there.
Drawn that token, the next one is drawn from the very row. Where the two do not merge, the second is
kept, and its law is that row without what would have merged (with the plain row the result would be
biased). `verify.reference.slrs2` is the readable form; its m is 1 here.

Feeding a token that is not drawn costs a forward and no memory: the drawn one takes its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.verify.noise import Noise, choose

# Second tokens that are asked whether they merge; all others count as not merging.
PARTNERS = 64


class Merging(Protocol):
    """What two drafter tokens in a row are to the target."""

    mergeable: torch.Tensor  # float32 [V_D], 1 where a drafter token may have a partner, else 0

    def among(self, d: int, e_ids: np.ndarray) -> np.ndarray:
        """For each e the target token that d and e make together, -1 where they make none."""

    def spell(self, d: int) -> Sequence[int]:
        """Target tokens of a drafter token."""

    def rest(self, d: int, e: int, merged: int) -> Sequence[int]:
        """Target tokens of what d and e spell behind their merged token."""


# Feeds one id to each path named, behind its first `fed` ids, and returns the rows [n, V_D] that
# follow, as probabilities.
Feed = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


@dataclass
class Path:
    """One request's draft.

    Attributes:
        steps: Drafter tokens that it may still draw.
        wanted: Target tokens after which it stops.
        drafted: Drafter ids; the KV of the first `fed` is written.
        proposal: Target ids.
        law_of: Index into the laws of each target id, -1 where it was certain.
    """

    steps: int
    wanted: int
    drafted: list[int] = field(default_factory=list)
    fed: int = 0
    proposal: list[int] = field(default_factory=list)
    law_of: list[int] = field(default_factory=list)

    def propose(self, first: int, law: int, rest: Sequence[int]) -> None:
        """Add a drawn target token and the certain ones behind it."""
        self.proposal += [first, *rest]
        self.law_of += [law, *[-1] * len(rest)]


class _Head(NamedTuple):
    """Where a path stands: the law of its next drafter token, and that token if it is drawn."""

    row: torch.Tensor
    kept: int | None


class _Look(NamedTuple):
    """The row behind a drafter token, and which of its tokens would merge with it."""

    top: int
    row: torch.Tensor
    e_ids: np.ndarray  # [n], with
    t_ids: np.ndarray  # [n], what they make together with top

    def merged(self, e: int) -> int | None:
        """The target token of top and e."""
        found = np.flatnonzero(self.e_ids == e)
        return int(self.t_ids[found[0]]) if len(found) else None


class Slrs:
    """Drafts a batch.

    Args:
        tokens: First target token of each drafter token.
        merging: Of the pair.
        ends: Drafter ids after which nothing follows.
        noise: Uniform numbers of the batch.
    """

    def __init__(
        self, tokens: TokenMap, merging: Merging, ends: frozenset[int], noise: Noise
    ) -> None:
        self._tokens, self._merging, self._ends, self._noise = tokens, merging, ends, noise

    def draft(self, rows: torch.Tensor, paths: Sequence[Path], feed: Feed) -> torch.Tensor:
        """Fill the paths.

        Args:
            rows: float32 [B, V_D], law of each path's first drafter token.
            paths: [B].
            feed: The drafter.

        Returns:
            float32 [R, V_T], the laws that `law_of` indexes.
        """
        laws: list[torch.Tensor] = []
        heads = {i: _Head(rows[i], None) for i, path in enumerate(paths) if path.steps > 0}
        while heads:
            looks = self._look(heads, paths, feed)
            psi = self._laws(heads, looks)
            firsts = self._draw(heads, {i: h.row for i, h in heads.items() if h.kept is None})
            seconds = self._draw(
                heads, {i: look.row for i, look in looks.items() if firsts[i] == look.top}
            )
            kept: dict[int, _Head] = {}
            for line, i in enumerate(heads):
                drawn = firsts[i], seconds.get(i)
                head = self._advance(paths[i], len(laws) + line, drawn, looks.get(i))
                if head is not None:
                    kept[i] = head
            laws += psi.unbind()
            heads = kept | self._refed([i for i in heads if i not in kept], paths, feed)
            heads = {i: head for i, head in sorted(heads.items()) if self._goes_on(paths[i])}
        return torch.stack(laws) if laws else rows.new_zeros((0, self._tokens.width))

    def _look(self, heads: dict[int, _Head], paths: Sequence[Path], feed: Feed) -> dict[int, _Look]:
        """What follows each path's likeliest mergeable token: known before anything is drawn."""
        able = [i for i in heads if paths[i].steps > 1]
        if not able:
            return {}
        scores = torch.stack([heads[i].row for i in able])[:, : len(self._merging.mergeable)]
        best = (scores * self._merging.mergeable).max(-1)
        chosen = [
            (i, top)
            for i, score, top in zip(able, best.values.tolist(), best.indices.tolist(), strict=True)
            if score > 0
        ]
        if not chosen:
            return {}
        followers = feed([i for i, _ in chosen], [top for _, top in chosen])
        likely = followers.topk(min(PARTNERS, followers.shape[-1]), -1).indices.cpu().numpy()
        looks = {}
        for (i, top), row, e_ids in zip(chosen, followers, likely, strict=True):
            t_ids = self._merging.among(top, e_ids)
            looks[i] = _Look(top, row, e_ids[t_ids >= 0], t_ids[t_ids >= 0])
        return looks

    def _laws(self, heads: dict[int, _Head], looks: dict[int, _Look]) -> torch.Tensor:
        """The law of each path's next proposal, float32 [n, V_T]."""
        psi = self._tokens.laws(torch.stack([head.row for head in heads.values()]))
        for line, (i, head) in enumerate(heads.items()):
            look = looks.get(i)
            if look is not None and len(look.e_ids):
                e_ids = torch.from_numpy(look.e_ids.astype(np.int64)).to(psi.device)
                t_ids = torch.from_numpy(look.t_ids.astype(np.int64)).to(psi.device)
                moved = head.row[look.top] * look.row[e_ids]
                psi[line].index_add_(0, t_ids, moved)
                psi[line, self._tokens.first[look.top]] -= moved.sum()
        return psi.clamp_min_(0.0)

    def _draw(self, heads: dict[int, _Head], rows: dict[int, torch.Tensor]) -> dict[int, int]:
        """One draw from each row; tokens kept from before where `heads` has them and `rows` not."""
        kept = {
            i: head.kept for i, head in heads.items() if i not in rows and head.kept is not None
        }
        if not rows:
            return kept
        lengths = [int(i in rows) for i in range(max(rows) + 1)]
        chosen = choose(torch.stack(list(rows.values())), self._noise.uniform(lengths))
        return kept | dict(zip(rows, chosen.tolist(), strict=True))

    def _advance(
        self, path: Path, law: int, drawn: tuple[int, int | None], look: _Look | None
    ) -> _Head | None:
        """Add what was drawn to a path; its new head where the second token is kept."""
        first, second = drawn
        path.drafted.append(first)
        path.steps -= 1
        merged = None
        if look is not None and first == look.top:
            path.fed = len(path.drafted)
            assert second is not None
            merged = look.merged(second)
            if merged is not None:
                path.propose(merged, law, self._merging.rest(first, second, merged))
                path.drafted.append(second)
                path.steps -= 1
                return None
        spelled = self._merging.spell(first)
        path.propose(spelled[0], law, spelled[1:])
        if look is None or first != look.top:
            return None
        row = look.row.clone()
        row[torch.from_numpy(look.e_ids.astype(np.int64)).to(row.device)] = 0.0
        return _Head(row / row.sum(), second)

    def _refed(self, indices: Sequence[int], paths: Sequence[Path], feed: Feed) -> dict[int, _Head]:
        """Heads of paths that go on behind a token that has not been fed yet."""
        going = [i for i in indices if self._goes_on(paths[i])]
        if not going:
            return {}
        rows = feed(going, [paths[i].drafted[-1] for i in going])
        for i in going:
            paths[i].fed = len(paths[i].drafted)
        return {i: _Head(row, None) for i, row in zip(going, rows, strict=True)}

    def _goes_on(self, path: Path) -> bool:
        ended = path.drafted[-1] in self._ends
        return path.steps > 0 and len(path.proposal) < path.wanted and not ended
