# SPDX-License-Identifier: Apache-2.0
"""Simulated time of schedules of drafting and verification, in any unit.

A text is a list of runs. A run is the number of consecutive target tokens that the drafter
predicts correctly. After each run the target corrects one token.
"""

import heapq
import math
from collections.abc import Iterator, Sequence


def runs_of(counts: Sequence[int], lookahead: int) -> Iterator[int]:
    """Yield runs from a text's token counts per step, each with a draft of `lookahead` tokens.

    A bonus token counts as predicted, although that is unknown; `lookahead` should be large.
    """
    run = 0
    for place, count in enumerate(counts, start=1):
        bonus = count > lookahead
        run += count - (not bonus)
        if not bonus or place == len(counts):
            yield run - bonus
            run = 0


def serial_time(runs: Sequence[int], lookahead: int, target: float, token: float) -> float:
    """Time to generate a text if drafting and verification alternate.

    `target` is the time of a target's step, `token` that of drafting one target token.
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
    """Time to generate a text by distributed speculative inference (arXiv 2405.14105).

    The drafter never stops. A free server verifies each block of `lookahead` tokens, and one server
    immediately computes the token after each corrected one. The first wrong token invalidates all
    later tokens. The drafter then restarts when its current forward ends.
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
