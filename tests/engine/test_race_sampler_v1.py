# SPDX-License-Identifier: Apache-2.0
"""Positions in the output that `RaceSamplerV1` uses to sample tokens."""

import pytest
import torch

from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier.race_sampler_v1 import RaceSamplerV1
from vllm_hetero_spec.verify.drafts import DraftBatch
from vllm_hetero_spec.verify.race import race

SEEDS = [7, 16]
WRITTEN = [5, 0]
LOGITS = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))


def racing() -> RaceSamplerV1:
    batch = BatchView(["a", "b"], SEEDS, WRITTEN)
    return RaceSamplerV1(lambda: batch, "raw_logprobs")


def drafts(lengths: list[int]) -> DraftBatch:
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    return DraftBatch.of(tokens, lengths, SEEDS, WRITTEN)


def drawn(sampler: RaceSamplerV1) -> list[int]:
    tokens, _ = sampler(LOGITS.clone(), {}, None, None)
    return tokens.tolist()


def expected(behind: list[int]) -> list[int]:
    places = torch.tensor(WRITTEN) + torch.tensor(behind)
    return race(LOGITS.softmax(-1), torch.tensor(SEEDS), places).tolist()


def test_tokens_are_raced_for_behind_the_drafts() -> None:
    """Contexts of `behind` may be nested, and an exception ends the inner one only."""
    sampler = racing()
    with sampler.behind(drafts([4, 2])):
        assert drawn(sampler) == expected([4, 2])
        with sampler.behind(drafts([1, 0])):
            assert drawn(sampler) == expected([1, 0])
        with pytest.raises(ZeroDivisionError), sampler.behind(drafts([1, 1])):
            _ = 1 / 0
        assert drawn(sampler) == expected([4, 2])
    assert drawn(sampler) == expected([0, 0])
    assert expected([0, 0]) != expected([4, 2])


def test_requests_that_do_not_exist_all_race_alike() -> None:
    """vLLM profiles the sampler with an empty batch."""
    sampler = RaceSamplerV1(lambda: BatchView([]), "raw_logprobs")
    tokens, _ = sampler(LOGITS[:1].repeat(3, 1), {}, None, None)
    assert len(set(tokens.tolist())) == 1
