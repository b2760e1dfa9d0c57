# SPDX-License-Identifier: Apache-2.0
"""Where the tokens that are raced for stand in their requests' outputs."""

import pytest
import torch

from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier.race_sampler import Races, RacingSampler
from vllm_hetero_spec.verify.race import race

SEEDS = [7, 16]
WRITTEN = [5, 0]
LOGITS = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))


def races() -> Races:
    batch = BatchView(["a", "b"], WRITTEN, SEEDS)
    return Races(lambda: batch, torch.device("cpu"))


def drawn(sampler: RacingSampler) -> list[int]:
    tokens, _ = sampler(LOGITS.clone(), {}, None, None)
    return tokens.tolist()


def expected(behind: list[int]) -> list[int]:
    places = torch.tensor(WRITTEN) + torch.tensor(behind)
    return race(LOGITS.softmax(-1), torch.tensor(SEEDS), places).tolist()


def test_tokens_are_raced_for_behind_the_drafts() -> None:
    """For as long as the sampler is told so, one call within the other, faults included."""
    sampler = RacingSampler(races(), "raw_logprobs")
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
    own = races()
    with RacingSampler(own, "raw_logprobs").behind([4, 2]):
        assert own.seeds_and_places(2)[1].tolist() == WRITTEN
    assert own.seeds_and_places(2, [4, 2])[1].tolist() == [9, 2]
