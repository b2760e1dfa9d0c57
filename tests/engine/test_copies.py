# SPDX-License-Identifier: Apache-2.0
"""Drafts copied from a request's earlier text."""

from collections.abc import Sequence

import numpy as np
import pytest
from child_tests import environment_of, passed

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.copies import earlier_text
from vllm_hetero_spec.engine.copies import policy as policy_module
from vllm_hetero_spec.engine.copies.earlier_text import MATCH, CopyRates, EarlierText
from vllm_hetero_spec.engine.copies.policy import Copies
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl, StepPlan
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.lookahead.controllers import Fixed, LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates

LOOKAHEAD = 4
QUOTED = [*range(100, 140)]  # a text without repeats
PROMPT = [*QUOTED, 7, 8, 9]


# ---- texts ---------------------------------------------------------------------------------------


def followed(prompt: Sequence[int], output: Sequence[int]) -> tuple[EarlierText, CopyRates]:
    text, rates = EarlierText(np.array(prompt)), CopyRates()
    text.append(output, rates, False)
    return text, rates


def test_a_quoted_text_goes_on_as_before() -> None:
    text, _ = followed(PROMPT, QUOTED[5:15])
    assert text.predicts
    assert text.matched == 10
    assert text.predicted(4) == QUOTED[15:19]


def test_fewer_tokens_predict_nothing() -> None:
    text, _ = followed(PROMPT, QUOTED[5 : 4 + MATCH])
    assert not text.predicts
    text, _ = followed(PROMPT, QUOTED[5 : 5 + MATCH])
    assert text.predicted(2) == QUOTED[5 + MATCH : 7 + MATCH]


def test_the_end_of_a_prompt_predicts() -> None:
    text = EarlierText(np.array([*PROMPT, *QUOTED[:6]]))
    assert text.matched == 6
    assert text.predicted(2) == QUOTED[6:8]


def test_one_different_token_does_not_lose_the_place() -> None:
    text, _ = followed(PROMPT, [*QUOTED[:8], 1])
    assert text.predicted(2) == QUOTED[9:11]
    text, _ = followed(PROMPT, [*QUOTED[:8], 1, 2])
    assert not text.predicts


def test_a_repeated_end_is_repeated() -> None:
    text, _ = followed([1, 2, 3, 4, 5, 6], [4, 5, 6, 4, 5, 6])
    assert text.predicted(7) == [4, 5, 6, 4, 5, 6, 4]


def test_the_end_of_a_long_prompt_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_text, "SEARCHED", 20)
    text, _ = followed(PROMPT, QUOTED[5:15])
    assert not text.predicts  # these tokens are not among the last 20
    text, _ = followed(PROMPT, QUOTED[25:32])
    assert text.predicted(3) == QUOTED[32:35]
    assert (len(text), text.last) == (len(PROMPT) + 7, QUOTED[31])


def test_old_places_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_text, "_MOST_PLACES", 45)
    text, _ = followed(PROMPT, [*range(200, 215), *QUOTED[5:12]])
    assert not text.predicts
    assert len(text._after) == 45
    text, _ = followed(PROMPT, [*range(200, 215), *QUOTED[30:36]])
    assert text.predicted(2) == QUOTED[36:38]


@pytest.mark.parametrize("symbols", [2, 3, 8])
def test_random_texts(symbols: int) -> None:
    """A place is found if the last tokens have come before. What it follows was there."""
    generator = np.random.default_rng(symbols)
    for _ in range(50):
        ids = generator.integers(0, symbols, 60).tolist()
        split = int(generator.integers(0, 20))
        text, rates = EarlierText(np.array(ids[:split], int)), CopyRates()
        for end in range(split, len(ids)):
            text.append([ids[end]], rates, False)
            known = ids[: end + 1]
            before = [known[at : at + MATCH] for at in range(len(known) - MATCH)]
            if known[-MATCH:] in before:
                assert text.predicts
            if text.predicts and text.matched >= MATCH:
                shared = known[-min(text.matched, MATCH) :] + text.predicted(1)
                assert shared in [known[at : at + len(shared)] for at in range(len(known))]


