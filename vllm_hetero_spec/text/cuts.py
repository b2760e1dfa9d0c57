# SPDX-License-Identifier: Apache-2.0
"""Places at which the tail of a context may be cut: no token or normalization crosses them.

A place is an index into the tail, in characters. 0 means that there is none.
"""

from collections.abc import Sequence
from itertools import islice
from unicodedata import combining

from vllm_hetero_spec.text.tokenizer import TextTokenizer

TAIL_TOKENS = 4  # drafter tokens; a longer tail is cut if possible
# Text without spaces (Chinese, base64) is cut between two drafter tokens.
SPACELESS_TOKENS = 64  # drafter tokens; a longer tail is cut this way
SPACELESS_KEEP = 24  # drafter tokens that stay in the tail
TAIL_CHARACTERS = 1024  # a longer tail is cut even if no safe place is found
ANY_WORD = "x"  # stands for the word after the text
# Characters that a forced cut normalizes on each side of a place, and places that it tries.
FORCED_NEAR, FORCED_TRIES = 128, 64
_LINE_WITHIN = 32  # tokens in which `fresh_start` searches for the beginning of a line


def word_cut(drafter: TextTokenizer, tail: str) -> int:
    """Return the last space after a non-space, so far back that no later token merges across it."""
    at = tail.rfind(" ", 0, len(tail) - drafter.crossing_reach)
    while at > 0 and tail[at - 1].isspace():
        at = tail.rfind(" ", 0, at)
    return max(at, 0)


def spaceless_cut(drafter: TextTokenizer, tail: str, tail_ids: Sequence[int]) -> int:
    """Return the place before the last SPACELESS_KEEP tokens if ids and text agree there."""
    if len(tail_ids) <= SPACELESS_TOKENS:
        return 0
    for keep in range(SPACELESS_KEEP, SPACELESS_KEEP + 4):
        left = drafter.decode_bytes(tail_ids[:-keep]).decode("utf-8", "surrogateescape")
        if left != tail and tail.startswith(left):
            # Normalization may reorder later marks before this one, so do not cut in front of it.
            return 0 if combining(tail[len(left)]) else len(left)
    return 0


def forced_cut(drafter: TextTokenizer, tail: str) -> int:
    """Return the start of the last word, or the middle of the tail, moved to a safe place.

    A place is safe if both sides can be normalized separately. The right side includes ANY_WORD,
    because a tokenizer may remove all characters between two words and thereby join them. Only
    nearby characters and FORCED_TRIES places are examined, so that the time is bounded. If no place
    is safe, as in a tail of combining marks only, the tail is cut at the first choice.
    """
    first = word_cut(drafter, tail) or len(tail) // 2
    normalize = drafter.normalize
    places = (at for at in range(first, 0, -1) if not combining(tail[at]))
    for at in islice(places, FORCED_TRIES):
        left, right = tail[max(0, at - FORCED_NEAR) : at], tail[at : at + FORCED_NEAR] + ANY_WORD
        if normalize(left) + normalize(right) == normalize(left + right):
            return at
    return first


def fresh_start(drafter: TextTokenizer, ids: Sequence[int], first: int, last: int) -> int:
    """Return the index, from `first` to `last`, at which the kept part of a long text begins.

    It begins with a line if possible, otherwise with a word or at least with a whole character.
    """
    table, word = drafter.token_bytes, 0
    stop = min(first + _LINE_WITHIN, last)
    for at in range(max(first, 1), stop):
        before, piece = table[ids[at - 1]], table[ids[at]]
        if before.endswith(b"\n"):
            return at
        if not word and piece[:1] == b" ":
            word = at
    whole = (at for at in range(first, stop) if not 0x80 <= (table[ids[at]] or b" ")[0] < 0xC0)
    return word or next(whole, min(first, last))
