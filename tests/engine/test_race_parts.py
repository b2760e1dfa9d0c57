# SPDX-License-Identifier: Apache-2.0
"""Races over the rows of trees run in parts, so that only the tables of one part use memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hetero_spec.engine.trees.branches import BatchTrees
from vllm_hetero_spec.engine.verifier import race_sampler_v2, rejection_sampler_v1
from vllm_hetero_spec.engine.verifier.race_sampler_v2 import RaceSamplerV2
from vllm_hetero_spec.engine.verifier.rejection_sampler_v1 import HeteroRejectionSamplerV1
from vllm_hetero_spec.staging import on_host
from vllm_hetero_spec.trees.walk import ROOT
from vllm_hetero_spec.verify import noise
from vllm_hetero_spec.verify.drafts import DraftBatch

WIDTH, PART = 40, 3
HEAT = torch.tensor([0.8, 1.2, 0.0])
DRAFTS = [[3, 4, 5, 6], [7, 8], [9, 1]]
PARENTS = [[ROOT, ROOT, 0, 1], [ROOT, 0], [ROOT, ROOT]]
SEEDS, WRITTEN = [11, 12, 13], [5, 0, 3]
REQUEST_OF = torch.tensor([0] * 5 + [1] * 3 + [2] * 3)
LOGITS = torch.randn(len(REQUEST_OF), WIDTH, generator=torch.Generator().manual_seed(1))


def walked() -> list[torch.Tensor]:
    """Return the output of the trees on V1, with all sampling parameters."""
    drafts = DraftBatch.of(
        torch.tensor([token for draft in DRAFTS for token in draft]),
        [len(draft) for draft in DRAFTS],
        SEEDS,
        WRITTEN,
    )
    metadata: Any = SimpleNamespace(
        target_logits_indices=torch.tensor([0, 1, 2, 3, 5, 6, 8, 9]),
        cu_num_sampled_tokens=torch.tensor([5, 8, 11]),
    )
    sampling: Any = SimpleNamespace(
        temperature=HEAT, top_k=torch.tensor([WIDTH, 5, 3]), top_p=torch.tensor([0.9, 1.0, 0.5])
    )
    sampler: Any = SimpleNamespace(_racing="some", _send=on_host)
    view = BatchTrees(PARENTS, [True] * 3, torch.tensor([True] * 3))
    given = view, drafts, metadata, LOGITS, sampling, HEAT == 0
    return [*HeteroRejectionSamplerV1._walk(sampler, *given)]


def won() -> list[torch.Tensor]:
    """Return the tokens of all rows on V2."""
    states: Any = SimpleNamespace(
        seeds=SimpleNamespace(gpu=torch.tensor(SEEDS)), temperature=SimpleNamespace(gpu=HEAT)
    )
    races = RaceSamplerV2(states, lambda requests, positions: positions)
    positions = torch.arange(len(REQUEST_OF))
    return [races.winners(LOGITS.to(torch.bfloat16), REQUEST_OF, positions)]


@pytest.mark.parametrize(
    ("module", "tokens"), [(rejection_sampler_v1, walked), (race_sampler_v2, won)], ids=["V1", "V2"]
)
def test_rows_are_raced_in_parts(module: Any, tokens: Any, monkeypatch: Any) -> None:
    def raced(rows: torch.Tensor, *args: Any) -> torch.Tensor:
        sizes.append(rows.untyped_storage().nbytes() // (4 * WIDTH))
        return race(rows, *args)

    sizes: list[int] = []
    race = module.race
    monkeypatch.setattr(module, "race", raced)
    whole = tokens()
    assert sizes == [len(LOGITS)]
    for name in ("_CELLS", "_CELLS_ON_CPU"):
        monkeypatch.setattr(noise, name, PART * WIDTH)
    parts = tokens()
    assert sizes[1:] == [3, 3, 3, 2]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
