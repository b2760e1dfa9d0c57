# SPDX-License-Identifier: Apache-2.0
"""Token choice in a draft step: fake tensors raise an exception when a value is read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_no_reads import sent
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.draft.sampling import DraftSampling, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftRow, DraftTask
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig, RowPickers
from vllm_hetero_spec.staging import on_host
from vllm_hetero_spec.text.context import IdentityContext

SIZE, WIDTH, STEPS = 6000, 5000, 3  # rows are wider than a block of `verify.noise.choose`


def rows_of(*, races: bool) -> list[DraftRow]:
    """Return rows of greedy and sampled requests, with and without penalties and limits."""
    asked = [
        (None, None),
        (None, Penalty(repetition=1.2)),
        (DraftSampling(1.0, seed=7, races=races), None),
        (DraftSampling(0.8, top_k=5, seed=8, races=races), Penalty(presence=0.5)),
        (DraftSampling(0.9, top_p=0.9, races=races), None),
    ]
    rows = []
    for index, (draw, penalty) in enumerate(asked):
        state = RequestState(str(index), IdentityContext())
        task = DraftTask(state, lookahead=STEPS, draw=draw, penalty=penalty)
        rows.append(DraftRow(task, DraftSequence(BlockTable()), [0], STEPS - index // 3))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [2.0, 22.0, 45.0])
def test_confidences_are_as_fine_as_the_logits(dtype: torch.dtype, top: float) -> None:
    """Most drafters have 16-bit logits, of any magnitude."""
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = torch.linspace(2, 14, 40)
    logits = (logits + top).to(dtype)
    rules = PickConfig(500, torch.tensor([], dtype=torch.long), confidences=True, beside=3)
    picked = PickBuffers(1, 40, rules)
    picked.wide = True
    picked.best(logits, 0)
    wanted = logits.float().softmax(-1).topk(3, -1)
    assert picked.ids(0, 40).tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(picked.read(0, 40), wanted.values[:, 0], atol=0.01)
    shares = picked.packet[0].numpy()[6:9].view(np.float32).T
    np.testing.assert_allclose(shares, wanted.values, atol=0.01)


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
def test_picking_reads_nothing(races: bool, renormalise: bool) -> None:
    with FakeTensorMode():
        first = torch.empty(SIZE, dtype=torch.int64)
        lengths = torch.empty(SIZE, dtype=torch.int64)
        method = SampledMethod(TokenMap(first, WIDTH, renormalise), lengths, lambda d: (d,))
        rules = PickConfig(
            vocab_size=SIZE,
            banned=torch.empty(2, dtype=torch.int64),
            ends=frozenset(),
            sampling=method,
            confidences=True,
        )
        rows = rows_of(races=races)
        picked = PickBuffers(STEPS, len(rows), rules)
        plan: Any = SimpleNamespace(forks=np.zeros((3, 0), np.int64), count=len(rows))
        own = RowPickers(rows, rules, sent, plan)
        for step in range(STEPS):
            count = sum(row.steps > step for row in rows)
            logits = rules.only_real(torch.rand(count, SIZE + 10))
            picked.best(logits, step)
            own.pick(logits, picked, step)
        assert own.draws is not None
        drawn = sum(row.steps for row in rows if row.task.draw is not None)
        assert own.draws.draft_probs.shape == (drawn, WIDTH)
        assert (own.draws.stand_ins is None) is renormalise
    assert picked.packet.shape == (STEPS, 3, len(rows))


def test_sampled_rows_in_front_draw_as_between_others() -> None:
    """Rows in front are read in place; their logits stay as they are."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    first = torch.arange(500)
    first[::2] = -1
    method = SampledMethod(TokenMap(first, 500), torch.ones_like(first), lambda d: (d,))
    rules = PickConfig(500, torch.tensor([], dtype=torch.long), sampling=method)
    plan: Any = SimpleNamespace(forks=np.zeros((3, 0), np.int64), count=3)
    drawn = []
    for order in ([0, 1, 2], [2, 0, 1]):
        rows = []
        for row in order:
            state = RequestState(str(row), IdentityContext())
            draw = DraftSampling(2.0, seed=row) if row < 2 else None
            sequence = DraftSequence(BlockTable())
            rows.append(DraftRow(DraftTask(state, lookahead=1, draw=draw), sequence, [0], 1))
        given, picked = logits[order], PickBuffers(1, 3, rules)
        picked.best(given, 0)
        own = RowPickers(rows, rules, on_host, plan)
        own.pick(given, picked, 0)
        assert torch.equal(given, logits[order])
        ids = dict(zip(order, picked.ids(0, 3).tolist(), strict=True))
        assert ids[0] % 2 == ids[1] % 2 == 1
        assert own.draws is not None
        drawn.append((sorted(ids.items()), own.draws.draft_probs.tolist()))
    assert drawn[0] == drawn[1]
