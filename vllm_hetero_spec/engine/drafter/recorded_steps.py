# SPDX-License-Identifier: Apache-2.0
"""Run rounds by CUDA graphs, recorded once per shape and replayed without Python.

All tensors that a graph uses are allocated once and keep their address. A round's plan is copied
into them. Each step selects its row of the plan by a counter on the device, so that one recording
per size serves all steps. Prompts and batches that fit no graph run eagerly. If drafts may be
trees, each shape is recorded twice, because chains do not need top candidates.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch, GraphSupport
from vllm_hetero_spec.engine.drafter.round_plan import NOWHERE, RoundPlan, table_width
from vllm_hetero_spec.engine.drafter.steps import CaughtUp, Shape, Steps, ragged_batch
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig
from vllm_hetero_spec.staging import Mirror, Send

Work = Callable[[], None]

# Records the operations of a function; returns a function that replays them, without what Python
# computed. The caller keeps the tensors that they use, at the same address. Tests record on a CPU.
Capture = Callable[[Work], Work]


class GraphPlan(NamedTuple):
    """Shapes to record, as (requests, tokens per request), and the recorder of their graphs."""

    capture: Capture
    shapes: Sequence[tuple[int, int]]
    support: GraphSupport


class RecordedForward:
    """A forward that a graph replays.

    Args:
        move: Copies the inputs of the forward to the tensors of `batch`.
        finish: Uses the logits; part of the graph.
    """

    def __init__(
        self,
        model: DrafterModel,
        recorded: GraphPlan,
        batch: ForwardBatch,
        move: Work,
        finish: Callable[[torch.Tensor], None],
    ) -> None:
        self._model, self._batch, self._move = model, batch, move
        self._in_graph = in_graph = recorded.support.in_graph
        metadata = model.metadata(batch, to_capture=True)

        def work() -> None:
            if in_graph:
                move()
                model.update(metadata)
            finish(model.logits(batch))

        self._work = work  # with the metadata, to which the graph refers
        with model.context(metadata, batch):
            self.replay = recorded.capture(work)

    def run(self, lengths: np.ndarray) -> None:
        """Replay the graph; `lengths`, int32 [B], are those after the forward."""
        if self._in_graph:
            self.replay()
            return
        # The host builds the metadata in tensors of the backend that the graph reads.
        self._move()
        batch = self._batch._replace(
            lengths_cpu=torch.from_numpy(lengths), max_length=int(lengths.max())
        )
        with self._model.context(self._model.metadata(batch), batch):
            self.replay()


class StaticInputs:
    """Inputs of recorded forwards, as in `ForwardBatch`: up to `size` requests, `tokens` tokens.

    A round is sent in one packet: `BatchFeed.tokens`, then `between`, then the table.

    Args:
        between: Shape and dtype of each further array.

    Attributes:
        fed: int64 [3, tokens], the first array on the device.
    """

    def __init__(
        self,
        model: DrafterModel,
        size: int,
        tokens: int,
        between: Sequence[tuple[tuple[int, ...], type[np.number]]],
    ) -> None:
        device, self._max_length = model.device, model.max_length
        blocks = table_width(-(-model.max_length // model.block_size), model.block_size)
        self.mirror = Mirror(
            device, [((3, tokens), np.int64), *between, ((size, blocks), np.int32)]
        )
        self.fed, *_, self.table = self.mirror.there
        self.ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.slots = torch.full((tokens,), NOWHERE, dtype=torch.int64, device=device)
        self.lengths = torch.ones(size, dtype=torch.int32, device=device)

    def batch(
        self, size: int, width: int, rows: torch.Tensor | None = None, *, back: bool = False
    ) -> ForwardBatch:
        """Return a forward of `width` tokens of each of the first `size` requests."""
        tokens, device = size * width, self.ids.device
        starts = torch.arange(0, tokens + 1, width, dtype=torch.int32)
        return ForwardBatch(
            ids=self.ids[:tokens],
            positions=self.positions[:tokens],
            slots=self.slots[:tokens],
            starts=starts.to(device),
            starts_cpu=starts,
            lengths=self.lengths[:size],
            lengths_cpu=torch.full((size,), self._max_length, dtype=torch.int32),
            table=self.table[:size],
            max_query=width,
            max_length=self._max_length,
            rows=None if rows is None else rows.to(device),
            back=back,
        )

    def load(self, size: int, width: int, lengths: torch.Tensor) -> None:
        """Copy the packet's tokens, and `lengths`, to the inputs of a forward of this shape."""
        tokens = size * width
        for of, row in zip((self.ids, self.positions, self.slots), self.fed, strict=True):
            of[:tokens].copy_(row[:tokens])
        self.lengths[:size].copy_(lengths[:size])


