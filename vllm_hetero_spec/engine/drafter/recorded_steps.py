# SPDX-License-Identifier: Apache-2.0
"""Run rounds by CUDA graphs, recorded once per shape and replayed without Python.

All tensors that a graph uses are allocated once and keep their address. A round's plan is copied
into them. Each step selects its row of the plan by a counter on the device, so that one recording
per size serves all steps. Prompts and batches that fit no graph run eagerly. If drafts may be
trees, each shape is recorded twice, because chains do not need top candidates.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch, GraphSupport
from vllm_hetero_spec.engine.drafter.round_plan import NOWHERE, RoundPlan, table_width
from vllm_hetero_spec.engine.drafter.steps import (
    CaughtUp,
    EagerSteps,
    Shape,
    ragged_batch,
    real_tokens,
)
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig
from vllm_hetero_spec.staging import Mirror, Send

Work = Callable[[], None]


class Graphs(Protocol):
    """Records device work. Recorded work reads and writes tensors that keep their address.

    A replay does not repeat what Python computed during the recording. Tests implement it on a CPU.
    """

    def capture(self, work: Work) -> Work:
        """Record the operations of `work`; return a function that replays them and keeps `work`."""


class GraphPlan(NamedTuple):
    """Shapes to record, as (requests, tokens per request), and the recorder of their graphs."""

    graphs: Graphs
    shapes: Sequence[tuple[int, int]]
    support: GraphSupport


class StaticTensors:
    """The static tensors of rounds of up to B requests.

    `ids`, `positions`, `slots` and `lengths` are as in `ForwardBatch`; `plan_lengths`,
    `plan_places`, `table` and `forks` as in `RoundPlan`.

    Attributes:
        fed: int64 [3, tokens], `BatchFeed.tokens` of the catch-up forward.
        step: int64 [1], number of the next step.
        logits: [B, V_D], logits after the last token of each request.
        last: [B, V_D], logits at the position of that token, if rounds have `back`.
        now: Picked tokens of one step, before they are copied to their row of `picked`.
    """

    def __init__(
        self,
        model: DrafterModel,
        rules: PickConfig,
        picked: PickBuffers,
        size: int,
        tokens: int,
        widths: Collection[int],
    ) -> None:
        device, steps = model.device, len(picked.packet)
        self._max_length = model.max_length
        # Inference tensors cannot be written outside of inference mode.
        with torch.inference_mode(mode=False):

            def filled(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
                return torch.full(shape, value, dtype=dtype, device=device)

            self.ids = filled(0, torch.int32, tokens)
            self.positions = filled(0, torch.int64, tokens)
            self.slots = filled(NOWHERE, torch.int64, tokens)
            self.lengths = filled(1, torch.int32, size)
            blocks = table_width(-(-model.max_length // model.block_size), model.block_size)
            self._mirror = Mirror(
                device,
                [
                    ((3, tokens), np.int64),
                    ((3, size), np.int64),
                    ((steps, 2, size), np.int64),
                    ((steps, size), np.int32),
                    ((size, blocks), np.int32),
                ],
            )
            there = self._mirror.there
            self.fed, self.forks, self.plan_places, self.plan_lengths, self.table = there
            self.step = filled(1, torch.int64, 1)
            self.now = PickBuffers(
                1, size, device, confidences=picked.confidences, beside=picked.beside
            )
            self._picked = picked
            self._starts_cpu = {
                width: torch.arange(0, size * width + 1, width, dtype=torch.int32)
                for width in widths
            }
            self._starts = {width: of.to(device) for width, of in self._starts_cpu.items()}
            self._longest = torch.full((size,), model.max_length, dtype=torch.int32)
            with torch.inference_mode():
                like = rules.only_real(model.forward(self.batch(size, 1)))
            self.logits = torch.zeros(like.shape, dtype=like.dtype, device=device)
            self.last = torch.zeros_like(self.logits) if rules.back else self.logits[:0]

    def batch(self, size: int, width: int, *, back: bool = False) -> ForwardBatch:
        """Return a forward of the first `size` requests; `back` as in `BatchFeed`."""
        tokens = size * width
        return ForwardBatch(
            ids=self.ids[:tokens],
            positions=self.positions[:tokens],
            slots=self.slots[:tokens],
            starts=self._starts[width][: size + 1],
            starts_cpu=self._starts_cpu[width][: size + 1],
            lengths=self.lengths[:size],
            lengths_cpu=self._longest[:size],
            table=self.table[:size],
            max_query=width,
            max_length=self._max_length,
            back=back,
        )

    def clear(self) -> None:
        """Set valid positions and lengths that write no KV. Graphs are recorded over them."""
        places = self.plan_places.unbind(1)
        for positions, slots in ((self.positions, self.slots), self.fed[1:], places):
            positions.zero_()
            slots.fill_(NOWHERE)
        for lengths in (self.lengths, self.plan_lengths):
            lengths.fill_(1)
        self.step.fill_(1)

    def put(self, plan: RoundPlan) -> None:
        """Send a round's plan in one packet; with the catch-up tokens if it is `uniform`."""
        fed, forks, places, lengths, table = self._mirror.write()
        size, blocks = plan.table.shape
        if plan.uniform:
            fed[:, : plan.feed.tokens.shape[1]] = plan.feed.tokens
        forks[:, : plan.forks.shape[1]] = plan.forks
        places[: plan.steps, :, :size] = plan.places
        lengths[: plan.steps, :size] = plan.lengths
        table[:size, :blocks] = plan.table
        self._mirror.send(size)

    def catch_up(self, size: int, width: int) -> None:
        """Copy the tokens of the catch-up forward to the input."""
        tokens = size * width
        for of, row in zip((self.ids, self.positions, self.slots), self.fed, strict=True):
            of[:tokens].copy_(row[:tokens])
        self.lengths[:size].copy_(self.plan_lengths[0, :size])

    def advance(self, size: int) -> None:
        """Copy the plan of the next step, and the tokens picked before, to the input."""
        before = self._picked.packet[:, 0].index_select(0, self.step - 1)
        places = self.plan_places.index_select(0, self.step)
        lengths = self.plan_lengths.index_select(0, self.step)
        self.ids[:size].copy_(before[0, :size])
        self.positions[:size].copy_(places[0, 0, :size])
        self.slots[:size].copy_(places[0, 1, :size])
        self.lengths[:size].copy_(lengths[0, :size])

    def pick(self, logits: torch.Tensor, *, first: bool, back: bool = False) -> None:
        """Keep the logits [n, V_D], and pick each row's likeliest token.

        If `back`, the logits are [2n, V_D], as from `DrafterModel.logits`.
        """
        count = len(logits) >> back
        kept = self.logits[:count]
        kept.copy_(logits[:count])
        if back:
            self.last[:count].copy_(logits[count:])
        if first:
            self._picked.best(kept, 0)
            self.step.fill_(1)
            return
        self.now.wide = self._picked.wide
        self.now.best(kept, 0)
        size = self.now.packet.shape[2]
        self._picked.kept[:, :, :size].index_copy_(0, self.step, self.now.kept)
        self.step.add_(1)


