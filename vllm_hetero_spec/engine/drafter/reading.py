# SPDX-License-Identifier: Apache-2.0
"""Texts that are too long to catch up by one graph are read by several, but for their ends.

A forward without a graph takes the host as long as a dozen with one, however few tokens it has.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_hetero_spec.engine.drafter.round_plan import Planner
from vllm_hetero_spec.engine.drafter.steps import Steps
from vllm_hetero_spec.engine.drafter.tasks import DraftRow
from vllm_hetero_spec.staging import Stopwatch

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
    rows: list[DraftRow], steps: Steps, planner: Planner, stopwatch: Stopwatch
) -> None:
    """Read `parts` of the rows of a round, and leave it the rest.

    Args:
        rows: Of the round; changed in place.
        steps: Runs the forwards.
        planner: Plans them.
        stopwatch: Times them.
    """
    if not steps.widths(len(rows)):
        return
    pending = [len(row.pending) for row in rows]
    contexts = [len(row.sequence.kv_ids) + len(row.pending) for row in rows]
    for width, texts in parts(pending, contexts, steps.widths):
        sequences = [rows[index].sequence for index in texts]
        ids = [rows[index].pending[:width] for index in texts]
        shape = steps.shape(len(texts), width, width)
        with stopwatch:
            steps.begin(planner.plan(sequences, ids, [1] * len(texts), *shape))
        for index, sequence, part in zip(texts, sequences, ids, strict=True):
            sequence.kv_ids.extend(part)
            rows[index] = rows[index]._replace(pending=rows[index].pending[width:])
