# SPDX-License-Identifier: Apache-2.0
"""What was drafted ahead, while the target verified: found by the text that the target then wrote.

A continuation is a list of drafter tokens behind a text. What the target adds to that text is the
outcome: bytes, which need not end where a drafter token does, or a character. The first
continuation that begins with the outcome is used, and what it has behind it is the next draft.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class MatchedContinuation(NamedTuple):
    """What a continuation has behind an outcome.

    Attributes:
        rank: Which continuation it is of.
        ids: Drafter tokens, with the one that the end of the outcome cuts; none where the
            continuation agrees as far as it goes, but does not reach further.
        known: Leading bytes of the first of them that the outcome has.
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
    """The first continuation that begins with the outcome and reaches further, as a target may.

    Args:
        continuations: Drafter tokens behind the text before, the most likely first.
        outcome: What the target has added to it.
        held: The first bytes of a character that the target has begun behind the outcome; the
            remainder begins with them.
        bytes_of: A drafter token's bytes, at least one.
        fits: Whether a target that has written the outcome may go on with a drafter token, of which
            the outcome has so many bytes: it would have joined some to what it ended with.

    Returns:
        None where no continuation agrees with the outcome, or only some that do not fit.
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
    """As `find_remainder`, where tokens were drawn: what is used has to have the law of its rows.

    So nothing of what is used may have had a part in its being used: an outcome ends where a token
    does, for the rest of a token has another law than the token; a line is told by what it has up
    to there, and the first is taken. Lines end by count. What was verified before, and is found
    again, is certain by now: its rows are the caller's to leave out.

    Args:
        lines: Of each, how many leading tokens have to be in the outcome, and its tokens.
        outcome: As above.
        bytes_of: As above.
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
    """Of tokens that begin with a text, those that reach past `end`, and how much of the first does
    not; None where they differ from it."""
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
