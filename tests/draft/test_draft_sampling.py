# SPDX-License-Identifier: Apache-2.0
"""Draft tokens are sampled from the rows that are kept, also if a batch is processed in parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_hetero_spec.draft.sampling import BatchSampler, DraftSampling, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.staging import on_host
from vllm_hetero_spec.verify import noise
from vllm_hetero_spec.verify.race import race

FIRST = torch.tensor([2, 0, 2, 1, 3])
REQUESTS = 9


def batch(races: bool, steps: int = 3, likeliest: int | None = None) -> BatchSampler:
    draws = [
        DraftSampling(0.5 + index / 4, index % 4, 0.95, seed=100 + index, place=index, races=races)
        for index in range(REQUESTS)
    ]
    lengths = torch.tensor([1, 2, 1, 3, 1])
    method = SampledMethod(TokenMap(FIRST, 4), lengths, lambda d: [7] * int(lengths[d]))
    method = replace(method, likeliest=likeliest)
    return BatchSampler(range(REQUESTS), draws, [steps] * REQUESTS, method, on_host)


def logits(step: int) -> torch.Tensor:
    return torch.randn(REQUESTS, 5, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("cells", [5, 11, 23])
def test_parts_change_nothing(races: bool, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch(races)
    expected = [whole.draw(logits(step)) for step in range(3)]
    monkeypatch.setattr(noise, "_CELLS_ON_CPU", cells)
    parts = batch(races)
    assert [parts.draw(logits(step)).tolist() for step in range(3)] == [
        chosen.tolist() for chosen in expected
    ]
    assert torch.equal(parts.draft_probs, whole.draft_probs)
    rows = batch(races).rows(logits(0), [4, 0, 7, 8, 1, 2, 3, 5, 6])
    assert rows.sum(-1).tolist() == pytest.approx([1.0] * REQUESTS)


def test_draft_probs_are_those_of_the_rows() -> None:
    draws = batch(races=False, steps=1)
    draws.draw(logits(0))
    rows = batch(races=False).rows(logits(0), range(REQUESTS))
    expected = np.zeros((REQUESTS, 4), np.float32)
    for d, t in enumerate(FIRST.tolist()):
        expected[:, t] += rows[:, d].numpy()
    np.testing.assert_allclose(draws.draft_probs.numpy(), expected, atol=1e-6)


def test_raced_drafts_begin_with_the_winner_of_their_law() -> None:
    draws = batch(races=True)
    chosen = torch.stack([draws.draw(logits(step)) for step in range(3)])
    places = torch.arange(REQUESTS)
    for step in range(3):
        draft_probs = draws.draft_probs[step * REQUESTS : (step + 1) * REQUESTS]
        winners = race(draft_probs, 100 + torch.arange(REQUESTS), places)
        assert FIRST[chosen[step]].tolist() == winners.tolist()
        places = places + torch.tensor([1, 2, 1, 3, 1])[chosen[step]]


@pytest.mark.parametrize("races", [False, True])
def test_sampling_from_the_likeliest_tokens(races: bool) -> None:
    """With `likeliest`, a row keeps at most that many tokens, also with ties, and sums to 1."""
    tied = torch.ones(REQUESTS, 5)
    for given in (logits(0), tied):
        rows = batch(races, likeliest=2).rows(given.clone(), range(REQUESTS))
        assert ((rows > 0).sum(-1) <= 2).all()
        torch.testing.assert_close(rows.sum(-1), torch.ones(REQUESTS))
        draws = batch(races, 1, likeliest=2)
        chosen = draws.draw(given.clone())
        assert (rows.gather(1, chosen[:, None]) > 0).all()
        assert ((draws.draft_probs > 0).sum(-1) <= 2).all()
        expected = torch.zeros(REQUESTS, 4).index_add_(1, FIRST, rows)
        torch.testing.assert_close(draws.draft_probs, expected)
    hot = batch(races, likeliest=2).rows(logits(0), range(REQUESTS))[4]  # this request has no top_k
    best = logits(0)[4].topk(2).indices
    assert set(hot.nonzero().flatten().tolist()) == set(best.tolist())
