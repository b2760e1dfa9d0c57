# SPDX-License-Identifier: Apache-2.0
"""Simulated schedules of drafting and verification, by hand and against a tick simulation."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
from _draft_ahead_model import dsi_time, runs_of, serial_time


def test_schedules_by_hand() -> None:
    # Two draft tokens and a step give three tokens. One and a step give the other two.
    assert serial_time([4], 2, 4, 1) == (2 + 4) + (1 + 4)
    # The first verification starts at 0. Draft tokens 1-2 are sent at 2, tokens 3-4 at 4.
    assert dsi_time([4], 2, 2, 4, 1) == 4 + 4
    assert dsi_time([4], 2, 1, 4, 1) == 4 + 4 + 4
    # A drafter that is always wrong takes the time of the target alone, for each lookahead.
    assert dsi_time([0] * 5, 2, 2, 4, 1) == 5 * 4
    assert serial_time([0] * 5, 2, 4, 1) == 5 * 4 + (2 + 2 + 2 + 1)
    # Rejected at 6, during the drafter's second forward of 4 ticks: it starts again at 8.
    assert dsi_time([0, 0], 1, 2, 6, 4) == 6 + 6
    assert dsi_time([0, 1], 1, 2, 6, 4) == 6 + (8 - 6 + 4) + 6


@pytest.mark.parametrize(
    ("counts", "runs"),
    [
        ([2, 1, 3], [1, 0, 2]),
        ([5, 5, 1, 3], [10, 2]),  # a bonus token belongs to the run
        ([1, 5], [0, 4]),  # the text ends with a bonus token
        ([], []),
    ],
)
def test_runs_of_steps(counts: list[int], runs: list[int]) -> None:
    assert list(runs_of(counts, 4)) == runs
    assert sum(runs) + len(runs) == sum(counts)


def written_in_ticks(
    runs: Sequence[int], lookahead: int, servers: int, target: int, token: int
) -> tuple[int, list[int]]:
    """Simulate distributed speculative inference tick by tick; return its end and the text.

    The correct text is 0, 1, 2, ...; a wrong draft token is -1.
    """
    length = sum(runs) + len(runs)
    wrong = {sum(runs[: at + 1]) + at for at in range(len(runs))}  # positions
    text: list[int] = []
    now, drafts_from = 0, 0
    while len(text) < length:
        place = len(text)
        left = length - place - 1
        until = min(at for at in wrong if at >= place)
        says = [at if at < until else -1 for at in range(place, length)]
        begins, draft, sent, kept = drafts_from, list[int](), 0, list[int]()
        busy, answered = deque([(now + target, 0)]), False
        while True:
            done = (now - begins) // token if now > begins else 0
            draft = says[:done]
            while busy and busy[0][0] == now:
                _, size = busy.popleft()
                stretch, answered = draft[len(kept) : len(kept) + size], True
                right = [word for at, word in enumerate(stretch, len(kept)) if word == place + at]
                rejected = len(right) < size
                kept += right
                if rejected:
                    break
            if answered and (place + len(kept) == until or len(kept) == left):
                break
            while sent < left and len(busy) < servers:
                end = min(sent + lookahead, left)
                if len(draft) < end:
                    break
                busy.append((now + target, end - sent))
                sent = end
            now += 1
        text += [*kept, place + len(kept)]
        drafts_from = now + -(now - begins) % token if now > begins else begins
    return now, text


@pytest.mark.parametrize("seed", range(40))
def test_schedule_of_many_targets_tick_by_tick(seed: int) -> None:
    chance = random.Random(seed)
    lookahead = chance.randint(1, 4)
    target, token = chance.randint(2, 9), chance.randint(1, 4)
    runs = [chance.choice((0, 1, 2, 4, 9)) for _ in range(chance.randint(1, 5))]
    times = []
    for servers in (1, 2, 3, 8):
        took, text = written_in_ticks(runs, lookahead, servers, target, token)
        assert text == list(range(sum(runs) + len(runs)))
        assert took == dsi_time(runs, lookahead, servers, target, token)
        times.append(took)
    assert times == sorted(times, reverse=True)  # more servers are never slower
