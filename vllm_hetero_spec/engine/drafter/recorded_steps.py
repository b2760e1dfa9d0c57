# SPDX-License-Identifier: Apache-2.0
"""Rounds by graphs: recorded once for every size, replayed without Python.

Every tensor that a graph touches is made once and stays where it is. A round's plan is copied into
them, and each step finds its own line of it by a counter on the device: one recording per size
serves all steps. What no graph fits (prompts, batches beyond the largest) runs eagerly.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from vllm_hetero_spec.draft.sending import Send
from vllm_hetero_spec.engine.drafter.graphs import Graphs, Work
from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch, GraphSupport
from vllm_hetero_spec.engine.drafter.round_plan import NOWHERE, RoundPlan
from vllm_hetero_spec.engine.drafter.steps import EagerSteps, Shape, ragged_batch, real_ids
from vllm_hetero_spec.engine.drafter.token_choice import Picked, PickRules

# Tokens of each request in the graphs that catch up; what takes more is read eagerly.
_WIDTHS = (1, 4, 8)
# Tokens of one such graph, so that what attention kernels set aside for it stays small.
_MOST_TOKENS = 512


class _Recording(NamedTuple):
    """A graph of one size and width.

    Attributes:
        batch: Its forward, over the tensors that stay.
        replay: Runs it.
        keep: What it must not outlive.
    """

    batch: ForwardBatch
    replay: Work
    keep: object


class RecordedSteps:
    """Runs rounds by graphs.

    Args:
        model: The drafter.
        rules: What may be picked.
        send: Brings arrays to the device.
        picked: Where each row's best goes; stays where it is.
        graphs: Records.
        sizes: Numbers of requests to record for.
        support: What the drafter's attention can be recorded with.
    """

    def __init__(
        self,
        model: DrafterModel,
        rules: PickRules,
        send: Send,
        picked: Picked,
        graphs: Graphs,
        sizes: Iterable[int],
        support: GraphSupport,
    ) -> None:
        self._model, self._rules, self._send, self.picked = model, rules, send, picked
        self._eager = EagerSteps(model, rules, send, picked)
        self._in_graph = support.in_graph
        self._sizes = sorted(sizes)
        self._replays_round = False
        self._recordings: dict[tuple[int, int], _Recording] = {}
        widths = _WIDTHS if support.several_tokens else _WIDTHS[:1]
        largest = self._sizes[-1]
        shapes = [(s, w) for s in self._sizes for w in widths if w == 1 or s * w <= _MOST_TOKENS]
        with torch.inference_mode(mode=False):
            self._make_tensors(largest, max(s * w for s, w in shapes), len(picked.packet))
        with torch.inference_mode():
            for size, width in sorted(shapes, reverse=True):
                self._recordings[size, width] = self._record(graphs, size, width)
                if width == 1:  # the steps, as number 0
                    self._recordings[size, 0] = self._record(graphs, size, 0)

    def shape(self, count: int, pending: int, context: int) -> Shape:
        """See `Steps`."""
        size = next((size for size in self._sizes if size >= count), 0)
        fitting = (w for s, w in sorted(self._recordings) if s == size and pending <= w <= context)
        return Shape(size, next(fitting, 0))

    def begin(self, plan: RoundPlan) -> torch.Tensor:
        """See `Steps`."""
        size, count = len(plan.table), len(plan.feed.starts) - 1
        self._plan = plan
        self._replays_round = (size, 0) in self._recordings
        if not self._replays_round:
            return self._eager.begin(plan)
        feed, wide = plan.feed, len(plan.feed.ids)
        ids, positions, slots, starts, lengths, table, last, places = self._send(
            real_ids(feed.ids, self._rules),
            feed.positions,
            feed.slots,
            feed.starts,
            plan.lengths,
            plan.table,
            feed.last,
            plan.places,
        )
        self._table[:size, : table.shape[1]].copy_(table)
        self._plan_lengths[: plan.steps, :size].copy_(lengths)
        self._plan_places[: plan.steps, :, :size].copy_(places)
        width = plan.feed.max_query
        if plan.uniform:
            self._ids[:wide].copy_(ids)
            self._positions[:wide].copy_(positions)
            self._slots[:wide].copy_(slots)
            self._lengths[:size].copy_(lengths[0])
            self._replay(size, width, 0)
        else:
            sent = (ids, positions, slots, starts, lengths[0, :count], table[:count], last)
            batch = ragged_batch(sent, feed, plan.lengths[0, :count])
            logits = self._rules.only_real(self._model.forward(batch))
            self._logits[:count].copy_(logits)
            self.picked.best(logits, 0)
            self._step.fill_(1)
        return self._logits[:count]

    def step(self, number: int) -> torch.Tensor:
        """See `Steps`."""
        if not self._replays_round:
            return self._eager.step(number)
        count = self._plan.active[number]
        size = next(size for size in self._sizes if size >= count)
        self._replay(size, 0, number)
        return self._logits[:count]

    def again(self) -> None:
        """See `Steps`."""
        self._step.fill_(1)

    def _make_tensors(self, size: int, tokens: int, steps: int) -> None:
        """Made outside inference mode: what is made in it may not be written to elsewhere."""
        model, device = self._model, self._model.device

        def filled(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        width = -(-model.max_length // model.block_size)
        self._ids = filled(0, torch.int32, tokens)
        self._positions = filled(0, torch.int64, tokens)
        self._slots = filled(NOWHERE, torch.int64, tokens)
        self._lengths = filled(1, torch.int32, size)
        self._table = filled(0, torch.int32, size, width)
        self._plan_lengths = filled(1, torch.int32, steps, size)
        self._plan_places = filled(NOWHERE, torch.int64, steps, 2, size)
        self._step = filled(1, torch.int64, 1)
        self._now = Picked(1, size, device, confidences=self.picked.confidences)
        self._starts = {w: torch.arange(0, size * w + 1, w, dtype=torch.int32) for w in _WIDTHS}
        self._starts_there = {w: starts.to(device) for w, starts in self._starts.items()}
        self._longest = torch.full((size,), model.max_length, dtype=torch.int32)
        with torch.inference_mode():
            like = self._rules.only_real(model.forward(self._batch(size, 1)))
        self._logits = torch.zeros(like.shape, dtype=like.dtype, device=device)

    def _batch(self, size: int, width: int) -> ForwardBatch:
        tokens = size * width
        return ForwardBatch(
            ids=self._ids[:tokens],
            positions=self._positions[:tokens],
            slots=self._slots[:tokens],
            starts=self._starts_there[width][: size + 1],
            starts_cpu=self._starts[width][: size + 1],
            lengths=self._lengths[:size],
            lengths_cpu=self._longest[:size],
            table=self._table[:size],
            max_query=width,
            max_length=self._model.max_length,
        )

    def _record(self, graphs: Graphs, size: int, width: int) -> _Recording:
        """The graph that catches up with `width` tokens each, or that of a step where it is 0."""
        batch = self._batch(size, max(1, width))
        self._positions.zero_()
        self._lengths.fill_(1)
        self._slots.fill_(NOWHERE)
        self._step.fill_(1)
        # What is built here is referred to by the graph for as long as it lives.
        metadata = self._model.metadata(batch, to_capture=True)

        def work() -> None:
            if self._in_graph:
                if not width:
                    self._advance(size)
                self._model.update(metadata)
            logits = self._rules.only_real(self._model.logits(batch))
            self._logits[:size].copy_(logits)
            if width:
                self.picked.best(self._logits[:size], 0)
                self._step.fill_(1)
            else:
                self._now.best(self._logits[:size], 0)
                self._keep_picked()

        with self._model.context(metadata, batch):
            return _Recording(batch, graphs.capture(work), metadata)

    def _advance(self, size: int) -> None:
        """This step's line of the plan, and what the step before picked, as its input."""
        before = self.picked.packet.index_select(0, self._step - 1)
        places = self._plan_places.index_select(0, self._step)
        lengths = self._plan_lengths.index_select(0, self._step)
        self._ids[:size].copy_(before[0, 0, :size])
        self._positions[:size].copy_(places[0, 0, :size])
        self._slots[:size].copy_(places[0, 1, :size])
        self._lengths[:size].copy_(lengths[0, :size])

    def _keep_picked(self) -> None:
        width = self._now.packet.shape[2]
        self.picked.packet[:, :, :width].index_copy_(0, self._step, self._now.packet)
        self._step.add_(1)

    def _replay(self, size: int, width: int, number: int) -> None:
        recording = self._recordings[size, width]
        if self._in_graph:
            recording.replay()
            return
        # Metadata is made on the host, into tensors of the backend's that the graph reads.
        if not width:
            self._advance(size)
        lengths = self._plan.lengths[number, :size]
        batch = recording.batch._replace(
            lengths_cpu=torch.from_numpy(lengths), max_length=int(lengths.max())
        )
        with self._model.context(self._model.metadata(batch), batch):
            recording.replay()
