# SPDX-License-Identifier: Apache-2.0
"""SLRS-2 over a batch tells the truth about its rows, and so keeps the target's law."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path as Folder

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Folder(__file__).parent.parent / "verify"))
from toy_worlds import World, worlds

from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.draft.slrs import Path, Slrs
from vllm_hetero_spec.verify import reference as ref
from vllm_hetero_spec.verify.chance import law, total_variation
from vllm_hetero_spec.verify.drafts import DraftBatch
from vllm_hetero_spec.verify.noise import Noise
from vllm_hetero_spec.verify.rules import token_rule

COPIES = 20_000
CPU = torch.device("cpu")


class ToyMerging:
    """Merges of a toy pair."""

    def __init__(self, world: World) -> None:
        self._pair = world.pair
        every = range(len(world.pair.drafter))
        able = [any(world.pair.mu(d, e) is not None for e in every) for d in every]
        self.mergeable = torch.tensor(able, dtype=torch.float32)

    def among(self, d: int, e_ids: np.ndarray) -> np.ndarray:
        merged = [self._pair.mu(d, int(e)) for e in e_ids]
        return np.array([-1 if t is None else t for t in merged])

    def spell(self, d: int) -> Sequence[int]:
        return self._pair.kappa(d)

    def rest(self, d: int, e: int, merged: int) -> Sequence[int]:
        text = self._pair.spell((d, e))[len(self._pair.target[merged]) :]
        return self._pair.tau(text)


def drafted(world: World, steps: int) -> tuple[list[Path], torch.Tensor]:
    """The same request drafted many times over."""
    q = world.q_after(())
    paths = [Path(steps, wanted=99) for _ in range(COPIES)]

    def feed(indices: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        rows = []
        for index, token in zip(indices, ids, strict=True):
            path = paths[index]
            rows.append(
                q((*path.drafted[: len(path.drafted)], token))
                if path.fed == len(path.drafted)
                else q((*path.drafted[:-1], token))
            )
        return torch.tensor(np.array(rows), dtype=torch.float32)

    first = torch.tensor(q(()), dtype=torch.float32).repeat(COPIES, 1)
    tokens = TokenMap(
        torch.tensor([world.pair.kappa(d)[0] for d in range(len(world.pair.drafter))]),
        len(world.pair.target),
    )
    slrs = Slrs(tokens, ToyMerging(world), frozenset(), Noise(CPU))
    return paths, slrs.draft(first, paths, feed)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("drafter", [(b"a", b"b"), (b"a", b"b", b"aa", b"ab", b"bb")])
def test_proposals_and_laws_are_those_of_the_reference(
    steps: int, drafter: tuple[bytes, ...]
) -> None:
    """The joint law of the proposed tokens, and every row beside them."""
    world = worlds(1, drafter=drafter)[0]
    torch.manual_seed(steps)
    paths, laws = drafted(world, steps)

    def one(chance: ref.Chance) -> tuple[int | None, ...]:
        return tuple(p.token for p in ref.slrs2(world.pair, world.q_after(()), steps, chance))

    expected = law(one)
    found = Counter(tuple(path.proposal) for path in paths)
    share = {key: count / COPIES for key, count in found.items()}
    bound = 1.5 * 0.5 * math.sqrt(2 * max(1, len(expected) - 1) / (math.pi * COPIES))
    assert total_variation(share, expected) < bound

    rows_of = law(
        lambda chance: tuple(
            (p.token, tuple(np.round(p.row, 5)))
            for p in ref.slrs2(world.pair, world.q_after(()), steps, chance)
        )
    )
    for path in paths[:300]:
        rows = [
            ref.one_hot(t, laws.shape[1]) if row < 0 else laws[row].numpy()
            for t, row in zip(path.proposal, path.law_of, strict=True)
        ]
        told = tuple(
            (t, tuple(np.round(row.astype(float), 5)))
            for t, row in zip(path.proposal, rows, strict=True)
        )
        assert any(
            len(known) == len(told)
            and all(
                a[0] == b[0] and np.allclose(a[1], b[1], atol=3e-5)
                for a, b in zip(known, told, strict=True)
            )
            for known in rows_of
        )


def test_verified_drafts_follow_the_targets_law() -> None:
    world = worlds(3)[2]
    torch.manual_seed(7)
    paths, laws = drafted(world, 3)
    lengths = [len(path.proposal) for path in paths]
    tokens = torch.tensor([t for path in paths for t in path.proposal])
    row_of = torch.tensor([row for path in paths for row in path.law_of])
    p = torch.tensor(
        np.array(
            [world.p(tuple(path.proposal[:j])) for path in paths for j in range(len(path.proposal))]
        ),
        dtype=torch.float32,
    )
    bonus = torch.zeros(COPIES, dtype=torch.int64)  # not looked at: only first tokens are compared
    verdict = token_rule(DraftBatch(tokens, lengths, laws, row_of), p, bonus, Noise(CPU))
    share = Counter(verdict.tokens[:, 0].tolist())
    expected = {t: float(x) for t, x in enumerate(world.p(()))}
    found = {t: share[t] / COPIES for t in expected}
    assert total_variation(found, expected) < 0.012


def test_the_drafters_kv_is_counted() -> None:
    """`fed` never claims a token that was replaced or never fed."""
    world = worlds(1)[0]
    torch.manual_seed(2)
    paths, _ = drafted(world, 3)
    assert all(0 <= path.fed <= len(path.drafted) for path in paths)
    assert any(path.fed < len(path.drafted) for path in paths)
