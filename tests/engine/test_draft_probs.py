# SPDX-License-Identifier: Apache-2.0
"""draft_probs between the drafter and the verifier: one table a round, never copied for it."""

import ctypes
from typing import Any

import torch

from vllm_hetero_spec.draft.drawing import Draw, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.drafter.token_choice import DraftRow, DraftSequence, Picker, PickRules
from vllm_hetero_spec.engine.verifier.draft_probs import DraftProbs, PendingDraftProbs, shared

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
    assert first.draft_probs is second.draft_probs
    assert first.draft_probs is not None
    pending = PendingDraftProbs()
    for name, row in (("a", first), ("b", second)):
        pending.put(name, DraftProbs(row.draft_probs, row.row_of))
    batch = pending.batch(["a", "x", "b"], [2, 1, 2], torch.tensor([4, 1, 0, 2, 2]))
    assert batch.draft_probs is not None
    assert batch.draft_probs.data_ptr() == first.draft_probs.data_ptr()
    assert batch.row_of.tolist() == [0, 2, -1, 1, 3]
    expected = torch.arange(3.0).softmax(-1)
    torch.testing.assert_close(batch.draft_probs[0][[4, 0, 2]], expected)


def test_rounds_mix_and_draft_probs_are_handed_out_once() -> None:
    """A request that sat out a step is verified beside those of the next round."""
    (early,), (late,) = drafted([1]), drafted([2])
    pending = PendingDraftProbs()
    pending.put("early", DraftProbs(early.draft_probs, early.row_of))
    pending.put("late", DraftProbs(late.draft_probs, late.row_of))
    batch = pending.batch(["late", "early"], [2, 1], torch.tensor([0, 0, 0]))
    assert batch.draft_probs is not None
    assert len(batch.draft_probs) == 3
    assert batch.row_of.tolist() == [0, 1, 2]
    assert pending.batch(["late"], [1], torch.tensor([0])).draft_probs is None


def test_requests_that_do_not_exist_have_certain_drafts() -> None:
    """vLLM profiles with an empty batch."""
    batch = PendingDraftProbs().batch([], [1, 1], torch.tensor([0, 0]))
    assert batch.draft_probs is None
    assert batch.size == 2


class Wire:
    """A group that sends a tensor's bytes as they lie in memory, as vLLM's does on a CPU."""

    def __init__(self) -> None:
        self.is_first_rank = True
        self._sent: dict[str, Any] = {}

    def broadcast_tensor_dict(self, sent: dict[str, Any] | None, src: int) -> dict[str, Any]:
        if sent is None:
            return self._sent
        for key, value in sent.items():
            self._sent[key] = value
            if isinstance(value, torch.Tensor):
                copy = self._sent[key] = torch.empty(value.shape, dtype=value.dtype)
                ctypes.memmove(copy.data_ptr(), value.data_ptr(), copy.nbytes)
        return sent


def test_every_rank_has_the_draft_probs_of_the_first() -> None:
    """Also where they are part of a wider table, as with a padded vocabulary."""
    wider = torch.arange(12.0).view(2, 6)
    draft_probs = {
        "a": DraftProbs(wider[:, :5], [0, -1]),
        "b": DraftProbs(wider[:, :5], [1]),
        "c": DraftProbs(wider, [0]),
    }
    group = Wire()
    first = shared(draft_probs, group)
    group.is_first_rank = False
    second = shared({}, group)
    for received in (first, second):
        assert {name: probs.row_of for name, probs in received.items()} == {
            "a": [0, -1],
            "b": [1],
            "c": [0],
        }
        for name in ("b", "c"):
            assert torch.equal(received[name].rows, draft_probs[name].rows)
        assert torch.equal(received["a"].rows, wider[:, :5])
