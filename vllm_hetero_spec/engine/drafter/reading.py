# SPDX-License-Identifier: Apache-2.0
"""Prefill long contexts by several CUDA graph replays instead of one eager forward.

A forward without a graph takes the host as long as a dozen replays, independent of its number of
tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from vllm_hetero_spec.engine.drafter.requests import DraftSequence
from vllm_hetero_spec.engine.drafter.round_plan import Planner
from vllm_hetero_spec.engine.drafter.steps import Steps
from vllm_hetero_spec.engine.drafter.tasks import DraftRow

# forwards before the catch-up forward; more of them take as long as a single eager forward.
_MOST = 4


class Part(NamedTuple):
    """One forward that reads `width` tokens of each context, from the end of its KV."""

    width: int
    texts: Sequence[int]


def parts(
    pending: Sequence[int], contexts: Sequence[int], widths: Callable[[int], Sequence[int]]
) -> list[Part]:
    """Plan the forwards that precede the catch-up forward of a round.

    Args:
        pending: Number of tokens to read of each context, at least one.
        contexts: Length of each context in tokens.
        widths: Returns the graph widths for a number of contexts, ascending; empty without graphs.

    Returns:
        Parts in order. After them each context has at least one token left, and no more than the
            widest graph for all contexts. Empty if no parts are necessary, or if too many would be.
    """
    left, shortest = list(pending), min(contexts)
    last = max((width for width in widths(len(left)) if width <= shortest), default=0)
    found: list[Part] = []
    while last and (long := [index for index, count in enumerate(left) if count > last]):
        fewest = min(left[index] for index in long)
        width = max((width for width in widths(len(long)) if width < fewest), default=0)
        if not width or len(found) == _MOST:
            return []
        found.append(Part(width, long))
        for index in long:
            left[index] -= width
    return found


def read_in_parts(
    rows: list[DraftRow], steps: Steps, planner: Planner, stopwatch: AbstractContextManager[object]
) -> None:
    """Read `parts` of a round's rows. Their `pending` is replaced in place by the rest."""
    pending = [row.pending for row in rows]
    left = read_texts([row.sequence for row in rows], pending, steps, planner, stopwatch)
    if left is not pending:
        rows[:] = [row._replace(pending=ids) for row, ids in zip(rows, left, strict=True)]


def read_texts(
    sequences: Sequence[DraftSequence],
    pending: Sequence[Sequence[int]],
    steps: Steps,
    planner: Planner,
    stopwatch: AbstractContextManager[object],
) -> Sequence[Sequence[int]]:
    """Read `parts` of some contexts, which extends `kv_ids` of their sequences.

    Return the remaining ids of each context; `pending` itself if nothing was read.
    """
    if not steps.widths(len(pending)):
        return pending
    counts = [len(ids) for ids in pending]
    contexts = [len(of.kv_ids) + count for of, count in zip(sequences, counts, strict=True)]
    found, left = parts(counts, contexts, steps.widths), list(pending)
    for width, texts in found:
        some = [sequences[index] for index in texts]
        ids = [left[index][:width] for index in texts]
        shape = steps.shape(len(texts), width, width)
        with stopwatch:
            steps.begin(planner.plan(some, ids, [1] * len(texts), *shape))
        for index, sequence, part in zip(texts, some, ids, strict=True):
            sequence.kv_ids.extend(part)
            left[index] = left[index][width:]
    return left if found else pending
