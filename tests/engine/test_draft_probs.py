# SPDX-License-Identifier: Apache-2.0
"""`draft_probs` between drafting and verification: one table per round, which is not copied."""

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_drafter import ToyDrafterModel, drafter_of

from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.sampling import DraftSampling, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.drafter.model import ForwardBatch
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftRow, DraftTask
from vllm_hetero_spec.engine.verifier import draft_probs
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs, shared
from vllm_hetero_spec.text.context import IdentityContext
from vllm_hetero_spec.verify.drafts import DraftBatch

WIDTH = 5


class SameRows(ToyDrafterModel):
    """Drafter model that returns the same logits for every text."""

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.arange(3.0).repeat(len(batch.lengths), 1)


def batch_of(
    pending: PendingDraftProbs, req_ids: Sequence[str], lengths: list[int], tokens: list[int]
) -> DraftBatch:
    nothing = [0] * len(lengths)
    return pending.batch(req_ids, lengths, torch.tensor(tokens), nothing, nothing)


def drafted(steps: list[int]) -> list[Draft]:
    """Return the sampled drafts of one round; the drafter has three ids. `steps` must descend."""
    tokens = TokenMap(torch.tensor([4, 0, 2]), WIDTH)
    lengths = torch.ones(3, dtype=torch.int64)
    method = SampledMethod(tokens, lengths, lambda d: (int(tokens.first[d]),))
    rows = []
    for index, count in enumerate(steps):
        state = RequestState(str(index), IdentityContext())
        task = DraftTask(state, lookahead=count, draw=DraftSampling(1.0))
        table = BlockTable(blocks=[1, 2, 3])
        rows.append(DraftRow(task, DraftSequence(table), [0], count))
    count = len(steps)
    drafter = drafter_of(SameRows(), max(steps), count, vocab_size=3, banned=(), sampling=method)
    drafts = [row.proposal for row in drafter.run(rows)]
    assert all(drafts)
    return drafts


def test_a_round_has_one_table() -> None:
    """All requests of a round share one table. Verification does not copy it."""
    first, second = (draft.draft_probs for draft in drafted([3, 2]))
    assert first.rows is second.rows
    pending = PendingDraftProbs()
    pending.put("a", first)
    pending.put("b", second)
    batch = batch_of(pending, ["a", "x", "b"], [2, 1, 2], [4, 1, 0, 2, 2])
    (table,) = batch.draft_probs
    assert table is first.rows
    assert batch.row_of.tolist() == [0, 2, -1, 1, 3]
    expected = torch.arange(3.0).softmax(-1)
    torch.testing.assert_close(table[0][[4, 0, 2]], expected)


def test_drafts_of_two_rounds_are_verified_together_and_only_once() -> None:
    """A request that was not scheduled for a step is verified with drafts of the next round."""
    early = DraftProbs(torch.rand(1, WIDTH), [0])
    late = DraftProbs(torch.rand(2, WIDTH), [0, 1])
    pending = PendingDraftProbs()
    pending.put("early", early)
    pending.put("late", late)
    batch = batch_of(pending, ["late", "early"], [2, 1], [0, 0, 0])
    first, second = batch.draft_probs
    assert first is late.rows
    assert second is early.rows
    assert batch.row_of.tolist() == [0, 1, 2]
    assert not batch_of(pending, ["late"], [1], [0]).draft_probs


def test_older_drafts_are_forgotten() -> None:
    """Entries of finished requests are deleted, and of requests with a newer draft of any kind."""
    pending = PendingDraftProbs()
    for name in ("gone", "waits", "anew"):
        pending.put(name, DraftProbs(torch.rand(1, WIDTH), [0]))
    pending.keep({"waits", "anew"}, {"anew"})
    batch = batch_of(pending, ["gone", "waits", "anew"], [1, 1, 1], [0, 0, 0])
    assert [row >= 0 for row in batch.row_of.tolist()] == [False, True, False]