def test_every_token_tests_the_rates() -> None:
    rates = CopyRates()
    prior = rates.survival(16, False, 2)
    good, bad = EarlierText(np.array(PROMPT)), EarlierText(np.array([], int))
    good.append(QUOTED, rates, False)
    assert rates.survival(16, False, 2)[1] > prior[1]
    assert rates.survival(16, True, 2) == prior  # sampled requests are another kind
    for _ in range(40):  # four tokens agree, the next does not
        bad.append(
            [1, 2, 3, 4, int(np.random.default_rng(len(bad)).integers(50, 10**6))], rates, True
        )
    assert rates.survival(MATCH, True, 1)[0] < 0.1


# ---- choice --------------------------------------------------------------------------------------


class Priced(Fixed):
    """A fixed lookahead, and a price of a second."""

    tokens_per_second = 40.0


def policy_of(row: float = 0.0005, drafter: float = 0.005) -> Copies:
    """Return a policy. Steps of the target take 20 ms and `row` seconds for each further row."""
    target = [(rows, 0.02 + (rows - 1) * row) for rows in (1, 2, 8, 64, 512)]
    known = Estimates.of(CostModel(target, [(1, drafter), (64, drafter)]), LOOKAHEAD)
    return Copies(known, Priced(LOOKAHEAD), DraftStats(), num_ids=10_000)


def step_of(
    outputs: Sequence[Sequence[int]],
    *,
    lookahead: int = LOOKAHEAD,
    buckets: Sequence[int] = (),
    asked: int | None = None,
    drafted: int = 0,
    end_ids: Sequence[int] = (),
    started: Sequence[str] = (),
) -> StepView:
    """Return a step in which each request sampled the last token of its output."""
    requests = [
        RequestView(
            req_id=str(index),
            params=RequestParams(0, lookahead=asked, end_ids=frozenset(end_ids)),
            token_ids=np.array([*PROMPT, *output]),
            num_prompt_tokens=len(PROMPT),
            new_tokens=output[-1 - drafted :],
            num_drafted=drafted,
        )
        for index, output in enumerate(outputs)
    ]
    names = {request.req_id for request in requests}
    begun, rows = dict.fromkeys(started), len(requests)
    return StepView(requests, begun, names, lookahead, 1000, rows, 0.02, 0.02, buckets=buckets)


COPIED, ELSE = QUOTED[3:23], [*range(300, 320)]  # outputs: one quotes the prompt


def planned(
    policy: Copies, step: StepView, lookahead: int = LOOKAHEAD, *, probe: bool = False
) -> StepPlan:
    policy.observe(step)
    lengths = [lookahead] * len(step.requests)
    return policy.plan(StepPlan(lengths, []), LookaheadPlan(tuple(lengths), probe))


def test_the_drafter_rests_while_all_copy() -> None:
    policy = policy_of()
    plan = planned(policy, step_of([COPIED, COPIED]))
    assert plan.lookahead == [0, 0]
    assert set(plan.copied) == {0, 1}
    drafts = policy.trim([], LookaheadControl(Fixed(4), can_stop_early=False))
    assert [draft.tokens for draft in drafts] == [QUOTED[23:27]] * 2


def test_a_copy_replaces_one_draft_of_many() -> None:
    policy = policy_of()
    plan = planned(policy, step_of([ELSE, COPIED, ELSE, ELSE]))
    assert plan.lookahead == [4, 0, 4, 4]
    assert set(plan.copied) == {1}
    others = [Draft.chain(name, [5, 6]) for name in "023"]
    control = LookaheadControl(Fixed(4), can_stop_early=False)
    lengths = {draft.req_id: len(draft.tokens) for draft in policy.trim(others, control)}
    assert lengths == {"0": 2, "1": 4, "2": 2, "3": 2}


def test_a_cheap_drafter_drafts_the_others() -> None:
    """The dearer its steps, the fewer copies are enough to do without it."""
    outputs = [COPIED, COPIED, ELSE]
    assert planned(policy_of(drafter=0.001), step_of(outputs)).lookahead == [0, 0, 4]
    assert planned(policy_of(drafter=0.03), step_of(outputs)).lookahead == [0, 0, 0]


def test_copies_need_no_drafter() -> None:
    plan = planned(policy_of(), step_of([ELSE, COPIED]), lookahead=0)
    assert set(plan.copied) == {1}


def test_dear_rows_are_not_copied() -> None:
    plan = planned(policy_of(row=0.05), step_of([COPIED]), lookahead=0)
    assert not plan.copied


def test_a_copy_ends_with_the_request() -> None:
    policy, control = policy_of(), LookaheadControl(Fixed(4), can_stop_early=False)
    planned(policy, step_of([COPIED], end_ids=[QUOTED[24]]))
    assert policy.trim([], control)[0].tokens == QUOTED[23:25]


