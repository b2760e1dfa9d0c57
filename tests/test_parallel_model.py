# SPDX-License-Identifier: Apache-2.0
"""What drafting ahead should give: formulas and schedules beside simulations, step by step."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
from _parallel_model import (
    Chain,
    ahead_speed,
    drafted_share,
    dsi_time,
    far_chain,
    serial_speed,
    serial_time,
)


def test_formulas_by_hand() -> None:
    assert serial_speed(3.0, 20.0, 40.0) == 0.05
    # Five of six steps verify a draft: each that does not is followed by one that does.
    assert drafted_share(0.8, 1.0) == pytest.approx(5 / 6)
    assert ahead_speed(3.0, 20.0, 40.0, 5.0, 0.8, 1.0) == pytest.approx((2.5 + 1 / 6) / 40)
    # All are waited for: one in five steps takes a draft and half a forward longer.
    assert drafted_share(0.8, 1.0, 1.0) == 1.0
    assert ahead_speed(3.0, 20.0, 40.0, 5.0, 0.8, 1.0, 1.0) == pytest.approx(3 / 44.5)
    assert ahead_speed(3.0, 20.0, 40.0, 5.0, 0.0, 0.0) == 1 / 40


@pytest.mark.parametrize("waited", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("behind", "anew"), [(0.8, 0.95), (0.5, 0.6), (0.1, 0.9)])
def test_formula_of_drafts_ahead_against_steps(behind: float, anew: float, waited: float) -> None:
    draft, target, forward, tokens = 20.0, 40.0, 5.0, 2.5
    chance, drafted = random.Random(1), False
    time = written = steps = verified = 0.0
    for _ in range(60_000):
        steps, verified = steps + 1, verified + drafted
        time, written = time + target, written + (tokens if drafted else 1)
        hit = chance.random() < (behind if drafted else anew)
        waits = not hit and chance.random() < waited
        time += (draft + chance.random() * forward) * waits
        drafted = hit or waits
    assert drafted_share(behind, anew, waited) == pytest.approx(verified / steps, abs=0.01)
    speed = ahead_speed(tokens, draft, target, forward, behind, anew, waited)
    assert speed == pytest.approx(written / time, rel=0.01)


def perfect(length: int) -> list[Chain]:
    return [Chain(length - place, range(1, length - place + 1)) for place in range(length)]


def test_schedules_by_hand() -> None:
    # Two tokens and a step, then one and a step: three and two tokens are written.
    assert serial_time(perfect(5), 2, 4, 1) == (2 + 4) + (1 + 4)
    # One answer at once; the drafter's tokens 1-2 are sent at 2, tokens 3-4 at 4.
    assert dsi_time(perfect(5), 2, 2, 4, 1) == 4 + 4
    assert dsi_time(perfect(5), 2, 1, 4, 1) == 4 + 4 + 4
    # One that is always wrong: the target alone, whatever the lookahead.
    wrong = [Chain(0, range(1, 9))] * 5
    assert dsi_time(wrong, 2, 2, 4, 1) == 5 * 4
    assert serial_time(wrong, 2, 4, 1) == 5 * 4 + (2 + 2 + 2 + 1)
    # Rejected at 6, while the drafter's second forward of 4 is on its way: it begins anew at 8.
    chains = [Chain(0, (1, 2)), Chain(1, (1,))]
    assert dsi_time(chains, 1, 2, 6, 4) == 6 + 6
    assert dsi_time([*chains, Chain(0, ())], 1, 2, 6, 4) == 6 + (8 - 6 + 4) + 6


def test_chains_go_on_where_they_were_cut() -> None:
    chains = [Chain(2, (1, 2)), Chain(9, ()), Chain(1, (1, 2, 3)), Chain(0, (1,)), Chain(0, (1,))]
    assert [far_chain(chains, place) for place in (0, 2, 3)] == [3, 1, 0]
    assert far_chain(perfect(6), 2) == 4
    assert Chain(0, (2, 3, 6)).ready(2) == 3
    assert Chain(0, (2, 3, 6)).ready(4) == 8  # two forwards each
    assert Chain(0, ()).ready(4) == 4


def written_in_ticks(
    chains: Sequence[Chain], lookahead: int, servers: int, target: int, forward: int
) -> tuple[int, list[int]]:
    """Distributed speculative inference tick by tick: when it ends, and what it writes.

    The continuation is 0, 1, 2, ...; a drafter that is wrong says -1.
    """
    text: list[int] = []
    now, drafts_from = 0, 0
    while len(text) < len(chains):
        place = len(text)
        chain, left = chains[place], len(chains) - place - 1
        says = [place + at if at < chain.right else -1 for at in range(len(chain.forwards))]
        begins, draft, sent, kept = drafts_from, list[int](), 0, list[int]()
        busy, answered = deque([(now + target, 0)]), False
        while True:
            done = (now - begins) // forward if now > begins else 0
            draft = [token for token, at in zip(says, chain.forwards, strict=True) if at <= done]
            while busy and busy[0][0] == now:
                _, length = busy.popleft()
                stretch, answered = draft[len(kept) : len(kept) + length], True
                right = [
                    token for at, token in enumerate(stretch, len(kept)) if token == place + at
                ]
                rejected = len(right) < length
                kept += right
                if rejected:
                    break
            next_wrong = len(kept) == chain.right
            if answered and (next_wrong or len(kept) == left):
                break
            while sent < left and len(busy) < servers:
                end = min(sent + lookahead, left)
                if len(draft) < end:
                    break
                busy.append((now + target, end - sent))
                sent = end
            now += 1
        text += [*kept, place + len(kept)]
        drafts_from = now + -(now - begins) % forward if now > begins else begins
    return now, text


@pytest.mark.parametrize("seed", range(40))
def test_schedule_of_many_targets_tick_by_tick(seed: int) -> None:
    chance = random.Random(seed)
    length, lookahead = chance.randint(1, 14), chance.randint(1, 4)
    target, forward = chance.randint(2, 9), chance.randint(1, 4)
    chains = []
    for place in range(length):
        left = length - place
        forwards, at = [], 0
        for _ in range(left):
            at += chance.choice((1, 1, 2))
            forwards.append(at)
        chains.append(Chain(min(left, chance.choice((0, 1, 2, 4, 14))), forwards))
    times = []
    for servers in (1, 2, 3, 8):
        took, text = written_in_ticks(chains, lookahead, servers, target, forward)
        assert text == list(range(length))
        assert took == dsi_time(chains, lookahead, servers, target, forward)
        times.append(took)
    assert times == sorted(times, reverse=True)  # more are never slower
