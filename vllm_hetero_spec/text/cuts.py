# SPDX-License-Identifier: Apache-2.0
"""Where the open tail of a context may be cut: no token and no normalisation looks across.

All places are indices into the tail; 0 stands for none.
"""

from collections.abc import Sequence
from unicodedata import combining

from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Drafter tokens a tail may have before the cut tries to move, and the length at which text without
# any space (Chinese, base64) is cut between two tokens, this many of which stay in the tail.
TAIL_TOKENS = 4
SPACELESS_TOKENS = 64
SPACELESS_KEEP = 24
# Characters after which the tail is cut whether or not the check succeeds.
TAIL_CHARACTERS = 1024
# Stands for whatever follows the text.
ANY_WORD = "x"
# A forced cut looks at so many characters on either side of a place, and tries so many places.
FORCED_NEAR, FORCED_TRIES = 128, 64
# Of a text that is given up, so many tokens more are for a line to begin with the first that stays.
_LINE_WITHIN = 32


def word_cut(drafter: TextTokenizer, tail: str) -> int:
    """The last space that follows a non-space and lies out of any token's reach."""
    at = tail.rfind(" ", 0, len(tail) - drafter.crossing_reach)
    while at > 0 and tail[at - 1].isspace():
        at = tail.rfind(" ", 0, at)
    return max(at, 0)


def spaceless_cut(drafter: TextTokenizer, tail: str, tail_ids: Sequence[int]) -> int:
    """Before the last SPACELESS_KEEP tokens, where ids and text agree there."""
    if len(tail_ids) <= SPACELESS_TOKENS:
        return 0
    for keep in range(SPACELESS_KEEP, SPACELESS_KEEP + 4):
        left = drafter.decode_bytes(tail_ids[:-keep]).decode("utf-8", "surrogateescape")
        if left != tail and tail.startswith(left):
            # Marks still to come may move before a mark: it stays with its character.
            return 0 if combining(tail[len(left)]) else len(left)
    return 0


def forced_cut(drafter: TextTokenizer, tail: str) -> int:
    """The last word, else the middle, or the next place before it that normalisation parts at.

    There may be none, in a run of combining marks as long as the tail: it is cut all the same. The
    word that follows matters too: a tokenizer may take all characters between two words away, and
    then they are one. Normalisation is asked for what is near alone, and not without end: a text
    may be long, and it may be of a kind that it parts nowhere.
    """
    first = word_cut(drafter, tail) or len(tail) // 2
    normalize, tries = drafter.normalize, 0
    for at in range(first, 0, -1):
        if combining(tail[at]):
            continue
        left, right = tail[max(0, at - FORCED_NEAR) : at], tail[at : at + FORCED_NEAR] + ANY_WORD
        if normalize(left) + normalize(right) == normalize(left + right):
            return at
        tries += 1
        if tries == FORCED_TRIES:
            break
    return first


def fresh_start(drafter: TextTokenizer, ids: Sequence[int], first: int, last: int) -> int:
    """Where what is kept of a longer text begins: a line, or else a word, or at least a character.

    Args:
        drafter: Its tokenizer.
        ids: The text.
        first: Index of the first id that it may begin with.
        last: Index of the last one.
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
