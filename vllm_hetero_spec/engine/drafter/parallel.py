# SPDX-License-Identifier: Apache-2.0
"""Parallel drafters: a whole draft from one forward (PARD, arXiv 2504.18583).

Such a drafter reads mask tokens behind the text. The logits of the last token of the text and of
S - 1 masks predict the next S tokens. The tokens are independent of each other, given the text.

Masks write KV behind the text. The next round overwrites it, because it reads accepted draft tokens
like any other text. So `DraftSequence.kv_ids` never contains a draft, and a block with masks is
never published.

With CUDA graphs, one replay runs a round, recorded once per shape. A graph reads P - 1 masks behind
the pending ids of each request, and picks P tokens of each. A request that drafts fewer tokens
ignores the others, and their masks write no KV.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.drafter.recorded_steps import GraphPlan, RecordedForward, StaticInputs
from vllm_hetero_spec.engine.drafter.round_plan import NOWHERE, BatchFeed, RoundPlan
from vllm_hetero_spec.engine.drafter.steps import CaughtUp, Shape, Steps, ragged_batch
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig

# Pending ids per request in a graph: those that the target has just written, and a few more.
_PENDING = (2, 4, 8, 16)
_MOST_TOKENS = 512  # of all requests in a graph, which bounds its memory


def without_mask(rules: PickConfig, mask: int) -> PickConfig:
    """Return rules that never pick the mask token. It may be one of the tokenizer's ids."""
    if mask >= rules.vocab_size:
        return rules
    return replace(rules, banned=torch.cat([rules.banned, rules.banned.new_tensor([mask])]))


def make_parallel(drafter: Drafter, mask: int, places: int) -> None:
    """Let a drafter predict all tokens of a round in one forward.

    Args:
        mask: Id of its mask token.
        places: Tokens of an ordinary round. Graphs are recorded for so many.
    """

    def wrap(steps: Steps, recorded: GraphPlan | None) -> Steps:
        if recorded is None:
            return ParallelSteps(steps, drafter, mask, places)
        return RecordedParallel(steps, drafter, mask, places, recorded)

    drafter.wrap_steps(wrap)


class ParallelSteps(Steps):
    """Runs a round by one forward. Rounds of one step run by `inner`."""

    def __init__(self, inner: Steps, drafter: Drafter, mask: int, places: int) -> None:
        super().__init__(drafter.model, drafter.rules, drafter.send_plan, inner.picked)
        self._inner, self._mask, self.places = inner, mask, places
        self._logits: Sequence[torch.Tensor] = ()

    @property
    def replays(self) -> int:
        return self._inner.replays + self._replays

    def widths(self, count: int) -> Sequence[int]:
        return self._inner.widths(count)

    def part_shape(self, count: int, width: int) -> Shape:
        return self._inner.part_shape(count, width)

    def begin(self, plan: RoundPlan) -> CaughtUp:
        recorded = plan.feed.most in self._inner.widths(plan.count)
        if plan.steps == 1 and (recorded or not plan.uniform):
            return self._inner.begin(plan)
        counts = [plan.count, *plan.active[1:]]
        feed, rows, lengths = with_masks(plan, self._mask)
        sent = self._send(*feed.arrays, lengths, plan.table[: plan.count], rows)
        logits = self._rules.only_real(self._model.forward(ragged_batch(sent, feed, lengths)))
        self._logits = logits[: sum(counts)].split(counts)
        for number, each in enumerate(self._logits):
            self.picked.best(each, number)
        return CaughtUp(self._logits[0], logits[sum(counts) :] if feed.back else None)

    def step(self, number: int) -> torch.Tensor:
        return self._logits[number]

    def moved(self) -> None:
        """Do nothing: predictions do not depend on the token in front of them."""


def with_masks(plan: RoundPlan, mask: int) -> tuple[BatchFeed, np.ndarray, np.ndarray]:
    """Append the masks of a round to its pending ids: one less than each request has steps.

    Returns:
        The feed; int64 [R] indices of the tokens whose logits are needed; int32 [n] lengths of the
            sequences after the forward. The indices are those of the last pending id of each
            request, then of the masks, step after step, each for the `active` rows of `plan`; then,
            if the feed is `back`, those of the tokens before the last ones.
    """
    feed, active = plan.feed, np.array(plan.active[1:], np.int64)
    starts = feed.starts[: plan.count + 1]  # without idle rows
    feed = feed._replace(tokens=feed.tokens[:, : starts[-1]], starts=starts)
    requests = np.arange(plan.count)
    masks = (active[:, None] > requests).sum(0)  # of each request
    own = requests.repeat(masks)
    steps = 1 + np.concatenate([np.arange(count) for count in masks]).astype(np.int64)
    places = plan.places[steps, :, own].T
    ids = np.full((1, len(own)), mask)
    tokens = np.insert(feed.tokens, feed.starts[1:][own], np.concatenate([ids, places]), axis=1)
    starts = feed.starts + np.array([0, *masks.cumsum()], np.int32)
    last = starts[1:].astype(np.int64) - masks - 1
    rows = [last, *(last[:count] + step for step, count in enumerate(active, 1))]
    if feed.back:
        rows.append(np.maximum(last - 1, starts[:-1]))
    lengths = plan.lengths[masks, requests]
    most = int(np.diff(starts).max())
    return feed._replace(tokens=tokens, starts=starts, most=most), np.concatenate(rows), lengths


