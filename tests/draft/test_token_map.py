# SPDX-License-Identifier: Apache-2.0
"""A drafter's row, mapped to the target's vocabulary, is the distribution of its proposals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hetero_spec.draft import token_map
from vllm_hetero_spec.draft.token_map import TokenMap, probabilities


@given(
    first=st.lists(st.integers(-1, 6), min_size=1, max_size=12),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1 << 30),
    renormalise=st.booleans(),
)
def test_draft_probs(first: list[int], padding: int, seed: int, renormalise: bool) -> None:
    generator = np.random.default_rng(seed)
    q = generator.dirichlet(np.ones(len(first) + padding), 3)
    tokens = TokenMap(torch.tensor(first), 9, renormalise)
    expected = np.zeros((3, 9))
    for d, t in enumerate(first):
        if t >= 0:
            expected[:, t] += q[:, d]
    table = tokens.table(len(q))
    tokens.add_draft_probs(torch.tensor(q, dtype=torch.float32), table)
    found = table[:, :-1]
    if not renormalise:  # probability without a proposal goes to the likeliest one
        nothing = q[:, [d for d, t in enumerate(first) if t < 0]].sum(1)
        expected[range(3), expected.argmax(1)] += nothing
    assert found.shape == (3, 9)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_only_tokens_without_a_proposal_are_forbidden() -> None:
    first = torch.tensor([2, -1, 0])
    for width in (3, 4):
        forbidden = TokenMap(first, 5).forbidden(width)
        assert forbidden is not None
        assert forbidden.tolist() == [0.0, float("-inf"), 0.0, 0.0][:width]
    assert TokenMap(first, 5, False).forbidden(4) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forbidden_tokens_change_no_other_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(9, 300, generator=generator)).to(dtype)
    logits[:, 5] = float("-inf")
    first, heat = torch.arange(300), 0.01 + 2 * torch.rand(9, generator=generator)
    first[::7] = -1
    found = probabilities(logits, heat, forbidden=TokenMap(first, 300).forbidden(300))
    masked = logits.masked_fill(first < 0, float("-inf"))
    assert found.dtype == torch.float32
    assert torch.equal(found, probabilities(masked, heat))


def test_probabilities_follow_the_requests_parameters() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])).repeat(4, 1)
    rows = probabilities(
        logits,
        torch.tensor([1.0, 0.5, 1.0, 1.0]),
        top_k=torch.tensor([0, 0, 2, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.6]),
    )
    squares = np.array([0.01, 0.16, 0.04, 0.09])
    expected = [
        [0.1, 0.4, 0.2, 0.3],
        (squares / squares.sum()).tolist(),
        [0.0, 4 / 7, 0.0, 3 / 7],
        [0.0, 4 / 7, 0.0, 3 / 7],
    ]
    assert rows.numpy() == pytest.approx(np.array(expected), abs=1e-6)
    plain = probabilities(logits, torch.ones(4))
    assert plain.numpy() == pytest.approx(np.tile([0.1, 0.4, 0.2, 0.3], (4, 1)), abs=1e-6)


def test_parameters_of_a_large_vocabulary() -> None:
    """`top_p` and `top_k` apply to the likeliest tokens. A large `top_k` is cut to their number."""
    width, ordered = 3 * token_map._ORDERED, token_map._ORDERED
    row = torch.arange(width).flip(0).float() / 200
    rows = probabilities(
        row.repeat(4, 1),
        torch.ones(4),
        top_k=torch.tensor([0, 0, 50, 2 * ordered]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 1.0]),
    )
    whole = row.softmax(-1)
    nucleus = int((whole.cumsum(-1) < 0.9).sum()) + 1
    for found, count in zip(rows, (width, nucleus, 50, ordered), strict=True):
        expected = torch.where(torch.arange(width) < count, whole, 0.0)
        assert torch.allclose(found, expected / expected.sum(), atol=1e-8)


def test_excluded_tokens_have_no_probability() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    for top_k in (None, torch.tensor([3])):
        assert probabilities(logits, torch.tensor([0.7]), top_k)[0, 1] == 0