class RecordedGraph(NamedTuple):
    """A recorded graph and its forward. `keep` must live as long."""

    batch: ForwardBatch
    replay: Work
    keep: object


class RecordedSteps:
    """Runs rounds by CUDA graphs; implements `Steps`.

    `shapes` are (requests, tokens per request) to record. A longer catch-up runs eagerly.
    """

    places = 1

    def __init__(
        self,
        model: DrafterModel,
        rules: PickConfig,
        send: Send,
        picked: PickBuffers,
        graphs: Graphs,
        shapes: Iterable[tuple[int, int]],
        support: GraphSupport,
    ) -> None:
        self._model, self._rules, self._send, self.picked = model, rules, send, picked
        self._eager = EagerSteps(model, rules, send, picked)
        self._in_graph = support.in_graph
        shapes = [(size, width) for size, width in shapes if support.several_tokens or width == 1]
        self._sizes = sorted({size for size, _ in shapes})
        self._widths = {
            size: sorted(width for of, width in shapes if of == size) for size in self._sizes
        }
        self.replays, self.forks = 0, self._eager.forks
        self._plan: RoundPlan | None = None
        self._replays_round = False
        self._recordings: dict[tuple[int, int, bool], RecordedGraph] = {}  # size, width, for trees
        tokens = max(size * width for size, width in shapes)
        widths = {width for _, width in shapes}
        self._on = StaticTensors(model, rules, picked, self._sizes[-1], tokens, widths)
        with torch.inference_mode():
            for size, width in sorted(shapes, reverse=True):
                for picked.wide in (True, False) if rules.beside else (False,):
                    for each in (1, 0) if width == 1 else (width,):  # width 0: the steps
                        recorded = self._record(graphs, size, each)
                        self._recordings[size, each, picked.wide] = recorded

    def shape(self, count: int, pending: int, context: int) -> Shape:
        fitting = (width for width in self.widths(count) if pending <= width <= context)
        return Shape(self._size(count), next(fitting, 0))

    def widths(self, count: int) -> Sequence[int]:
        return self._widths.get(self._size(count), ())

    last_widths = widths

    def begin(self, plan: RoundPlan) -> CaughtUp:
        size, count, feed, on = len(plan.table), plan.count, plan.feed, self._on
        self._plan = plan
        self._replays_round = (size, 0, False) in self._recordings
        if not self._replays_round:
            found = self._eager.begin(plan)
            self.forks = self._eager.forks
            return found
        real_tokens(feed.tokens, self._rules)
        on.put(plan)
        self.forks = on.forks[:, : plan.forks.shape[1]]
        if plan.uniform:
            self._replay(plan, size, feed.most, 0)
        else:
            tokens, starts, rows = self._send(feed.tokens, feed.starts, feed.rows)
            sent = (tokens, starts, on.plan_lengths[0, :count], on.table[:count], rows)
            batch = ragged_batch(sent, feed, plan.lengths[0, :count])
            on.pick(self._rules.only_real(self._model.forward(batch)), first=True, back=feed.back)
        return CaughtUp(on.logits[:count], on.last[:count] if feed.back else None)

    def step(self, number: int) -> torch.Tensor:
        if not self._replays_round:
            return self._eager.step(number)
        assert self._plan is not None
        count = self._plan.active[number]
        size = next(size for size in self._sizes if size >= count)
        self._replay(self._plan, size, 0, number)
        return self._on.logits[:count]

    def moved(self) -> None:
        if not self._replays_round:
            self._eager.moved()
            return
        assert self._plan is not None
        self._on.put(self._plan)

    def again(self) -> None:
        self._on.step.fill_(1)

    def _size(self, count: int) -> int:
        return next((size for size in self._sizes if size >= count), 0)

    def _record(self, graphs: Graphs, size: int, width: int) -> RecordedGraph:
        """Record the catch-up forward of `width` tokens per request, or a step if `width` is 0."""
        on = self._on
        batch = on.batch(size, max(1, width), back=self._rules.back and width > 1)
        on.clear()
        # The graph refers to this metadata as long as it lives.
        metadata = self._model.metadata(batch, to_capture=True)

        def work() -> None:
            if self._in_graph:
                self._move(size, width)
                self._model.update(metadata)
            logits = self._rules.only_real(self._model.logits(batch))
            on.pick(logits, first=width > 0, back=batch.back)

        with self._model.context(metadata, batch):
            return RecordedGraph(batch, graphs.capture(work), metadata)

    def _move(self, size: int, width: int) -> None:
        """Copy the inputs of the catch-up forward, or those of the next step if `width` is 0."""
        if width:
            self._on.catch_up(size, width)
        else:
            self._on.advance(size)

    def _replay(self, plan: RoundPlan, size: int, width: int, number: int) -> None:
        recording = self._recordings[size, width, self.picked.wide]
        self.replays += 1
        if self._in_graph:
            recording.replay()
            return
        # The host builds the metadata in tensors of the backend that the graph reads.
        self._move(size, width)
        lengths = plan.lengths[number, :size]
        batch = recording.batch._replace(
            lengths_cpu=torch.from_numpy(lengths), max_length=int(lengths.max())
        )
        with self._model.context(self._model.metadata(batch), batch):
            recording.replay()
