# SPDX-License-Identifier: Apache-2.0
"""Run the forwards of a round on the device: catch-up, then steps, without waiting for results.

Long contexts are read by several CUDA graph replays instead of one eager forward. A forward without
a graph takes the host as long as a dozen replays, independent of its number of tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.drafter.requests import DraftSequence
from vllm_hetero_spec.engine.drafter.round_plan import BatchFeed, Planner, RoundPlan
from vllm_hetero_spec.engine.drafter.tasks import DraftRow
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig
from vllm_hetero_spec.staging import Send

# forwards before the catch-up forward; more of them take as long as a single eager forward.
_MOST_PARTS = 4


class Shape(NamedTuple):
    """Number of rows and catch-up width of a planned round, as in `Planner.plan`."""

    size: int = 0
    width: int = 0


class CaughtUp(NamedTuple):
    """Logits after the catch-up forward of n requests, restricted to tokens that may be picked.

    Attributes:
        logits: [n, V_D], for the next tokens.
        last: [n, V_D], at the position of the last tokens; None if the feed is not `back`.
    """

    logits: torch.Tensor
    last: torch.Tensor | None


def ragged_batch(
    sent: Sequence[torch.Tensor], feed: BatchFeed, lengths: np.ndarray
) -> ForwardBatch:
    """Build a forward from sent tensors: `BatchFeed.arrays`, lengths, table, `BatchFeed.rows`."""
    ids, positions, slots, starts, device_lengths, table, rows = sent
    return ForwardBatch(
        ids=ids,
        positions=positions,
        slots=slots,
        starts=starts,
        starts_cpu=torch.from_numpy(feed.starts),
        lengths=device_lengths,
        lengths_cpu=torch.from_numpy(lengths),
        table=table,
        max_query=feed.most,
        max_length=int(lengths.max()),
        rows=rows if feed.most > 1 or feed.back else None,
        back=feed.back,
    )


class Steps:
    """Runs a round's forwards, and writes each row's likeliest token to `picked`.

    This base class runs rounds of any shape, without graphs.

    Attributes:
        places: Number of tokens that one forward predicts. If there are several, `begin` computes
            all steps of a round (`parallel.py`).
        forks: `RoundPlan.forks` on the device.
    """

    places = 1
    # The present round, and its arrays on the device.
    _plan: RoundPlan
    _lengths: torch.Tensor
    _places: torch.Tensor
    _table: torch.Tensor

    def __init__(
        self, model: DrafterModel, rules: PickConfig, send: Send, picked: PickBuffers
    ) -> None:
        self._model, self._rules, self._send, self.picked = model, rules, send, picked
        self._replays = 0
        self.forks = torch.zeros((3, 0), dtype=torch.int64, device=model.device)
        # `ForwardBatch.starts` of one token per request.
        self._starts_cpu = torch.arange(picked.packet.shape[2] + 1, dtype=torch.int32)
        self._starts = self._starts_cpu.to(model.device)

    @property
    def replays(self) -> int:
        """Number of forwards that replayed a graph."""
        return self._replays

    def shape(self, count: int, pending: int, context: int) -> Shape:
        """Return the shape to plan a round of `count` requests with.

        `pending` is the largest number of pending tokens of a request. `context` is the smallest
        sequence length after catch-up.
        """
        return Shape()

    def widths(self, count: int) -> Sequence[int]:
        """Return the graph widths for this many requests, ascending; empty without graphs."""
        return ()

    def last_widths(self, count: int) -> Sequence[int]:
        """Return those of catch-up forwards of rounds that draft."""
        return self.widths(count)

    def part_shape(self, count: int, width: int) -> Shape:
        """Return the shape of a forward that only reads `width` tokens of each request."""
        return self.shape(count, width, width)

    def begin(self, plan: RoundPlan) -> CaughtUp:
        """Run the catch-up forward."""
        feed, count, self._plan = plan.feed, plan.count, plan
        *tokens, rows, self._lengths, self._table, self._places, self.forks = self._send(
            *feed.arrays, feed.rows, plan.lengths, plan.table, plan.places, plan.forks
        )
        sent = (*tokens, self._lengths[0, :count], self._table[:count], rows)
        logits = self._model.forward(ragged_batch(sent, feed, plan.lengths[0, :count]))
        logits = self._rules.only_real(logits)
        self.picked.best(logits[:count], 0)
        return CaughtUp(logits[:count], logits[count:] if feed.back else None)

    def step(self, number: int) -> torch.Tensor:
        """Feed the tokens that step `number` - 1 picked; return logits of the active rows."""
        count, lengths = self._plan.active[number], self._plan.lengths[number]
        batch = ForwardBatch(
            ids=self.picked.ids(number - 1, count),
            positions=self._places[number, 0, :count],
            slots=self._places[number, 1, :count],
            starts=self._starts[: count + 1],
            starts_cpu=self._starts_cpu[: count + 1],
            lengths=self._lengths[number, :count],
            lengths_cpu=torch.from_numpy(lengths[:count]),
            table=self._table[:count],
            max_query=1,
            max_length=int(lengths.max()),
        )
        logits = self._rules.only_real(self._model.forward(batch))
        self.picked.best(logits, number)
        return logits

    def moved(self) -> None:
        """Send the plan again, after its later steps have changed."""
        self._lengths, self._places = self._send(self._plan.lengths, self._plan.places)

    def again(self) -> None:
        """Restart the steps after the tokens that step 0 now has."""


def parts(
    pending: Sequence[int],
    contexts: Sequence[int],
    widths: Callable[[int], Sequence[int]],
    last_widths: Callable[[int], Sequence[int]],
) -> list[tuple[int, list[int]]]:
    """Plan the forwards that precede the catch-up forward of a round.

    Args:
        pending: Number of tokens to read of each context, at least one.
        contexts: Length of each context in tokens.
        widths: Returns the graph widths for a number of contexts, ascending; empty without graphs.
        last_widths: The same for the forward that follows.

    Returns:
        For each forward, the tokens to read of each context behind its KV, and the indices of the
            contexts. After them each context has at least one token left, and no more than the
            widest graph for all contexts. Empty if no parts are necessary, or if too many would be.
    """
    left, shortest = list(pending), min(contexts)
    last = max((width for width in last_widths(len(left)) if width <= shortest), default=0)
    found: list[tuple[int, list[int]]] = []
    while last and (long := [index for index, count in enumerate(left) if count > last]):
        fewest = min(left[index] for index in long)
        width = max((width for width in widths(len(long)) if width < fewest), default=0)
        if not width or len(found) == _MOST_PARTS:
            return []
        found.append((width, long))
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
    found, left = parts(counts, contexts, steps.widths, steps.last_widths), list(pending)
    for width, texts in found:
        some = [sequences[index] for index in texts]
        ids = [left[index][:width] for index in texts]
        shape = steps.part_shape(len(texts), width)
        with stopwatch:
            steps.begin(planner.plan(some, ids, [1] * len(texts), *shape))
        for index, sequence, part in zip(texts, some, ids, strict=True):
            sequence.kv_ids.extend(part)
            left[index] = left[index][width:]
    return left if found else pending