def test_a_token_without_a_logit_is_not_copied() -> None:
    """The tokenizer may have more ids than the target has logits. A prompt may contain them."""
    policy, control = policy_of(), LookaheadControl(Fixed(4), can_stop_early=False)
    policy._num_ids = QUOTED[25]
    planned(policy, step_of([COPIED]))
    assert policy.trim([], control)[0].tokens == QUOTED[23:25]


def test_texts_that_leave_their_place_are_not_copied() -> None:
    policy, output = policy_of(), ELSE[:1]
    for number in range(60):  # four tokens agree, the next does not
        output = [*output, *QUOTED[8:12], 1000 + number]
        policy.observe(step_of([output]))
    assert not planned(policy, step_of([[*output, *QUOTED[8:12]]])).copied


def test_probes_and_draft_lengths_of_requests_stay() -> None:
    assert planned(policy_of(), step_of([COPIED]), probe=True).lookahead == [4]
    assert not planned(policy_of(), step_of([COPIED]), lookahead=0, probe=True).copied
    plan = planned(policy_of(), step_of([COPIED], asked=3), lookahead=3)
    assert plan.lookahead == [3]
    assert not plan.copied


def test_a_length_is_requested_in_advance() -> None:
    """With asynchronous scheduling a step's drafts have at most its length."""
    policy = policy_of()
    plan = planned(policy, step_of([COPIED], lookahead=0, buckets=(0, 2, 4)), lookahead=0)
    assert plan.rows == 4
    assert not plan.copied
    plan = planned(policy, step_of([[*COPIED, QUOTED[23]]], lookahead=2, buckets=(0, 2, 4)))
    assert set(plan.copied) == {0}
    assert plan.lookahead == [0]
    drafts = policy.trim([], LookaheadControl(Fixed(4), can_stop_early=False))
    assert [draft.tokens for draft in drafts] == [QUOTED[24:26]]


def test_steps_are_read_while_the_text_repeats_itself() -> None:
    policy = policy_of()
    assert policy.is_idle
    policy.observe(step_of([COPIED]))
    assert not policy.is_idle
    for number in range(8):
        policy.observe(step_of([[*COPIED, *range(500, 550 + 50 * number)]]))
    assert policy.is_idle


def test_steps_are_skipped_if_copies_do_not_pay() -> None:
    policy = policy_of(row=0.05)
    for number in range(12):
        planned(policy, step_of([COPIED[: 8 + number]]), lookahead=0)
    assert policy._share > 0.1
    assert policy.is_idle


def test_a_text_is_read_once() -> None:
    """With asynchronous scheduling, a request may be reported as started in a later step."""
    policy = policy_of()
    policy.observe(step_of([COPIED[:9]]))
    text = policy._texts["0"]
    policy.observe(step_of([COPIED[:10]], started=["0"]))
    assert policy._texts["0"] is text
    policy.observe(step_of([COPIED[:1]], started=["0"]))  # another request with the same id
    assert policy._texts["0"] is not text


def test_long_prompts_are_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "SEARCHED", len(PROMPT) + 1)
    policy = policy_of()
    for number, count in enumerate((2, 4, 5), 8):
        policy.observe(step_of([COPIED[:number]] * 5))
        assert len(policy._texts) == count


def test_accepted_copies_are_counted_and_texts_are_forgotten() -> None:
    policy, control = policy_of(), LookaheadControl(Fixed(4), can_stop_early=False)
    planned(policy, step_of([COPIED]))
    policy.trim([], control)
    policy.observe(step_of([[*COPIED, *QUOTED[23:26], 1]], drafted=3))
    assert (policy._stats.copies, policy._stats.copied_tokens_accepted) == (1, 3)
    planned(policy, step_of([COPIED]))
    policy.trim([], control)
    policy.observe(StepView([], {}, (), LOOKAHEAD, 1000, 0))
    assert not policy._texts
    assert not policy._verifying


# ---- engines -------------------------------------------------------------------------------------

RUNS = "V1", "V2", "V2, ahead", "V2, 0.33"


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("demo_pair")
@pytest.mark.parametrize("way", RUNS)
def test_engines_copy(way: str, request: pytest.FixtureRequest) -> None:
    passed(["copy_runs.py"], environment_of(way, request))
