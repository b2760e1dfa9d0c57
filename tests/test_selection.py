# SPDX-License-Identifier: Apache-2.0
"""The order of methods for a pair of which only tokenizer statistics are known."""

import dataclasses
import itertools

import pytest

from vllm_hetero_spec.draft.selection import Choice, order
from vllm_hetero_spec.text.statistics import PairStatistics

ALIKE = PairStatistics(
    omega_t=0.95,
    omega_k=0.97,
    target_straddle=0.01,
    drafter_straddle=0.01,
    target_tokens=1000,
    drafter_tokens=1010,
    text_bytes=4000,
    lines=100,
    target_failures=0,
    drafter_failures=0,
    drafter_vocabulary=32_000,
)


def methods(choices: list[Choice]) -> list[str]:
    return [choice.method for choice in choices]


def test_greedy_targets_get_greedy_drafts() -> None:
    assert methods(order(ALIKE, temperature=0)) == ["slem"]
    assert methods(order(ALIKE, temperature=0, reproducible=True)) == ["slem"]


@pytest.mark.parametrize(
    "request_",
    [{"structured_output": True}, {"rows_available": False}],
    ids=lambda r: next(iter(r)),
)
def test_without_usable_rows_only_strings_are_matched(request_: dict[str, bool]) -> None:
    assert methods(order(ALIKE, temperature=1, **request_)) == ["slem"]


@pytest.mark.parametrize(
    ("change", "first", "figure"),
    [
        ({}, "tli", "95.0%"),
        ({"target_straddle": 0.03}, "slrs", "3.0%"),
        ({"target_straddle": 0.029, "drafter_straddle": 0.2}, "push_forward", "20.0%"),
        ({"target_straddle": 0.2, "drafter_straddle": 0.2}, "slrs", "20.0%"),
        ({"drafter_vocabulary": 1000, "omega_t": 0.1}, "slrs", "1,000"),
        ({"target_failures": 2}, "tli", "2.0%"),
        ({"drafter_failures": 2, "omega_t": 0.6}, "tli", "60.0%"),
        ({"drafter_failures": 2, "omega_t": 0.59}, "slem", "every pair"),
    ],
)
def test_what_comes_first_when_sampling(change: dict[str, float], first: str, figure: str) -> None:
    best, *_ = order(dataclasses.replace(ALIKE, **change), temperature=1)
    assert best.method == first
    assert figure in best.reason


def test_the_others_follow_and_the_universal_method_is_last() -> None:
    assert methods(order(ALIKE, temperature=1)) == ["tli", "push_forward", "slrs", "slem"]
    straddling = dataclasses.replace(ALIKE, target_straddle=0.1)
    assert methods(order(straddling, temperature=1)) == ["slrs", "push_forward", "tli", "slem"]


def test_a_failure_in_a_hundred_lines_is_no_rewriting() -> None:
    once = dataclasses.replace(ALIKE, target_failures=1)
    assert order(once, temperature=1) == order(ALIKE, temperature=1)


def test_near_greedy_the_greedy_draft_is_second() -> None:
    assert methods(order(ALIKE, temperature=0.3)) == ["tli", "slem", "push_forward", "slrs"]
    assert methods(order(ALIKE, temperature=0.31))[-1] == "slem"


def test_nothing_shared_is_nothing_to_restrict_a_draft_to() -> None:
    disjoint = dataclasses.replace(ALIKE, omega_t=0.0, target_straddle=0.5)
    assert methods(order(disjoint, temperature=1)) == ["slrs", "push_forward", "slem"]


def test_reproducible_texts_need_a_race_on_the_best_rows() -> None:
    best, second = order(ALIKE, temperature=1, reproducible=True)
    assert (best.method, second.method) == ("ersd", "slem")
    assert "tli" in best.reason
    rewriting = dataclasses.replace(ALIKE, drafter_failures=50, omega_t=0.1)
    assert methods(order(rewriting, temperature=1, reproducible=True)) == ["ersd", "slem"]


def test_every_case_has_an_order_without_repetition() -> None:
    shares = (0.0, 0.01, 0.03, 0.5, 1.0)
    flags = (False, True)
    for omega, straddle, temperature, *given in itertools.product(
        shares, shares, (0, 0.2, 1.0), flags, flags, flags
    ):
        statistics = dataclasses.replace(
            ALIKE, omega_t=omega, target_straddle=straddle, drafter_failures=int(100 * straddle)
        )
        names = methods(
            order(
                statistics,
                temperature=temperature,
                structured_output=given[0],
                reproducible=given[1],
                rows_available=given[2],
            )
        )
        assert "slem" in names
        assert len(names) == len(set(names))
