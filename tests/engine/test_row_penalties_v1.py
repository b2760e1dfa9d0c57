# SPDX-License-Identifier: Apache-2.0
"""Penalties on the affected tokens alone give the same logits as vLLM's tables of all tokens."""

import pytest
import torch
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm_hetero_spec.engine.verifier.top_k_top_p_v1 import apply_row_penalties

from vllm_hetero_spec.engine.verifier.rejection_sampler_v1 import HeteroRejectionSamplerV1

WIDTH = 50
PROMPTS = torch.tensor([[3, 4, 3, WIDTH], [7, WIDTH, WIDTH, WIDTH], [1, 2, 3, 4], [49, 0, 0, 9]])
OF = torch.tensor([0, 0, 1, 2, 2, 3])
OUTPUTS = [[5, 5, 4], [5, 5, 4, 9], [], [8, 8, 8], [8, 8, 8, -1], [49, 49]]
PENALTIES = {
    "repetition": [[0.0, 0.0, 1.1], [0.0, 0.0, 1.3], [0.0, 0.0, 1.0], [0.0, 0.0, 0.8]],
    "all": [[0.4, 0.3, 1.1], [0.0, 0.7, 1.0], [0.9, 0.0, 1.7], [-0.5, -0.2, 1.05]],
}


@pytest.mark.parametrize("kind", PENALTIES)
def test_logits_are_vllms_to_the_bit(kind: str) -> None:
    logits = 5 * torch.randn(len(OF), WIDTH, generator=torch.Generator().manual_seed(2))
    penalties = torch.tensor(PENALTIES[kind])
    presence, frequency, repetition = penalties[OF].T
    expected = apply_all_penalties(
        logits.clone(), PROMPTS[OF], presence, frequency, repetition, OUTPUTS
    )
    apply_row_penalties(logits, PROMPTS, OF, penalties, OUTPUTS)
    assert torch.equal(logits, expected)


def test_verification_makes_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_verification import arguments
    from vllm.v1.sample import rejection_sampler as vllm

    metadata, _, _, sampling = arguments()
    sampling.no_penalties, sampling.prompt_token_ids = False, torch.zeros(5, 2, dtype=torch.int64)
    sampling.repetition_penalties = torch.full((5,), 1.2)
    monkeypatch.setattr(vllm, "apply_all_penalties", None)
    logits = torch.ones(3, WIDTH)
    found = HeteroRejectionSamplerV1.apply_penalties(
        logits, sampling, metadata, torch.tensor([0, 0, 2]), [[4], [4, 5], []]
    )
    assert (found < 1).sum(-1).tolist() == [2, 3, 1]
