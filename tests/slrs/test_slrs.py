# SPDX-License-Identifier: Apache-2.0
"""SLRS-n over a batch returns the true rows of its proposals, so the output is the target's."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import reference as ref
import torch
from chance import law
from goodness import MISSED, follows, missed
from toy_worlds import LETTERS, WORDS, World, worlds

from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.slrs.slrs import Slrs, SlrsPath
from vllm_hetero_spec.verify.drafts import DraftBatch
from vllm_hetero_spec.verify.rules import token_rule

COPIES = 3_000
PIECES, BY_LETTER = worlds(3), worlds(3, target=WORDS, drafter=LETTERS)
# Worlds (drafters of pieces or of single letters), merge span in drafter tokens, and number of
# first tokens that may be extended.
KINDS = {
    "pieces-2": (PIECES, 2, 1),
    "pieces-3": (PIECES, 3, 1),
    "letters-2": (BY_LETTER, 2, 1),
    "letters-4": (BY_LETTER, 4, 1),
    "pieces-2-of-3": (PIECES, 2, 3),
    "letters-3-of-2": (BY_LETTER, 3, 2),
    "letters-4-of-all": (BY_LETTER, 4, 9),
}


class ToyMerging:
    """The merges of a toy pair."""

    def __init__(self, world: World) -> None:
        self._pair = world.pair
        able = [self.goes_on((d,)) for d in range(len(world.pair.drafter))]
        self.mergeable = torch.tensor(able, dtype=torch.float32)

    def goes_on(self, path: Sequence[int]) -> bool:
        return ref.begins_longer(self._pair, path)

    def among(self, path: Sequence[int], e_ids: np.ndarray) -> np.ndarray:
        if self._pair.twin(path[0]) is None:
            return np.full(len(e_ids), -1)
        text, merged = self._pair.spell(path), []
        for e in e_ids:
            first = self._pair.tau(text + self._pair.drafter[e])[0]
            merged.append(first if len(self._pair.target[first]) > len(text) else -1)
        return np.array(merged)

    def spell(self, d: int) -> Sequence[int]:
        return self._pair.kappa(d)

    def rest(self, path: Sequence[int], merged: int) -> Sequence[int]:
        return self._pair.tau(self._pair.spell(path)[len(self._pair.target[merged]) :])


class ToyDrafter:
    """A drafter whose KV is a list of the ids that were fed, for each path."""

    def __init__(self, world: World, paths: Sequence[SlrsPath]) -> None:
        self._row = cache(world.q_after(()))
        self._paths = paths
        self.kv: list[list[int]] = [[] for _ in paths]

    def feed(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        main = len(indices) - side_branches
        for index, tokens in zip(indices[:main], ids[:main], strict=True):
            path, kv = self._paths[index], self.kv[index]
            assert kv[: path.fed] == path.drafted[: path.fed]
            del kv[path.written :]
            kv += tokens
        for index, count in Counter(indices[main:]).items():
            assert count <= self._paths[index].side_branches
        texts = [tuple(self.kv[index]) for index in indices[:main]]
        for index, tokens in zip(indices[main:], ids[main:], strict=True):
            texts.append((*self.kv[index][: self._paths[index].written], *tokens))
        return torch.tensor(np.array([self._row(text) for text in texts]), dtype=torch.float32)

    def rows(self, indices: Sequence[int]) -> torch.Tensor:
        return self.feed(indices, [()] * len(indices))


def drafted(
    world: World, steps: int, span: int, candidates: int, wanted: int = 99
) -> tuple[list[SlrsPath], torch.Tensor, ToyDrafter]:
    """Draft the same request COPIES times."""
    paths = [SlrsPath(steps, wanted, candidates - 1, seed=i) for i in range(COPIES)]
    drafter = ToyDrafter(world, paths)
    tokens = TokenMap(
        torch.tensor([world.pair.kappa(d)[0] for d in range(len(world.pair.drafter))]),
        len(world.pair.target),
    )
    slrs = Slrs(tokens, ToyMerging(world), frozenset(), span)
    return paths, slrs.draft(drafter.rows(range(COPIES)), paths, drafter.feed), drafter


def streams(
    world: World, steps: int, span: int, candidates: int
) -> dict[tuple[tuple[int | None, tuple[float, ...]], ...], float]:
    """Return the distribution of all proposals of the reference form, rows included."""
    return law(
        lambda chance: tuple(
            (p.token, tuple(p.row))
            for p in ref.slrs_n(world.pair, world.q_after(()), steps, span, chance, candidates)
        )
    )


def tokens_of(streams: dict) -> dict[tuple[int | None, ...], float]:
    """Return the distribution of the proposed tokens, without rows."""
    tokens: dict[tuple[int | None, ...], float] = defaultdict(float)
    for stream, probability in streams.items():
        tokens[tuple(token for token, _ in stream)] += probability
    return dict(tokens)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_and_laws_are_those_of_the_reference(kind: str, steps: int) -> None:
    (world, *_), span, candidates = KINDS[kind]
    paths, draft_probs, _ = drafted(world, steps, span, candidates)

    expected = streams(world, steps, span, candidates)
    tokens = tokens_of(expected)
    assert follows(Counter(tuple(path.proposal) for path in paths), tokens)
    # If the steps permit merges, the test must detect drafts without them.
    plain = tokens_of(streams(world, steps, 1, 1))
    assert plain == pytest.approx(tokens) or missed(tokens, plain, COPIES) < MISSED

    for path in paths[:300]:
        rows = [
            ref.one_hot(t, draft_probs.shape[1]) if row < 0 else draft_probs[row].numpy()
            for t, row in zip(path.proposal, path.row_of, strict=True)
        ]
        assert any(
            path.proposal == [token for token, _ in stream]
            and np.allclose([row for _, row in stream], rows, atol=3e-5)
            for stream in expected
        )


@pytest.mark.parametrize("kind", KINDS)
def test_verified_drafts_follow_the_targets_law(kind: str) -> None:
    (*_, world), span, candidates = KINDS[kind]
    paths, draft_probs, _ = drafted(world, 4, span, candidates)
    lengths = [len(path.proposal) for path in paths]
    tokens = torch.tensor([t for path in paths for t in path.proposal])
    row_of = [row for path in paths for row in path.row_of]
    p = torch.tensor(
        np.array(
            [world.p(tuple(path.proposal[:j])) for path in paths for j in range(len(path.proposal))]
        ),
        dtype=torch.float32,
    )
    bonus = torch.zeros(COPIES, dtype=torch.int64)  # unused: only first tokens are compared
    drafts = DraftBatch.of(tokens, lengths, range(COPIES), [0] * COPIES, [draft_probs], row_of)
    verdict = token_rule(drafts, p, bonus)
    expected = dict(enumerate(world.p(())))
    assert follows(Counter(verdict.tokens[:, 0].tolist()), expected)
    # The test must detect drafts that are always accepted.
    assert missed(expected, dict(enumerate(draft_probs[0].tolist())), COPIES) < MISSED


@pytest.mark.parametrize("kind", KINDS)
def test_the_drafters_kv_is_counted(kind: str) -> None:
    """`fed` includes no token that was replaced or never fed, and no path exceeds its steps."""
    (world, *_), span, candidates = KINDS[kind]
    paths, draft_probs, drafter = drafted(world, 4, span, candidates, wanted=3)
    for path, kv in zip(paths, drafter.kv, strict=True):
        assert path.drafted[: path.fed] == kv[: path.fed]
        assert len(kv) < 4
        assert len(path.drafted) + path.steps == 4
        assert not path.ahead
        ended = sum(len(world.pair.target[t]) for t in path.proposal)
        assert ended == len(world.pair.spell(path.drafted))
        assert path.row_of.count(-1) < len(path.row_of) <= 2 + 5
    assert any(path.fed < len(path.drafted) for path in paths)
    assert len(draft_probs) == sum(row >= 0 for path in paths for row in path.row_of)


def test_rows_of_zeros() -> None:
    """If the drafter returns rows of 0, draft_probs are 0 and not NaN."""
    world = worlds(1)[0]
    paths = [SlrsPath(3, 3) for _ in range(4)]
    tokens = TokenMap(torch.tensor([world.pair.kappa(d)[0] for d in range(5)]), 5)
    slrs = Slrs(tokens, ToyMerging(world), frozenset(), 3)

    def broken(
        indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        return torch.zeros(len(indices), 5)

    first = torch.tensor(world.q_after(())(()), dtype=torch.float32).repeat(4, 1)
    draft_probs = slrs.draft(first, paths, broken)
    assert draft_probs.isfinite().all()
    assert {float(row.sum().round()) for row in draft_probs} == {0.0, 1.0}
