# SPDX-License-Identifier: Apache-2.0
"""The table of methods: proposals, and the recommended order for a pair of tokenizers."""

import dataclasses
import itertools

import numpy as np
import pytest

from vllm_hetero_spec.draft.methods import HETERO, METHODS, order, spell_same
from vllm_hetero_spec.text.statistics import PairStatistics
from vllm_hetero_spec.text.vocabulary import VocabularyMaps

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


@pytest.mark.parametrize(
    ("change", "first", "figure"),
    [
        ({}, "tli", "95.0%"),
        ({"target_straddle": 0.03}, "push_forward", "3.0%"),
        ({"target_straddle": 0.029, "drafter_straddle": 0.2}, "push_forward", "20.0%"),
        ({"target_straddle": 0.2, "drafter_straddle": 0.1}, "push_forward", "20.0%"),
        ({"drafter_vocabulary": 1000, "omega_t": 0.1}, "slrs", "1,000"),
        ({"drafter_vocabulary": 1001, "omega_t": 0.1}, "tli", "10.0%"),
        ({"target_failures": 2}, "tli", "2.0%"),
        ({"drafter_failures": 2, "omega_t": 0.6}, "tli", "60.0%"),
        ({"drafter_failures": 2, "omega_t": 0.59}, "slem", "every pair"),
    ],
)
def test_the_first_method_and_its_reason(change: dict[str, float], first: str, figure: str) -> None:
    best, *_ = order(dataclasses.replace(ALIKE, **change), temperature=1)
    assert best.method == first
    assert figure in best.reason


@pytest.mark.parametrize(
    ("change", "temperature", "expected"),
    [
        ({}, 0, ["slem"]),
        ({}, 0.3, ["tli", "slem", "push_forward", "slrs"]),
        ({}, 0.31, ["tli", "push_forward", "slrs", "slem"]),
        ({"target_straddle": 0.1}, 1, ["push_forward", "slrs", "tli", "slem"]),
        ({"drafter_straddle": 0.1}, 1, ["push_forward", "slrs", "tli", "slem"]),
        # If the vocabularies share nothing, `tli` could draft nothing.
        ({"omega_t": 0.0, "target_straddle": 0.5}, 1, ["push_forward", "slrs", "slem"]),
    ],
    ids=["greedy", "nearly greedy", "sampled", "straddle", "drafter straddle", "disjoint"],
)
def test_order_of_methods(
    change: dict[str, float], temperature: float, expected: list[str]
) -> None:
    found = order(dataclasses.replace(ALIKE, **change), temperature=temperature)
    assert [choice.method for choice in found] == expected


def test_a_failure_in_a_hundred_lines_is_no_rewriting() -> None:
    once = dataclasses.replace(ALIKE, target_failures=1)
    assert order(once, temperature=1) == order(ALIKE, temperature=1)


def test_every_case_has_an_order_without_repetition() -> None:
    shares = (0.0, 0.01, 0.03, 0.5, 1.0)
    for omega, straddle, drafter, failures, few, temperature in itertools.product(
        shares, shares, shares, (0, 50), (300, 32_000), (0, 0.2, 1.0)
    ):
        statistics = dataclasses.replace(
            ALIKE,
            omega_t=omega,
            target_straddle=straddle,
            drafter_straddle=drafter,
            drafter_failures=failures,
            drafter_vocabulary=few,
        )
        names = [choice.method for choice in order(statistics, temperature=temperature)]
        assert "slem" in names
        assert len(names) == len(set(names))


# Drafter ids 0 to 3. Both tokenizers have the first two. The target spells the third with two
# tokens, and it cannot spell the fourth.
MAPS = VocabularyMaps(
    d2t=np.array([4, 1, -1, -1], np.int32),
    kappa_ptr=np.array([0, 1, 2, 4, 4], np.int32),
    kappa_ids=np.array([4, 1, 0, 3], np.int32),
    target_size=5,
)
PROPOSED = {
    "slrs": [[4], [1], [0, 3], []],
    "push_forward": [[4], [1], [0, 3], []],
    "tli": [[4], [1], [], []],
    "union": [[4], [1], [], []],
}


@pytest.mark.parametrize("name", METHODS)
def test_proposals_of_methods(name: str) -> None:
    """The first of a drafter token's target tokens is the one that is sampled."""
    method = METHODS[name]
    assert method.needs_probs is (name in PROPOSED)
    assert method.summary
    if method.spelling is None:
        return
    first, lengths, tokens = method.spelling(MAPS)
    assert [list(tokens(d)) for d in range(4)] == PROPOSED[name]
    assert first.tolist() == [[*proposed, -1][0] for proposed in PROPOSED[name]]
    assert all(n == len(t) for n, t in zip(lengths, PROPOSED[name], strict=True) if t)


def test_proposals_of_equal_tokenizers() -> None:
    """Ids beyond the width of the target's logits are not proposed."""
    first, lengths, tokens = spell_same(4, 3)
    assert first.tolist() == [0, 1, 2, -1]
    assert lengths.tolist() == [1, 1, 1, 1]
    assert list(tokens(2)) == [2]


def test_the_alias_is_in_no_order() -> None:
    assert METHODS[HETERO].promise(ALIKE) is None
    assert METHODS[HETERO].merges
    assert not METHODS[HETERO].needs_probs  # it may resolve to a method without `draft_probs`