class StaticTensors(StaticInputs):
    """The static tensors of rounds of up to B requests.

    `plan_lengths`, `plan_places` and `forks` are as in `RoundPlan`.

    Attributes:
        step: int64 [1], number of the next step; `before`, of the one before.
        step_ids, step_places, step_lengths: Inputs of that step: int32 [1, B], int64 [1, 2, B] with
            positions and slots, and int32 [1, B].
        logits: [B, V_D], logits after the last token of each request.
        last: [B, V_D], logits at the position of that token, if rounds have `back`.
        now: Picked tokens of one step, before they are copied to their row of `picked`.
    """

    def __init__(
        self, model: DrafterModel, rules: PickConfig, picked: PickBuffers, size: int, tokens: int
    ) -> None:
        device, steps, self._rules = model.device, len(picked.packet), rules
        even = size + size % 2  # then slots are aligned, for which kernels are compiled
        # Inference tensors cannot be written outside of inference mode.
        with torch.inference_mode(mode=False):
            super().__init__(
                model,
                size,
                tokens,
                [((3, size), np.int64), ((steps, 2, even), np.int64), ((steps, size), np.int32)],
            )
            _, self.forks, self.plan_places, self.plan_lengths, _ = self.mirror.there
            self._first = torch.arange(2, device=device)
            self._count = self._first.clone()
            self.before, self.step = self._count.split(1)
            self.step_ids = torch.zeros((1, size), dtype=torch.int32, device=device)
            self.step_places = torch.zeros((1, 2, even), dtype=torch.int64, device=device)
            self.step_lengths = torch.ones((1, size), dtype=torch.int32, device=device)
            self.now = PickBuffers(1, size, rules)
            self._picked = picked
            with torch.inference_mode():
                like = rules.only_real(model.forward(self.batch(size, 1)))
            self.logits = torch.zeros(like.shape, dtype=like.dtype, device=device)
            self.last = torch.zeros_like(self.logits) if rules.back else self.logits[:0]

    def clear(self) -> None:
        """Set valid positions and lengths that write no KV. Graphs are recorded over them."""
        places = self.plan_places.unbind(1), self.step_places.unbind(1)
        for positions, slots in ((self.positions, self.slots), self.fed[1:], *places):
            positions.zero_()
            slots.fill_(NOWHERE)
        for lengths in (self.lengths, self.plan_lengths, self.step_lengths):
            lengths.fill_(1)
        self.restart()

    def step_batch(self, size: int) -> ForwardBatch:
        """Return the forward of a step of the first `size` requests."""
        return self.batch(size, 1)._replace(
            ids=self.step_ids[0, :size],
            positions=self.step_places[0, 0, :size],
            slots=self.step_places[0, 1, :size],
            lengths=self.step_lengths[0, :size],
        )

    def put(self, plan: RoundPlan) -> None:
        """Send a round's plan in one packet; with the catch-up tokens if it is `uniform`."""
        fed, forks, places, lengths, table = self.mirror.write()
        size, blocks = plan.table.shape
        if plan.uniform:
            fed[:, : plan.feed.tokens.shape[1]] = plan.feed.tokens
        forks[:, : plan.forks.shape[1]] = plan.forks
        places[: plan.steps, :, :size] = plan.places
        lengths[: plan.steps, :size] = plan.lengths
        table[:size, :blocks] = plan.table
        self.mirror.send(size)

    def restart(self) -> None:
        """Continue with step 1."""
        self._count.copy_(self._first)

    def advance(self) -> None:
        """Copy the plan of the next step, and the tokens picked before, to its inputs."""
        picked = self._picked.packet[:, 0, : self.step_ids.shape[1]]
        torch.index_select(picked, 0, self.before, out=self.step_ids)
        torch.index_select(self.plan_places, 0, self.step, out=self.step_places)
        torch.index_select(self.plan_lengths, 0, self.step, out=self.step_lengths)

    def pick(self, logits: torch.Tensor, *, first: bool, back: bool = False) -> None:
        """Mask the logits [n, V_D], keep them, and pick each row's likeliest token.

        If `back`, the logits are [2n, V_D], as from `DrafterModel.logits`.
        """
        logits = self._rules.only_real(logits)
        count = len(logits) >> back
        kept = self.logits[:count]
        kept.copy_(logits[:count])
        if back:
            self.last[:count].copy_(logits[count:])
        if first:
            self._picked.best(kept, 0)
            self.restart()
            return
        self.now.wide = self._picked.wide
        self.now.best(kept, 0)
        size = self.now.packet.shape[2]
        self._picked.kept[:, :, :size].index_copy_(0, self.step, self.now.kept)
        self._count.add_(1)


