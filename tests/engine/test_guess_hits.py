# SPDX-License-Identifier: Apache-2.0
"""Hit rates of precomputed drafts (lines): learnt by rank, at most 1, and forgotten over time."""

import random
from itertools import pairwise

import pytest

from vllm_hetero_spec.engine.ahead.late_drafts import GuessHits


def test_at_first_each_line_has_half_of_the_rest() -> None:
    assert GuessHits().chances(3) == [0.5, 0.75, 0.875, 0.9375]
    assert GuessHits().chances(0) == [0.5]


def test_chances_converge_to_the_hit_rates() -> None:
    true, chance, hits = [0.5, 0.2, 0.1, 0.05, 0.02], random.Random(1), GuessHits()
    for _ in range(2000):
        drawn, rank = chance.random(), 0
        while rank < len(true) and drawn >= true[rank]:
            drawn -= true[rank]
            rank += 1
        hits.observe(rank if rank < len(true) else None, len(true) - 1)
    found = hits.chances(len(true) - 1)
    assert found == sorted(found)
    for line in range(len(true)):
        assert found[line] == pytest.approx(sum(true[: line + 1]), abs=0.12)


def test_a_line_that_was_not_observed_is_no_likelier_than_the_line_before_it() -> None:
    hits = GuessHits()
    for number in range(100):
        hits.observe(1 if number % 10 == 0 else 0 if number % 10 < 6 else None, 1)
    found = hits.chances(4)
    second = found[1] - found[0]
    assert second < 0.2
    assert all(after - before <= second + 1e-9 for before, after in pairwise(found[1:]))


def test_the_chance_of_a_line_that_is_left_out_grows_over_time() -> None:
    hits = GuessHits()
    for _ in range(100):
        hits.observe(0, 4)
    never = hits.chances(4)[4] - hits.chances(3)[3]
    for number in range(300):
        hits.observe(0 if number % 2 else None, 0)
    assert hits.chances(4)[4] - hits.chances(3)[3] > 3 * never
    assert hits.chances(4)[-1] <= 1.0