def test_a_draft_is_cut_with_all_that_belongs_to_it() -> None:
    (draft,) = drafted([3])
    cut = draft.first(2)
    assert (cut.tokens, list(cut.parents)) == (draft.tokens[:2], [-1, 0])
    assert cut.draft_probs.row_of == [0, 1]
    assert draft.first(3) is draft
    assert draft.first(0).tokens == []


def test_padding_has_no_draft_probs() -> None:
    """vLLM pads the step of a request that comes back after preemption. Its draft is void."""
    pending, (draft,) = PendingDraftProbs(), drafted([2])
    assert draft.draft_probs is not None
    pending.put("0", draft.draft_probs)
    batch = pending.batch(["0"], [2], torch.tensor([-1, -1]), [0], [0], void=["0"])
    assert batch.row_of is None
    assert not pending._pending


def test_requests_that_do_not_exist_have_certain_drafts() -> None:
    """vLLM profiles with dummy requests, which are not in the batch."""
    batch = batch_of(PendingDraftProbs(), [], [1, 1], [0, 0])
    assert not batch.draft_probs
    assert batch.size == 2


class Wire:
    """Group that sends bytes in memory order, without strides, like vLLM's group on a CPU."""

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


def on_both_ranks(
    probs: dict[str, DraftProbs], group: Wire, likeliest: int | None = None
) -> list[dict[str, DraftProbs]]:
    """Return what the first rank and another rank have after the broadcast."""
    first = shared(probs, group, likeliest)
    group.is_first_rank = False
    return [first, shared({}, group, likeliest)]


def test_every_rank_has_the_draft_probs_of_the_first() -> None:
    """Also if the rows are a slice of a wider table, for example with a padded vocabulary."""
    wider = torch.arange(12.0).view(2, 6)
    sent = {
        "a": DraftProbs(wider[:, :5], [0, -1]),
        "b": DraftProbs(wider[:, :5], [1]),
        "c": DraftProbs(wider, [0]),
    }
    for received in on_both_ranks(sent, Wire()):
        assert received.keys() == sent.keys()
        for name, probs in sent.items():
            assert received[name].row_of == probs.row_of
            assert torch.equal(received[name].rows, probs.rows)


def test_if_sending_fails_other_ranks_get_an_empty_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(draft_probs, "pack_rows", full)
    group = Wire()
    with pytest.raises(torch.OutOfMemoryError):
        shared({"a": DraftProbs(torch.rand(2, 5), [0, 1])}, group, likeliest=3)
    group.is_first_rank = False
    assert shared({}, group, likeliest=3) == {}


def test_only_tokens_with_a_probability_are_sent() -> None:
    """The received rows are identical to the bit."""
    rows = torch.zeros(5, 12)
    rows[0, [3, 11, 0]] = torch.tensor([0.5, 0.3, 0.2])
    rows[1, 7] = 1.0
    rows[2, [1, 2, 5]] = 1 / 3
    rows[3, [4, 6]] = torch.tensor([0.9, 1e-30])
    probs = {"a": DraftProbs(rows[:, :12], [0, 1, -1]), "b": DraftProbs(rows, [4, 3, 2])}
    group = Wire()
    ranks = on_both_ranks(probs, group, likeliest=3)
    travelled = [value for value in group._sent.values() if isinstance(value, torch.Tensor)]
    assert {tuple(value.shape) for value in travelled} == {(5, 2, 3)}
    for received in ranks:
        assert received["a"].row_of == [0, 1, -1]
        for name in ("a", "b"):
            assert torch.equal(received[name].rows, rows)


@pytest.mark.parametrize(
    ("size", "same", "expected"),
    [(1, [], None), (2, [True, True], None), (3, [True, True, False], 64)],
)
def test_rows_have_few_tokens_between_nodes(
    size: int, same: list[bool], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_probs, "in_the_same_node_as", lambda group: same)
    # `far_apart` may have set a smaller number in this process.
    monkeypatch.setattr(draft_probs, "SPARSE_TOP_K", 64)
    group = SimpleNamespace(world_size=size, cpu_group=None)
    assert draft_probs.likeliest_between(group) == expected  # type: ignore[arg-type]
