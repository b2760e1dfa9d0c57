# SPDX-License-Identifier: Apache-2.0
"""What drafting while the target verifies should give: formulas, and schedules in ticks.

Times may have any unit. A target token is drafted by some forwards of the drafter: by more than one
where its tokens are shorter.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple


def drafted_share(behind: float, anew: float, waited: float = 0.0) -> float:
    """The share of steps that verify a draft, where drafts are made ahead.

    Args:
        behind: Share of look-ups that find a draft, after steps that verified one.
        anew: The same after steps that did not.
        waited: Share of the others that are waited for.
    """
    after_draft = behind + (1 - behind) * waited
    after_none = anew + (1 - anew) * waited
    return after_none / (after_none + 1 - after_draft) if after_none else 0.0


def serial_speed(tokens: float, draft: float, target: float) -> float:
    """Tokens per unit of time where drafting and verification take turns.

    Args:
        tokens: Of a step that verifies a draft.
        draft: Time that making one takes.
        target: Time of a step.
    """
    return tokens / (target + draft)


def ahead_speed(
    tokens: float,
    draft: float,
    target: float,
    forward: float,
    behind: float,
    anew: float,
    waited: float = 0.0,
) -> float:
    """The same where drafts are made ahead; one that is waited for begins behind half a forward.

    Args:
        tokens, draft, target: See `serial_speed`.
        forward: Time of the drafter's.
        behind, anew, waited: See `drafted_share`.
    """
    share = drafted_share(behind, anew, waited)
    waits = waited * (share * (1 - behind) + (1 - share) * (1 - anew))
    return (share * tokens + 1 - share) / (target + waits * (draft + forward / 2))


class Step(NamedTuple):
    """What was counted when a step of the target began.

    Attributes:
        drafted: Rows of drafts that it verifies.
        hits: Look-ups so far that found a draft.
        waited: Drafts so far that were waited for.
        missed: Look-ups so far that came to nothing.
    """

    drafted: int
    hits: int = 0
    waited: int = 0
    missed: int = 0


class Chain(NamedTuple):
    """What a drafter says behind a place of the text that a target is going to write.

    Attributes:
        right: Leading target tokens of it that the target writes too.
        forwards: Of the drafter, until it has 1, 2, ... target tokens.
    """

    right: int
    forwards: Sequence[int]

    def ready(self, tokens: int) -> int:
        """Forwards until so many tokens are there; beyond what is known, at the same pace."""
        known = len(self.forwards)
        if not tokens or not known:
            return tokens
        if tokens <= known:
            return self.forwards[tokens - 1]
        return math.ceil(self.forwards[-1] * tokens / known)


def far_chain(chains: Sequence[Chain], place: int) -> int:
    """Target tokens behind a place that are right, where a chain is followed by the next one."""
    right = 0
    while place + right < len(chains):
        chain = chains[place + right]
        right += chain.right
        if chain.right < len(chain.forwards) or not chain.right:
            break
    return min(right, len(chains) - place)


def serial_time(chains: Sequence[Chain], lookahead: int, target: float, forward: float) -> float:
    """Time in which a text is written by turns.

    Args:
        chains: Behind each place of it.
        lookahead: Target tokens of a draft.
        target: Time of a step.
        forward: Time of the drafter's.
    """
    place, time = 0, 0.0
    while place < len(chains):
        wanted = min(lookahead, len(chains) - place - 1)
        time += chains[place].ready(wanted) * forward + target
        place += min(far_chain(chains, place), wanted) + 1
    return time


def dsi_time(
    chains: Sequence[Chain], lookahead: int, servers: int, target: float, forward: float
) -> float:
    """Time in which a text is written by distributed speculative inference.

    The drafter never stops. Each `lookahead` tokens of it are verified by a server as soon as one
    is free, and behind every new text one is asked at once, with no token of the drafter's. The
    first token that is wrong voids all that is drafted and verified behind it; the drafter begins
    anew when the forward that is on its way has ended.

    Args:
        chains, lookahead, target, forward: See `serial_time`.
        servers: Targets.
    """
    place, time, late = 0, 0.0, 0.0
    while place < len(chains):
        left = len(chains) - place - 1
        right = min(far_chain(chains, place), left)
        free, took = [0.0] * servers, 0.0
        for block in range(math.ceil(right / lookahead) + 1):
            ready = chains[place].ready(min(block * lookahead, left))
            begins = max(late * (block > 0) + ready * forward, heapq.heappop(free))
            took = begins + target
            heapq.heappush(free, took)
        place, time = place + right + 1, time + took
        late = -(took - late) % forward if forward else 0.0
    return time