class RecordedSteps(Steps):
    """Runs rounds by CUDA graphs. A round or a catch-up without a graph runs eagerly."""

    forks: torch.Tensor
    _plan: RoundPlan
    _replays: int

    def __init__(
        self,
        model: DrafterModel,
        rules: PickConfig,
        send: Send,
        picked: PickBuffers,
        recorded: GraphPlan,
    ) -> None:
        super().__init__(model, rules, send, picked)
        self._replays_round = False
        _, shapes, support = recorded
        shapes = [(size, width) for size, width in shapes if support.several_tokens or width == 1]
        self._widths: dict[int, list[int]] = {}
        for size, width in sorted(shapes):
            self._widths.setdefault(size, []).append(width)
        tokens = max(size * width for size, width in shapes)
        self._on = StaticTensors(model, rules, picked, max(self._widths), tokens)
        # By size, width, and whether trees are possible.
        self._recordings: dict[tuple[int, int, bool], RecordedForward] = {}
        with torch.inference_mode():
            for size, width in sorted(shapes, reverse=True):
                for picked.wide in (True, False) if rules.beside else (False,):
                    for each in (1, 0) if width == 1 else (width,):  # width 0: the steps
                        recording = self._record(recorded, size, each)
                        self._recordings[size, each, picked.wide] = recording

    def shape(self, count: int, pending: int, context: int) -> Shape:
        fitting = (width for width in self.widths(count) if pending <= width <= context)
        return Shape(self._size(count), next(fitting, 0))

    def widths(self, count: int) -> Sequence[int]:
        return self._widths.get(self._size(count), ())

    def begin(self, plan: RoundPlan) -> CaughtUp:
        size, count, feed, on = len(plan.table), plan.count, plan.feed, self._on
        self._plan, self._replays_round = plan, (size, 0, False) in self._recordings
        if not self._replays_round:
            return super().begin(plan)
        on.put(plan)
        self.forks = on.forks[:, : plan.forks.shape[1]]
        if plan.uniform:
            self._replay(size, feed.most, 0)
        else:
            *tokens, rows = self._send(*feed.arrays, feed.rows)
            sent = (*tokens, on.plan_lengths[0, :count], on.table[:count], rows)
            batch = ragged_batch(sent, feed, plan.lengths[0, :count])
            on.pick(self._model.forward(batch), first=True, back=feed.back)
        return CaughtUp(on.logits[:count], on.last[:count] if feed.back else None)

    def step(self, number: int) -> torch.Tensor:
        if not self._replays_round:
            return super().step(number)
        count = self._plan.active[number]
        self._replay(self._size(count), 0, number)
        return self._on.logits[:count]

    def moved(self) -> None:
        if self._replays_round:
            self._on.put(self._plan)
        else:
            super().moved()

    def again(self) -> None:
        self._on.restart()

    def _size(self, count: int) -> int:
        return next((size for size in self._widths if size >= count), 0)

    def _record(self, recorded: GraphPlan, size: int, width: int) -> RecordedForward:
        """Record the catch-up forward of `width` tokens per request, or a step if `width` is 0."""
        on = self._on
        on.clear()
        batch, move = on.step_batch(size), on.advance
        if width:
            batch = on.batch(size, width, back=self._rules.back and width > 1)
            move = partial(on.load, size, width, on.plan_lengths[0])
        finish = partial(on.pick, first=width > 0, back=batch.back)
        return RecordedForward(self._model, recorded, batch, move, finish)

    def _replay(self, size: int, width: int, number: int) -> None:
        """Replay the forward of `_record` for step `number` of the round, 0 for catch-up."""
        self._replays += 1
        self._recordings[size, width, self.picked.wide].run(self._plan.lengths[number, :size])
