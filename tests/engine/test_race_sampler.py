# SPDX-License-Identifier: Apache-2.0
"""Where the tokens that are raced for stand in their requests' outputs."""

from types import SimpleNamespace

import pytest
import torch

from vllm_hetero_spec.engine.verifier.race_sampler import RaceSeeds, RacingSampler
from vllm_hetero_spec.verify.race import race

SEEDS = {"a": 3, "b": 8}
WRITTEN = [5, 0]
LOGITS = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))


def seeds() -> RaceSeeds:
    requests = {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(seed=seed), output_token_ids=[0] * written
        )
        for (name, seed), written in zip(SEEDS.items(), WRITTEN, strict=True)
    }
    batch = SimpleNamespace(req_ids=list(SEEDS))
    return RaceSeeds(
        SimpleNamespace(requests=requests, input_batch=batch, device=torch.device("cpu"))
    )


def drawn(sampler: RacingSampler) -> list[int]:
    tokens, _ = sampler(LOGITS.clone(), {}, None, None)
    return tokens.tolist()


def expected(behind: list[int]) -> list[int]:
    places = torch.tensor(WRITTEN) + torch.tensor(behind)
    return race(LOGITS.softmax(-1), seeds().batch(2)[0], places).tolist()


def test_tokens_are_raced_for_behind_the_drafts() -> None:
    """For as long as the sampler is told so, one call within the other, faults included."""
    sampler = RacingSampler(seeds(), "raw_logprobs")
    with sampler.behind([4, 2]):
        assert drawn(sampler) == expected([4, 2])
        with sampler.behind([1, 0]):
            assert drawn(sampler) == expected([1, 0])
        with pytest.raises(ValueError, match="shorter"), sampler.behind([1]):
            drawn(sampler)
        assert drawn(sampler) == expected([4, 2])
    assert drawn(sampler) == expected([0, 0])
    assert expected([0, 0]) != expected([4, 2])


def test_drafts_are_no_part_of_the_places_that_a_rule_starts_from() -> None:
    own = seeds()
    with RacingSampler(own, "raw_logprobs").behind([4, 2]):
        assert own.batch(2)[1].tolist() == WRITTEN
    assert own.batch(2, [4, 2])[1].tolist() == [9, 2]
