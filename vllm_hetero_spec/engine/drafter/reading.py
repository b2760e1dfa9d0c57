# SPDX-License-Identifier: Apache-2.0
"""Texts that are too long to catch up by one graph are read by several, but for their ends.

A forward without a graph takes the host as long as a dozen with one, however few tokens it has.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from vllm_hetero_spec.engine.drafter.requests import DraftSequence
from vllm_hetero_spec.engine.drafter.round_plan import Planner
from vllm_hetero_spec.engine.drafter.steps import Steps
from vllm_hetero_spec.engine.drafter.tasks import DraftRow

# Forwards beyond what catches up in any case: more take as long as a single one without a graph.
_MOST = 4


class Part(NamedTuple):
    """One forward of a few texts.

    Attributes:
        width: Tokens of each that are read, from where its KV ends.
        texts: Which ones, ascending.
    """

    width: int
    texts: Sequence[int]


def parts(
    pending: Sequence[int], contexts: Sequence[int], widths: Callable[[int], Sequence[int]]
) -> list[Part]:
    """What to read before a round catches all of its texts up.

    Args:
        pending: Tokens of each text that are to be read, at least one.
        contexts: Tokens of each text in all.
        widths: Of the graphs for so many texts, rising; none where there are none.

    Returns:
        Parts in turn, behind which each text has at least one token left to read, and no more than
        a graph for all of them takes; none where nothing has to be read before, or it is too much.
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
    """Read `parts` of the rows of a round, and leave it the rest.

    Args:
        rows: Of the round; changed in place.
        steps: Runs the forwards.
        planner: Plans them.
        stopwatch: Times them.
    """
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
    """Read `parts` of some texts; what is left of each, `pending` itself where nothing was read.

    Args:
        sequences: Of the texts.
        pending: Drafter ids of each that are to be read.
        steps: Runs the forwards.
        planner: Plans them.
        stopwatch: Times them.
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
