# SPDX-License-Identifier: Apache-2.0
"""Drafts obey what the request's sampling parameters make certain."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hetero_spec.draft.penalties import PenalisedRow, Penalties, Penalty
from vllm_hetero_spec.engine.drafter.request_limits import acceptable, penalty_of, useful_lookahead


def request_with(output: list[int], bad_words: list[list[int]] | None = None, **params: Any) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(**params)
    sampling._bad_words_token_ids = bad_words
    sampling._all_stop_token_ids = {2}
    return SimpleNamespace(output_token_ids=output, sampling_params=sampling)


@pytest.mark.parametrize(
    ("length", "max_tokens", "output", "expected"),
    [
        (10, 100, 0, 4),
        (10, 4, 0, 3),
        (10, 4, 3, 0),
        (97, 100, 0, 2),
        (99, 100, 0, 0),
        (10, None, 5, 4),
    ],
)
def test_lookahead_ends_with_the_request(length, max_tokens, output, expected) -> None:
    request = request_with([7] * output, max_tokens=max_tokens)
    assert useful_lookahead(request, length, max_model_len=100, lookahead=4) == expected


def test_forbidden_tokens_end_the_proposal() -> None:
    plain = request_with([1, 5])
    assert acceptable([5, 6, 2, 7], plain) == [5, 6, 2, 7]
    assert acceptable([5, 6, 2, 7], request_with([1, 5], min_tokens=5)) == [5, 6]
    assert acceptable([5, 6, 2, 7], request_with([1, 5], min_tokens=4)) == [5, 6, 2, 7]
    assert acceptable([5, 6, 7], request_with([1, 5], allowed_token_ids=[5, 7])) == [5]
    assert acceptable([5, 6, 7], request_with([1, 5], bad_words=[[6]])) == [5]
    # A bad word that began in the output.
    assert acceptable([6, 8, 7], request_with([1, 5], bad_words=[[5, 6, 8]])) == [6]
    assert acceptable([6, 9, 7], request_with([1, 5], bad_words=[[5, 6, 8]])) == [6, 9, 7]


def test_penalty_only_where_there_is_one() -> None:
    assert penalty_of(request_with([])) is None
    assert penalty_of(request_with([], presence_penalty=0.5)) == Penalty(presence=0.5)


def test_penalties_are_vllms_own_step_by_step() -> None:
    from vllm.model_executor.layers.utils import apply_penalties

    torch.manual_seed(0)
    vocab, device = 50, torch.device("cpu")
    prompts = [torch.randint(vocab, (9,)).tolist() for _ in range(3)]
    outputs = [torch.randint(vocab, (n,)).tolist() for n in (0, 5, 12)]
    penalties = [Penalty(0.5, 0.3, 1.0), Penalty(0.0, 0.0, 1.4), Penalty(-0.2, 0.7, 0.8)]
    rows = [PenalisedRow(2 * i, p, prompts[i], outputs[i]) for i, p in enumerate(penalties)]
    ours = Penalties(rows, vocab, device)
    for step in range(4):
        logits = torch.randn(5, vocab)
        expected = logits.clone()
        width = max(map(len, outputs)) or 1
        padded = [o + [vocab] * (width - len(o)) for o in outputs]
        expected[[0, 2, 4]] = apply_penalties(
            expected[[0, 2, 4]],
            torch.tensor(prompts),
            torch.tensor(padded),
            torch.tensor([p.presence for p in penalties]),
            torch.tensor([p.frequency for p in penalties]),
            torch.tensor([p.repetition for p in penalties]),
        )
        ours.apply(logits)
        torch.testing.assert_close(logits, expected, msg=f"step {step}")
        drafted = logits.argmax(-1)
        ours.add(drafted)
        for i in range(3):
            outputs[i].append(int(drafted[2 * i]))


def test_penalties_of_rows_that_have_ended_are_left_out() -> None:
    rows = [PenalisedRow(1, Penalty(1.0), [], [3]), PenalisedRow(3, Penalty(1.0), [], [3])]
    ours = Penalties(rows, 5, torch.device("cpu"))
    logits = torch.zeros(2, 5)
    ours.apply(logits)
    assert logits.nonzero().tolist() == [[1, 3]]
    ours.add(torch.tensor([0, 4]))
    logits = torch.zeros(2, 5)
    ours.apply(logits)
    assert logits.nonzero().tolist() == [[1, 3], [1, 4]]
