# SPDX-License-Identifier: Apache-2.0
"""Draft rows on a CPU: top-k and top-p keep vLLM's tokens, and penalties are equal to the bit."""

from types import SimpleNamespace

import pytest
import torch
from test_verification import arguments
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_hetero_spec.engine.verifier.cpu_rows_v1 import (
    _ORDERED,
    apply_row_penalties,
    apply_top_k_top_p,
)
from vllm_hetero_spec.engine.verifier.rejection_sampler_v1 import (
    HeteroRejectionSamplerV1,
    _target_probs,
)

WIDTH = 4 * _ORDERED
TOP_K = torch.tensor([20, WIDTH, 1, 50, WIDTH, 2 * _ORDERED, WIDTH, _ORDERED], dtype=torch.int32)
TOP_P = torch.tensor([0.8, 0.95, 1.0, 1.0, 1.0, 0.9, 0.9999, 0.5])
ROWS = len(TOP_K)


def peaked() -> torch.Tensor:
    """Return logits float32 [ROWS, WIDTH]. Many values tie because they come from bfloat16."""
    generator = torch.Generator().manual_seed(3)
    return (8 * torch.randn(ROWS, WIDTH, generator=generator)).bfloat16().float()


@pytest.fixture
def sorted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows that vLLM's function receives, for each call."""
    found: list[int] = []
    real = topk_topp_sampler.apply_top_k_top_p

    def counted(logits: torch.Tensor, *limits: torch.Tensor | None) -> torch.Tensor:
        found.append(len(logits))
        return real(logits, *limits)

    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_top_p", counted)
    return found


@pytest.mark.parametrize("heat", [1, 4, 100])
@pytest.mark.parametrize("with_k", [False, True])
def test_the_same_tokens_are_kept(heat: int, with_k: bool, sorted_rows: list[int]) -> None:
    """The first `_ORDERED` tokens have nearly all of the mass, most of it, or little."""
    k = TOP_K if with_k else None
    expected = apply_top_k_top_p_pytorch(peaked() / heat, k, TOP_P)
    found = apply_top_k_top_p(peaked() / heat, k, TOP_P)
    for line in range(ROWS):
        ours, theirs = (table[line].isfinite() for table in (found, expected))
        # Any of the tokens that tie at the limit of top-p may be kept, and sums are rounded.
        assert abs(int(ours.sum()) - int(theirs.sum())) <= 1
        assert torch.equal(found[line][ours], (peaked() / heat)[line][ours])
        law, other = (table[line].softmax(-1).sort().values for table in (found, expected))
        assert torch.allclose(law, other, atol=2e-4)
        if TOP_P[line] == 1:
            assert torch.equal(ours, theirs)
    if heat == 1 and not with_k:
        assert not sorted_rows  # few tokens are kept: vLLM has nothing to sort
    elif heat == 1:
        assert sum(sorted_rows) == 2  # the rows with _ORDERED tokens and more
    else:
        assert 0 < sum(sorted_rows) < ROWS


def test_ties_at_the_kth_token_are_kept() -> None:
    rows = torch.zeros(2, WIDTH)
    rows[0, 5], rows[0, 10:40] = 9.0, 8.0
    rows[1, :1500] = 7.0  # more than _ORDERED
    k, p = torch.tensor([3, 3]), torch.tensor([1.0, 0.9999])
    expected = apply_top_k_top_p_pytorch(rows.clone(), k, p)
    found = apply_top_k_top_p(rows.clone(), k, p)
    assert found.isfinite().sum(-1).tolist() == [31, int(expected[1].isfinite().sum())]
    assert torch.equal(found[0], expected[0])


def test_a_row_that_is_nearly_empty_or_not_finite() -> None:
    rows = torch.full((3, WIDTH), float("-inf"))
    rows[0, 3], rows[0, 9] = 1.0, 0.0
    rows[1, 7] = 2.0
    rows[2] = float("nan")
    k, p = torch.tensor([20, 20, 20]), torch.tensor([0.5, 1.0, 0.9])
    found = apply_top_k_top_p(rows, k, p)
    assert found[0].isfinite().nonzero().tolist() == [[3]]
    assert found[1].isfinite().nonzero().tolist() == [[7]]
    assert found[2].isnan().any()


def test_verification_sorts_no_row(sorted_rows: list[int]) -> None:
    sampling = SimpleNamespace(
        temperature=torch.full((2,), 0.7), top_k=torch.tensor([20, WIDTH]), top_p=TOP_P[:2]
    )
    of = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    expected = apply_top_k_top_p_pytorch(peaked() / 0.7, sampling.top_k[of], sampling.top_p[of])
    found = _target_probs(peaked(), of, sampling, False)  # type: ignore[arg-type]
    assert not sorted_rows
    assert torch.allclose(found.sum(-1), torch.ones(ROWS))
    assert torch.allclose(found.amax(-1), expected.softmax(-1).amax(-1), atol=2e-4)


NARROW = 50
PROMPTS = torch.tensor(
    [[3, 4, 3, NARROW], [7, NARROW, NARROW, NARROW], [1, 2, 3, 4], [49, 0, 0, 9]]
)
OF = torch.tensor([0, 0, 1, 2, 2, 3])
OUTPUTS = [[5, 5, 4], [5, 5, 4, 9], [], [8, 8, 8], [8, 8, 8, -1], [49, 49]]
PENALTIES = {
    "repetition": [[0.0, 0.0, 1.1], [0.0, 0.0, 1.3], [0.0, 0.0, 1.0], [0.0, 0.0, 0.8]],
    "all": [[0.4, 0.3, 1.1], [0.0, 0.7, 1.0], [0.9, 0.0, 1.7], [-0.5, -0.2, 1.05]],
}


@pytest.mark.parametrize("kind", PENALTIES)
def test_logits_are_vllms_to_the_bit(kind: str) -> None:
    logits = 5 * torch.randn(len(OF), NARROW, generator=torch.Generator().manual_seed(2))
    penalties = torch.tensor(PENALTIES[kind])
    presence, frequency, repetition = penalties[OF].T
    expected = apply_all_penalties(
        logits.clone(), PROMPTS[OF], presence, frequency, repetition, OUTPUTS
    )
    apply_row_penalties(logits, PROMPTS, OF, penalties, OUTPUTS)
    assert torch.equal(logits, expected)


def test_verification_makes_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, _, _, sampling = arguments()
    sampling.no_penalties, sampling.prompt_token_ids = False, torch.zeros(5, 2, dtype=torch.int64)
    sampling.repetition_penalties = torch.full((5,), 1.2)
    monkeypatch.setattr(rejection_sampler, "apply_all_penalties", None)
    logits = torch.ones(3, NARROW)
    found = HeteroRejectionSamplerV1.apply_penalties(
        logits, sampling, metadata, torch.tensor([0, 0, 2]), [[4], [4, 5], []]
    )
    assert (found < 1).sum(-1).tolist() == [2, 3, 1]
