# SPDX-License-Identifier: Apache-2.0
"""`examples/parallel/adapt.py` trains a parallel drafter."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "parallel"))
import adapt


def test_attention_of_masks() -> None:
    length, places = 6, 4
    cuts = torch.tensor([1, 3])
    positions, seen = adapt.layout(cuts, length, places)
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 4, 5, 6]
    of = [-1] * length + [0] * 3 + [1] * 3
    for row, query in enumerate(of):
        for column, key in enumerate(of):
            behind = positions[column] <= positions[row]
            if query == -1:
                expected = key == -1 and behind
            elif key == -1:
                expected = positions[column] <= cuts[query]
            else:
                expected = key == query and behind
            assert seen[row, column] == bool(expected), (row, column)


def test_a_mask_is_trained_on_the_token_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose logits copy the right token of each position has no loss."""
    rows = torch.arange(40).repeat(2, 1)

    class Right:
        def __call__(self, input_ids, position_ids, **_: object):
            logits = torch.full((*input_ids.shape, 64), -30.0)
            logits.scatter_(2, (position_ids + 1)[..., None].clamp(max=63), 30.0)
            return argparse.Namespace(logits=logits)

    found = adapt.losses(Right(), rows, mask=63, places=5)
    assert found.shape == (5,)
    assert found.max() < 1e-6


def test_a_trained_drafter_has_a_mask_token(demo_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.py").write_text("def one():\n    return 1\n" * 400)
    out = tmp_path / "out"
    options = {"target": None, "places": 4, "steps": 2, "batches": 0, "mask": None, "rate": 1e-3}
    given = argparse.Namespace(
        drafter=str(demo_pair / "drafter"), out=out, texts=[tmp_path / "texts"], **options
    )
    assert adapt.adapt(given).shape == (4,)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.pard_token == 2048
    assert model.get_input_embeddings().num_embeddings == 2049
