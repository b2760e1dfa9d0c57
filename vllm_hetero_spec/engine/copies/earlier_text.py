# SPDX-License-Identifier: Apache-2.0
"""A request's earlier text as a prediction of its next tokens.

If the last tokens stand earlier in the text, the text may go on as it did there. The place is found
in a dictionary and then followed token by token, so a new token takes constant time.
"""

from collections.abc import Sequence

import numpy as np

MATCH = 4  # tokens that have to agree to find a place; behind 3 tokens, half of all places mislead
_LONGEST = 32  # tokens; of so long a match, nearly all predictions are right
# Last tokens of a prompt that are searched. They take 4 ms of the host, and 2 MB.
SEARCHED = 1 << 14
_MOST_PLACES = 2 * SEARCHED  # of prompt and output; the oldest are forgotten
# Rates before any test, by the bits of the match's length (0, 1, 2-3, 4-7, 8-15, 16-31, 32): about
# those of code, news and chat. Below `MATCH`, one token differed and the place was kept.
_PRIOR_RATES = 0.2, 0.6, 0.8, 0.65, 0.9, 0.95, 0.98
_PRIOR_TESTS = 4.0  # that the prior counts for; few, because every emitted token is a test
_KEEP = 0.99  # weight of a test relative to the next one: texts change within some hundred tokens


class CopyRates:
    """Share of predicted tokens that were emitted, by length of the match.

    Greedy and sampled requests are separate kinds.
    """

    def __init__(self) -> None:
        prior = [[_PRIOR_TESTS, _PRIOR_TESTS * rate] for rate in _PRIOR_RATES]
        self._counts = [[*map(list, prior)] for _ in (False, True)]  # tests, hits

    def observe(self, length: int, random: bool, hit: bool) -> None:
        """Learn from one predicted token behind a match of `length` tokens."""
        counts = self._counts[random][_bits(length)]
        counts[0] = _KEEP * counts[0] + 1.0
        counts[1] = _KEEP * counts[1] + hit

    def survival(self, length: int, random: bool, count: int) -> list[float]:
        """Return P[the first 1, 2, ..., `count` predicted tokens are all emitted]."""
        alive, survival = 1.0, []
        for longer in range(length, length + count):
            tests, hits = self._counts[random][_bits(longer)]
            alive *= hits / tests
            survival.append(alive)
        return survival


class EarlierText:
    """The last tokens of one request, prompt included.

    Args:
        prompt: int [n], target ids.

    Attributes:
        matched: Tokens before the end that agree with those before the predicted place.
        predicts: True if there is such a place.
    """

    def __init__(self, prompt: np.ndarray) -> None:
        self._dropped = max(0, len(prompt) - SEARCHED)
        self._ids: list[int] = prompt[self._dropped :].tolist()
        ends = range(MATCH, len(self._ids))
        parts = [self._ids[first:-1] for first in range(MATCH)]
        # Places by the hash of the tokens before them. A collision mispredicts, no more.
        self._after = dict(zip(map(hash, zip(*parts, strict=False)), ends, strict=False))
        self._place = self.matched = 0  # place of the next predicted token; 0 without any
        self._find()

    def __len__(self) -> int:
        """Number of tokens of the whole text."""
        return self._dropped + len(self._ids)

    @property
    def last(self) -> int:
        """Last target id; -1 without any."""
        return self._ids[-1] if self._ids else -1

    @property
    def predicts(self) -> bool:
        return self._place > 0

    def append(self, tokens: Sequence[int], rates: CopyRates, random: bool) -> int:
        """Append emitted tokens, and let them test the rates. Return how many were predicted."""
        hits = 0
        for token in tokens:
            if self._place:
                hit = self._ids[self._place] == token
                rates.observe(self.matched, random, hit)
                hits += hit
                lost = not hit and self.matched < MATCH
                self._place = 0 if lost else self._place + 1
                self.matched = self.matched + 1 if hit else 0
            self._ids.append(token)
            self._find()
        return hits

    def predicted(self, count: int) -> list[int]:
        """Return the next `count` tokens if the text goes on as before.

        A text that repeats its last part goes on repeating it.
        """
        period = len(self._ids) - self._place
        return [self._ids[self._place + n % period] for n in range(count)]

    def _find(self) -> None:
        """Look the last tokens up, unless a place is followed already, and store them."""
        ids = self._ids
        if len(ids) < MATCH:
            return
        key = hash(tuple(ids[-MATCH:]))
        place = self._after.get(key, 0)
        if place and self.matched < MATCH:
            self._place = place
            before = range(1, min(_LONGEST, place) + 1)
            agree = (n - 1 for n in before if ids[place - n] != ids[-n])
            self.matched = next(agree, before[-1])
        self._after[key] = len(ids)
        if len(self._after) > _MOST_PLACES:
            del self._after[next(iter(self._after))]


def _bits(length: int) -> int:
    return min(length.bit_length(), len(_PRIOR_RATES) - 1)
