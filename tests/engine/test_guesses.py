# SPDX-License-Identifier: Apache-2.0
"""`choose_guesses`: no other choice of as many tokens has a higher hit rate."""

import math
import random
from itertools import combinations

from vllm_hetero_spec.engine.ahead.server_requests import Alternative, BranchPoint, choose_guesses


def hit_rate(
    rivals: list[Alternative], follows: list[float], chosen: set[tuple[int, int]]
) -> float:
    """Return the probability that the target leaves the chain at one of the chosen tokens."""
    reached, rate = 1.0, 0.0
    for place, rival in enumerate(rivals):
        shares = zip(rival.tokens, rival.shares, strict=True)
        rate += reached * sum(share for token, share in shares if (place, token) in chosen)
        reached *= follows[place]
    return rate


def test_no_other_guesses_are_hit_more_often() -> None:
    chance = random.Random(2)
    for _ in range(300):
        rivals, follows = [], []
        for _ in range(chance.randint(1, 3)):
            tokens = chance.sample(range(9), chance.randint(1, 3))
            weights = [chance.random() for _ in tokens]
            shares = sorted((weight / sum(weights) for weight in weights), reverse=True)
            rivals.append(Alternative(tokens[chance.randrange(len(tokens))], tokens, shares))
            follows.append(chance.random())
        budget = chance.randint(0, 4)
        guesses = choose_guesses(rivals, follows, budget)
        found = {(guess.place, guess.token) for guess in guesses}
        assert len(found) == len(guesses) <= budget
        assert not found & {(place, rival.chosen) for place, rival in enumerate(rivals)}
        every = [(p, t) for p, r in enumerate(rivals) for t in r.tokens if t != r.chosen]
        best = max(
            hit_rate(rivals, follows, set(some))
            for some in combinations(every, min(budget, len(every)))
        )
        assert math.isclose(hit_rate(rivals, follows, found), best, abs_tol=1e-9)
        assert math.isclose(sum(guess.probability for guess in guesses), best, abs_tol=1e-9)


def test_the_likeliest_comes_first_and_later_places_count_less() -> None:
    rivals = [Alternative(1, [1, 2, 3], [0.7, 0.2, 0.1]), Alternative(4, [4, 2], [0.5, 0.5])]
    guesses = choose_guesses(rivals, [0.7, 0.5], 9)
    assert [guess[:2] for guess in guesses] == [(1, 2), (0, 2), (0, 3)]
    assert math.isclose(guesses[0].probability, 0.35)
    assert choose_guesses(rivals, [0.0, 0.5], 1) == [BranchPoint(0, 2, 0.2)]
