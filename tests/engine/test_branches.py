# SPDX-License-Identifier: Apache-2.0
"""Draft trees in the plan of a step, depending on the draft tokens that the scheduler has kept."""

from types import SimpleNamespace

import pytest
import torch

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.trees import branches as branches_module
from vllm_hetero_spec.engine.trees.branches import BranchSequences
from vllm_hetero_spec.trees.layout import lay_out
from vllm_hetero_spec.trees.walk import ROOT

# Two tokens after the text, and one after the first of them. The branch repeats the root token.
TREE = lay_out(9, [1, 2, 3], [ROOT, ROOT, 0], [0.9, 0.5, 0.4], branches=1, rows=4)


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> BranchSequences:
    """Branches of a worker with eight sequences, blocks of 16 tokens and 20 scratch blocks."""
    monkeypatch.setattr(branches_module, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    made = BranchSequences(SimpleNamespace(device=torch.device("cpu"), max_num_reqs=8))
    made.__dict__["_bounds"] = (None, 3, range(100, 120), [16])
    return made


@pytest.mark.parametrize(("scheduled", "length"), [(1, 0), (7, 0), (7, len(TREE.tokens))])
@pytest.mark.parametrize("place", [0, 1])
def test_a_tree_that_is_not_scheduled_is_left_out(
    branches: BranchSequences, scheduled: int, length: int, place: int
) -> None:
    """The draft was dropped, or the request also prefills. The other tree is still verified."""
    ids = ["whole", "dropped"]
    drafts = dict.fromkeys(ids, TREE.tokens)
    trees = [Draft(req_id, TREE.tokens, (), rows=TREE) for req_id in ids]
    branches.expect(trees, lambda req_id: False)
    branches.on_drafts_taken(drafts, dict.fromkeys(ids, 20))
    step = [("whole", 1 + len(TREE.tokens), len(TREE.tokens))]
    step.insert(place, ("dropped", scheduled, length))
    branches.before_forward(*zip(*step, strict=True))
    planned = branches._step
    assert planned is not None
    assert [tree is None for tree in planned.trees] == [req_id == "dropped" for req_id, *_ in step]
    assert planned.plans[0].counts.sum() == sum(rows for _, rows, _ in step)
    assert branches.nodes == {"whole": 3}
    assert (planned.plans[0].counts > 0).all()