class _Tensors(StaticInputs):
    """The static tensors of all graphs of a drafter, for up to `size` requests; `places` is P.

    Attributes:
        logits: [B, P, V_D], logits of the P tokens of each request.
        last: [B, V_D], logits at the position of the last pending id.
        sent_lengths: int32 [B], the second array of the packet.
    """

    def __init__(
        self, model: DrafterModel, rules: PickConfig, size: int, tokens: int, places: int
    ) -> None:
        device, self._rules, self._places = model.device, rules, places
        with torch.inference_mode(mode=False):
            super().__init__(model, size, tokens, [((size,), np.int32)])
            self.sent_lengths = self.mirror.there[1]
            self._own = PickBuffers(1, size * places, rules)
            self._own.wide = rules.beside > 0
            with torch.inference_mode():
                like = rules.only_real(model.forward(self.behind(1, _PENDING[0])))
            shape = size, places, like.shape[1]
            self.logits = torch.zeros(shape, dtype=like.dtype, device=device)
            self.last = torch.zeros((size, like.shape[1]), dtype=like.dtype, device=device)

    def behind(self, size: int, pending: int) -> ForwardBatch:
        """Return a forward whose `rows` are the last two pending ids and the masks."""
        width = pending + self._places - 1
        rows = torch.arange(size)[:, None] * width + torch.arange(pending - 2, width)
        return self.batch(size, width, rows.flatten())

    def clear(self, pending: int) -> None:
        """Set valid lengths, and slots that write no KV. A graph is recorded over them."""
        for slots in (self.slots, self.fed[2]):
            slots.fill_(NOWHERE)
        for lengths in (self.lengths, self.sent_lengths):
            lengths.fill_(pending + self._places - 1)

    def pick(self, logits: torch.Tensor, size: int, picked: PickBuffers) -> None:
        """Keep the logits [size * (1 + P), V_D], and pick P tokens of each request."""
        rows = self._rules.only_real(logits).view(size, 1 + self._places, -1)
        self.last[:size].copy_(rows[:, 0])
        kept = self.logits[:size]
        kept.copy_(rows[:, 1:])
        count = size * self._places
        self._own.best(kept.view(count, -1), 0)
        found = self._own.packet[0, :, :count].view(-1, size, self._places)
        picked.packet[: self._places, :, :size].copy_(found.permute(2, 0, 1))


class RecordedParallel(ParallelSteps):
    """Replays the rounds of one drafter that fit a graph.

    `places` is P. `recorded` has the numbers of requests to record, in `shapes`.
    """

    _logits: Sequence[torch.Tensor]
    _replays: int

    def __init__(
        self, inner: Steps, drafter: Drafter, mask: int, places: int, recorded: GraphPlan
    ) -> None:
        super().__init__(inner, drafter, mask, places)
        sizes = sorted({size for size, _ in recorded.shapes})
        self._widths = {
            size: [of for of in _PENDING if size * (of + places - 1) <= _MOST_TOKENS]
            for size in (sizes if recorded.support.several_tokens else ())
        }
        shapes = [(size, pending) for size, of in self._widths.items() for pending in of]
        self._rounds: dict[tuple[int, int], RecordedForward] = {}  # by requests and pending ids
        if shapes:
            tokens = max(size * (pending + places - 1) for size, pending in shapes)
            self._on = _Tensors(self._model, self._rules, max(shapes)[0], tokens, places)
        with torch.inference_mode():
            for size, pending in sorted(shapes, reverse=True):
                self._rounds[size, pending] = self._record(recorded, size, pending)

    def shape(self, count: int, pending: int, context: int) -> Shape:
        widths = self._widths.get(self._size(count), ())
        width = next((width for width in widths if pending <= width <= context), 0)
        return Shape(self._size(count), width) if width else Shape()

    def last_widths(self, count: int) -> Sequence[int]:
        return self._widths.get(self._size(count)) or super().last_widths(count)

    def begin(self, plan: RoundPlan) -> CaughtUp:
        shape, longest = (len(plan.table), plan.feed.most), int(plan.lengths[0].max())
        fits = plan.steps <= self.places and longest + self.places - 1 <= self._model.max_length
        if not (plan.uniform and fits and shape in self._rounds):
            return super().begin(plan)
        lengths = self._put(plan)
        self._replays += 1
        self._rounds[shape].run(lengths)
        counts = [plan.count, *plan.active[1:]]
        self._logits = [self._on.logits[:count, step] for step, count in enumerate(counts)]
        return CaughtUp(self._logits[0], self._on.last[: plan.count] if plan.feed.back else None)

    def _size(self, count: int) -> int:
        return next((size for size in self._widths if size >= count), 0)

    def _record(self, recorded: GraphPlan, size: int, pending: int) -> RecordedForward:
        on = self._on
        on.clear(pending)
        move = partial(on.load, size, pending + self.places - 1, on.sent_lengths)
        finish = partial(on.pick, size=size, picked=self.picked)
        return RecordedForward(self._model, recorded, on.behind(size, pending), move, finish)

    def _put(self, plan: RoundPlan) -> np.ndarray:
        """Send a round in one packet. Return the lengths of the sequences, int32 [B]."""
        size, pending, masks = len(plan.table), plan.feed.most, self.places - 1
        tokens = np.empty((3, size, pending + masks), np.int64)
        known = plan.feed.tokens.reshape(3, size, pending)
        ids, positions, slots = tokens
        tokens[:, :, :pending] = known
        ids[:, pending:] = self._mask
        positions[:, pending:] = known[1, :, -1:] + np.arange(1, masks + 1)
        slots[:, pending:] = NOWHERE
        slots[:, pending : pending + plan.steps - 1] = plan.places[1:, 1].T
        lengths = plan.lengths[0] + np.int32(masks)
        fed, sent_lengths, table = self._on.mirror.write()
        fed[:, : tokens[0].size] = tokens.reshape(3, -1)
        sent_lengths[:size] = lengths
        table[:size, : plan.table.shape[1]] = plan.table
        self._on.mirror.send(size)
        return lengths
