# SPDX-License-Identifier: Apache-2.0
"""Laws of drafts between the drafter and the verifier: one table a round, never copied for it."""

import torch

from vllm_hetero_spec.draft.drawing import Draw, SampledMethod
from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.engine.kv_pool import BlockTable
from vllm_hetero_spec.engine.laws import DraftLaw, DraftLaws
from vllm_hetero_spec.engine.picking import DraftRow, DraftSequence, Picker, PickRules

WIDTH = 5


def drafted(steps: list[int]) -> list[DraftRow]:
    """One round of sampled drafts over a drafter of three ids, the longest first."""
    tokens = TokenMap(torch.tensor([4, 0, 2]), WIDTH)
    method = SampledMethod(tokens, torch.ones(3, dtype=torch.int64))
    nothing = torch.zeros(0, dtype=torch.int64)
    rules = PickRules(3, nothing, method, torch.Generator().manual_seed(1))
    rows = [DraftRow(DraftSequence(BlockTable()), [0], n, draw=Draw(1.0)) for n in steps]
    picker = Picker(rows, rules, torch.device("cpu"))
    for step in range(max(steps)):
        count = sum(n > step for n in steps)
        picker.pick(torch.arange(3.0).expand(count, 3).clone())
    picker.collect()
    return rows


def test_a_round_has_one_table() -> None:
    """However many requests it drafts for: none is given a copy, and verifying them makes none."""
    first, second = drafted([3, 2])
    assert first.laws is second.laws
    assert first.laws is not None
    laws = DraftLaws()
    for name, row in (("a", first), ("b", second)):
        laws.put(name, DraftLaw(row.laws, row.law_of))
    batch = laws.batch(["a", "x", "b"], [2, 1, 2], torch.tensor([4, 1, 0, 2, 2]))
    assert batch.rows is not None
    assert batch.rows.data_ptr() == first.laws.data_ptr()
    assert batch.row_of.tolist() == [0, 2, -1, 1, 3]
    expected = torch.arange(3.0).softmax(-1)
    torch.testing.assert_close(batch.rows[0][[4, 0, 2]], expected)


def test_rounds_mix_and_laws_are_handed_out_once() -> None:
    """A request that sat out a step is verified beside those of the next round."""
    (early,), (late,) = drafted([1]), drafted([2])
    laws = DraftLaws()
    laws.put("early", DraftLaw(early.laws, early.law_of))
    laws.put("late", DraftLaw(late.laws, late.law_of))
    batch = laws.batch(["late", "early"], [2, 1], torch.tensor([0, 0, 0]))
    assert batch.rows is not None
    assert len(batch.rows) == 3
    assert batch.row_of.tolist() == [0, 1, 2]
    assert laws.batch(["late"], [1], torch.tensor([0])).rows is None


def test_requests_that_do_not_exist_have_certain_drafts() -> None:
    """vLLM profiles with an empty batch."""
    batch = DraftLaws().batch([], [1, 1], torch.tensor([0, 0]))
    assert batch.rows is None
    assert batch.size == 2
