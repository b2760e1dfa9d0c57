# SPDX-License-Identifier: Apache-2.0
"""Schedules of drafting and verification, in computed time of any unit.

A text is a list of runs: numbers of target tokens that the drafter gets right one after the other.
Behind each run the target corrects one token.
"""

import heapq
import math
from collections.abc import Iterator, Sequence


def runs_of(counts: Sequence[int], lookahead: int) -> Iterator[int]:
    """Runs of a text from the token counts of its steps, each with a draft of `lookahead` tokens.

    A bonus token counts as right, although that is unknown: the lookahead should be long.
    """
    run = 0
    for place, count in enumerate(counts, start=1):
        bonus = count > lookahead
        run += count - (not bonus)
        if not bonus or place == len(counts):
            yield run - bonus
            run = 0


def serial_time(runs: Sequence[int], lookahead: int, target: float, token: float) -> float:
    """Time in which a text is written if drafting and verification take turns.

    Args:
        runs: Of the text.
        lookahead: Target tokens of a draft.
        target: Time of a step.
        token: Time to draft a target token.
    """
    left, time = sum(runs) + len(runs), 0.0
    for run in runs:
        end = left - run - 1
        while left > end:
            wanted = min(lookahead, left - 1)
            time += wanted * token + target
            left -= min(left - end - 1, wanted) + 1
    return time


def dsi_time(
    runs: Sequence[int], lookahead: int, servers: int, target: float, token: float
) -> float:
    """Time in which a text is written by distributed speculative inference (arXiv 2405.14105).

    The drafter never stops. A server verifies each `lookahead` tokens as soon as one is free, and
    at once one computes the token behind every new text. The first wrong token voids all that is
    drafted and verified behind it. The drafter begins anew when its running forward has ended. See
    `serial_time` for the other arguments.
    """
    left, time, late = sum(runs) + len(runs) - 1, 0.0, 0.0
    for run in runs:
        free, took = [0.0] * servers, 0.0
        for block in range(math.ceil(run / lookahead) + 1):
            ready = late * (block > 0) + min(block * lookahead, left) * token
            took = max(ready, heapq.heappop(free)) + target
            heapq.heappush(free, took)
        left, time = left - run - 1, time + took
        late = -(took - late) % token if token else 0.0
    return time
