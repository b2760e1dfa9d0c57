# SPDX-License-Identifier: Apache-2.0
"""The bounds of `goodness.py`, compared with exact probabilities of biased coins."""

import math
from collections import Counter

import pytest
from goodness import ALPHA, follows, missed, p_value

COIN = {"heads": 0.3, "tails": 0.7}


def binomial(samples: int, chance: float, heads: int) -> float:
    return math.comb(samples, heads) * chance**heads * (1 - chance) ** (samples - heads)


def seen(samples: int, heads: int) -> Counter:
    return Counter(heads=heads, tails=samples - heads)


@pytest.mark.parametrize("samples", [40, 400])
def test_a_true_law_fails_no_more_often_than_stated(samples: int) -> None:
    values = [p_value(seen(samples, heads), COIN) for heads in range(samples + 1)]
    chances = [binomial(samples, 0.3, heads) for heads in range(samples + 1)]
    for level in (0.3, 1e-2, 1e-4, ALPHA):
        below = sum(c for value, c in zip(values, chances, strict=True) if value <= level)
        assert 0 < below <= level


def test_the_chance_of_missing_is_a_bound() -> None:
    samples, wrong = 1000, {"heads": 0.45, "tails": 0.55}
    passing = sum(
        binomial(samples, 0.45, heads)
        for heads in range(samples + 1)
        if follows(seen(samples, heads), COIN)
    )
    assert 0 < passing <= missed(COIN, wrong, samples) < 100 * passing


def test_a_law_is_not_missed_as_itself() -> None:
    assert missed(COIN, COIN, 1000) == 1.0
    assert missed(COIN, {"heads": 0.31, "tails": 0.69}, 1000) == 1.0
    assert missed(COIN, {"tails": 1.0}, 1000) < 1e-30


def test_impossible_outcomes_are_caught() -> None:
    assert not follows(Counter(heads=30, tails=65, edge=5), COIN)
    assert follows(Counter(heads=300, tails=700), COIN)


def test_rare_outcomes_share_a_cell() -> None:
    law = {0: 0.5} | dict.fromkeys(range(1, 501), 0.001)
    assert follows(Counter({0: 50, **dict.fromkeys(range(1, 51), 1)}), law)
    assert not follows(Counter({0: 5, **dict.fromkeys(range(1, 96), 1)}), law)
