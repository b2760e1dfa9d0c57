# SPDX-License-Identifier: Apache-2.0
"""Lengths and tokens of drafts follow the sampling parameters of their request."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError

from vllm_hetero_spec.draft.penalties import PenalizedRow, Penalties, Penalty, TokenCounts
from vllm_hetero_spec.engine.seam.request_params import (
    LOOKAHEAD_ARG,
    RequestParams,
    params_of,
    requested_lookahead,
)
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.staging import Sender


def params_with(bad_words: list[list[int]] | None = None, **params: Any) -> RequestParams:
    from vllm import SamplingParams

    sampling = SamplingParams(**params)
    sampling._bad_words_token_ids = bad_words
    sampling._all_stop_token_ids = {2}
    return params_of(sampling, 0)


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
    params, text = params_with(max_tokens=max_tokens), np.zeros(length, np.int64)
    request = RequestView("0", params, text, num_prompt_tokens=length - output, new_tokens=[])
    step = StepView([request], {}, {"0"}, lookahead=4, max_model_len=100, num_rows=1)
    assert min(4, *step.room) == expected


@pytest.mark.parametrize(
    ("given", "ends"),
    [({}, {2, 9}), ({"stop_token_ids": [5]}, {2, 5, 9}), ({"ignore_eos": True}, set())],
)
def test_tokens_that_end_a_request(given: dict[str, Any], ends: set[int]) -> None:
    """vLLM ends it at tokens of its tokenizer, of the model and of the request itself."""
    from vllm import SamplingParams

    sampling = SamplingParams(**given)
    sampling.update_from_generation_config({"eos_token_id": [2, 9]}, 2)
    assert params_of(sampling, 0).end_ids == ends


@pytest.mark.parametrize(
    ("given", "proposal", "kept"),
    [
        ({}, [5, 6, 2, 7], 4),
        ({"min_tokens": 5}, [5, 6, 2, 7], 2),
        ({"min_tokens": 4}, [5, 6, 2, 7], 4),
        ({"allowed_token_ids": [5, 7]}, [5, 6, 7], 1),
        ({"bad_words": [[6]]}, [5, 6, 7], 1),
        # The first tokens of this bad word are in the output.
        ({"bad_words": [[5, 6, 8]]}, [6, 8, 7], 1),
        ({"bad_words": [[5, 6, 8]]}, [6, 9, 7], 3),
    ],
)
def test_forbidden_tokens_end_the_proposal(given, proposal, kept) -> None:
    params = params_with(**given)
    assert params.acceptable(proposal, [1, 5]) == kept
    assert params.acceptable(proposal, np.array([1, 5])) == kept


def test_before_min_tokens_drafts_leave_room_for_a_bonus_token() -> None:
    limits = [params_with(min_tokens=5).before_stops(out) for out in (0, 3, 4, 5, 6)]
    assert limits[:3] == [4, 1, 0]
    assert min(limits[3:]) > 1000


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (True, None), (False, 0), (0, 0), ("0", 0), ("3", 3), (2.0, 2), (99, 99)],
)
def test_a_request_sets_its_draft_length(given: Any, expected: int | None) -> None:
    extra = {LOOKAHEAD_ARG: given, "another's": "x"}
    found = params_with(extra_args=extra).lookahead
    assert found == requested_lookahead(extra) == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        *(
            ({LOOKAHEAD_ARG: wrong}, f"{LOOKAHEAD_ARG} is {wrong!r}; it must be a whole number")
            for wrong in (-1, "-1", 2.5, "2.5", "many", "", [3], math.inf)
        ),
        (
            {"hetero_spec_lookahed": 1},
            "hetero_spec_lookahed does not exist (did you mean 'hetero_spec_lookahead'?);",
        ),
        ({LOOKAHEAD_ARG: 1, "hetero_spec_x": 1}, "hetero_spec_x does not exist"),
    ],
)
def test_invalid_draft_lengths_are_refused(extra: dict[str, Any], sentence: str) -> None:
    """The front end refuses them. An engine core ignores them."""
    with pytest.raises(VLLMValidationError, match=f"^{re.escape(sentence)}.*\\.$"):
        requested_lookahead(extra)
    assert params_with(extra_args=extra).lookahead is None


def test_a_penalty_is_one_that_the_request_sets() -> None:
    assert params_with().penalty is None
    assert params_with(presence_penalty=0.5).penalty == Penalty(presence=0.5)


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({}, ""),
        ({"temperature": 0.9, "seed": 3, "top_p": 0.5, "max_tokens": 7}, ""),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"min_tokens": 3}, "restricted"),
        ({"allowed_token_ids": [4]}, "restricted"),
        ({"bad_words": [[6]]}, "restricted"),
        ({"structured_outputs": {"regex": "a+"}}, "grammar"),
    ],
)
def test_parameters_with_which_drafts_are_chains(given, because) -> None:
    if "structured_outputs" in given:
        from vllm.sampling_params import StructuredOutputsParams

        given = {"structured_outputs": StructuredOutputsParams(**given["structured_outputs"])}
    assert params_with(**given).keeps_chain == because


def counts_of(prompt: list[int], output: list[int], vocab: int) -> TokenCounts:
    counts = TokenCounts(vocab, len(prompt), torch.device("cpu"))
    counts.update(prompt + output, 0)
    return counts


def test_penalties_are_vllms_own_step_by_step() -> None:
    from vllm.model_executor.layers.utils import apply_penalties

    torch.manual_seed(0)
    vocab = 50
    prompts = [torch.randint(vocab, (9,)).tolist() for _ in range(3)]
    outputs = [torch.randint(vocab, (n,)).tolist() for n in (0, 5, 12)]
    penalties = [Penalty(0.5, 0.3, 1.0), Penalty(0.0, 0.0, 1.4), Penalty(-0.2, 0.7, 0.8)]
    rows = [
        PenalizedRow(2 * i, penalty, counts_of(prompts[i], outputs[i], vocab))
        for i, penalty in enumerate(penalties)
    ]
    ours = Penalties(rows, Sender(torch.device("cpu"), turns=4).send)
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


def test_rows_that_have_ended_get_no_penalties() -> None:
    rows = [PenalizedRow(row, Penalty(1.0), counts_of([], [3], 5)) for row in (1, 3)]
    ours = Penalties(rows, Sender(torch.device("cpu"), turns=4).send)
    logits = torch.zeros(2, 5)
    ours.apply(logits)
    assert logits.nonzero().tolist() == [[1, 3]]
    ours.add(torch.tensor([0, 4]))
    logits = torch.zeros(2, 5)
    ours.apply(logits)
    assert logits.nonzero().tolist() == [[1, 3], [1, 4]]


def test_token_counts_follow_a_text_whose_end_changes() -> None:
    """The counts equal a new count of the whole text, but only the changed tokens are counted."""
    random = torch.Generator().manual_seed(0)
    ids, prompt = torch.randint(9, (12,), generator=random).tolist(), 8
    counts = TokenCounts(7, prompt, torch.device("cpu"))
    unchanged = 0
    for _ in range(40):
        counts.update(ids, unchanged)
        counts.flush(*map(torch.from_numpy, counts.take_changes()))
        known = torch.tensor([i if i < 7 else 0 for i in ids])  # ids from 7 on count as 0
        assert torch.equal(counts.everywhere, torch.bincount(known, minlength=7).float())
        assert torch.equal(counts.output, torch.bincount(known[prompt:], minlength=7).float())
        unchanged = len(ids) - int(torch.randint(4, (1,), generator=random))
        ids = ids[:unchanged] + torch.randint(9, (3,), generator=random).tolist()
