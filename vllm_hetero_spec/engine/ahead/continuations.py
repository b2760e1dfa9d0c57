# SPDX-License-Identifier: Apache-2.0
"""Search for a precomputed continuation that agrees with the target's output.

A continuation is a list of drafter tokens after a request's text. The bytes that the target adds to
that text are the outcome. It may end inside a drafter token or inside a character. The first
continuation that starts with the outcome is used; its remainder is the next draft.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class MatchedContinuation(NamedTuple):
    """The remainder of a continuation after an outcome.

    Attributes:
        rank: Index of the continuation.
        ids: Drafter tokens, from the first that extends past the outcome; empty if none does.
        known: Leading bytes of the first token that belong to the outcome.
    """

    rank: int
    ids: list[int]
    known: int = 0


def find_remainder(
    continuations: Iterable[Sequence[int]],
    outcome: bytes,
    held: bytes,
    bytes_of: Callable[[int], bytes],
    fits: Callable[[int, int], bool] = lambda token, known: True,
) -> MatchedContinuation | None:
    """Return the remainder of the first continuation that begins with the outcome and goes on.

    Args:
        continuations: Drafter tokens after the old text, the most likely continuation first.
        held: Bytes of a character that the target has begun after the outcome. The remainder begins
            with them.
        fits: Returns True if the target may continue with a drafter token, given how many bytes of
            it the outcome has. Some tokens would have merged with the end of the outcome.

    Returns:
        None if no continuation agrees with the outcome and fits. Without ids if those that agree do
        not extend past it.
    """
    found = None
    for rank, ids in enumerate(continuations):
        remainder = _behind(ids, outcome + held, len(outcome), bytes_of)
        if remainder is None or (remainder[0] and not fits(remainder[0][0], remainder[1])):
            continue
        found = MatchedContinuation(rank, *remainder)
        if found.ids:
            break
    return found


def find_drawn(
    lines: Iterable[tuple[int, Sequence[int]]], outcome: bytes, bytes_of: Callable[[int], bytes]
) -> MatchedContinuation | None:
    """Find a remainder like `find_remainder`, but among sampled continuations.

    Each token of the remainder must still have the distribution of its row, so the remainder must
    not influence the choice. The outcome has to end at a token boundary, because the rest of a
    token has another distribution than the token. Only the tokens before that boundary select a
    continuation, and the first match is taken. A continuation ends at a token count, or after an
    end-of-sequence token, which it contains. A token that was verified before and is found again is
    certain: the caller has to drop its row.

    Args:
        lines: For each continuation, how many leading tokens have to be in the outcome, and its
            tokens.
    """
    found = None
    for rank, (base, ids) in enumerate(lines):
        position = count = 0
        for data in map(bytes_of, ids):
            if position == len(outcome) or outcome[position : position + len(data)] != data:
                break
            position, count = position + len(data), count + 1
        if count < base or (position < len(outcome) and count < len(ids)):
            continue
        found = MatchedContinuation(rank, list(ids[count:]))
        if found.ids:
            break
    return found


def _behind(
    ids: Sequence[int], text: bytes, end: int, bytes_of: Callable[[int], bytes]
) -> tuple[list[int], int] | None:
    """Return the tokens that extend past `end` bytes, and the bytes of the first one before `end`.

    None if the tokens differ from the text.
    """
    pieces = [*map(bytes_of, ids)]
    spelled = b"".join(pieces)
    if not spelled.startswith(text):
        return ([], 0) if text.startswith(spelled) else None
    position = 0
    for index, data in enumerate(pieces):
        known, position = end - position, position + len(data)
        if position > end:
            return list(ids[index:]), known
    return [], 0
