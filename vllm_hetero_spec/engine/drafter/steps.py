# SPDX-License-Identifier: Apache-2.0
"""A round on the device: catch up, then one step after the other, none of which is waited for."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.drafter.round_plan import BatchFeed, RoundPlan
from vllm_hetero_spec.engine.drafter.token_choice import PickConfig
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers
from vllm_hetero_spec.staging import Send


class Shape(NamedTuple):
    """How a round is to be planned: see `Planner.plan`."""

    size: int = 0
    width: int = 0


class CaughtUp(NamedTuple):
    """What comes behind n texts that have been read: logits of the tokens that may be picked.

    Attributes:
        logits: [n, V_D], of the next tokens.
        last: [n, V_D], in the place of the last ones; None where the plan's feed is not `back`.
    """

    logits: torch.Tensor
    last: torch.Tensor | None


class Steps(Protocol):
    """Runs a round's forwards, and leaves each row's best in `picked`.

    Attributes:
        picked: Of the round.
        replays: Forwards so far that were replayed graphs.
        forks: `RoundPlan.forks` of the round, on the device.
    """

    picked: PickBuffers
    replays: int
    forks: torch.Tensor

    def shape(self, count: int, pending: int, context: int) -> Shape:
        """How to plan a round.

        Args:
            count: Its requests.
            pending: Most tokens that one of them is to be fed first.
            context: Fewest tokens that one of them has in all.
        """

    def widths(self, count: int) -> Sequence[int]:
        """Tokens of each of so many requests that a graph feeds at once, rising; none without."""

    def begin(self, plan: RoundPlan) -> CaughtUp:
        """Catch up."""

    def step(self, number: int) -> torch.Tensor:
        """Feed what step `number` - 1 picked; logits of the requests that still draft."""

    def moved(self) -> None:
        """The round's plan has changed behind what was caught up: the next steps go by it."""

    def again(self) -> None:
        """The steps of this round begin anew, behind what is picked now in step 0."""


class Forwards:
    """Single forwards, made on the host: whatever is not a plain step of a round.

    Args:
        model: The drafter.
        rules: What may be picked.
        send: Brings arrays to the device.
    """

    def __init__(self, model: DrafterModel, rules: PickConfig, send: Send) -> None:
        self._model, self._rules, self._send = model, rules, send

    def feed(self, feed: BatchFeed, table: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """One forward; logits [n, V_D] of the tokens that may be picked.

        Args:
            feed: Its tokens.
            table: int32 [n, W], the KV blocks of its requests.
            lengths: int32 [n], their tokens after it.
        """
        tokens = real_tokens(feed.tokens, self._rules)
        sent = self._send(tokens, feed.starts, lengths, table, feed.rows)
        batch = ragged_batch(sent, feed, lengths)
        return self._rules.only_real(self._model.forward(batch))


def real_tokens(tokens: np.ndarray, rules: PickConfig) -> np.ndarray:
    """`BatchFeed.tokens` with id 0, changed in place, where the drafter has no such id."""
    tokens[0][tokens[0] >= rules.vocab_size] = 0
    return tokens


def ragged_batch(
    sent: Sequence[torch.Tensor], feed: BatchFeed, lengths: np.ndarray
) -> ForwardBatch:
    """A forward over what was sent: tokens, starts, lengths, table, rows."""
    tokens, starts, device_lengths, table, rows = sent
    ids, positions, slots = tokens
    return ForwardBatch(
        ids=ids.int(),  # as those that are picked: a compiled model takes one type
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


class _Sent(NamedTuple):
    """A round's plan, and what of it is on the device.

    Attributes:
        plan: On the host.
        lengths, places, table: See `RoundPlan`.
        starts: int32 [n+1], where every request has one token.
        longest: Of each step's `lengths`.
    """

    plan: RoundPlan
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    places: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    starts_cpu: torch.Tensor
    longest: Sequence[int]


class EagerSteps:
    """Runs rounds of any shape.

    Args:
        model: The drafter.
        rules: What may be picked.
        send: Brings arrays to the device.
        picked: Where each row's best goes.
    """

    def __init__(
        self, model: DrafterModel, rules: PickConfig, send: Send, picked: PickBuffers
    ) -> None:
        self._model, self._rules, self._send, self.picked = model, rules, send, picked
        self.replays = 0
        self.forks = torch.zeros((3, 0), dtype=torch.int64, device=model.device)
        self._sent: _Sent | None = None
        self._starts_cpu = torch.arange(picked.packet.shape[2] + 1, dtype=torch.int32)
        self._starts = self._starts_cpu.to(model.device)

    def shape(self, count: int, pending: int, context: int) -> Shape:
        """See `Steps`: any shape will do."""
        return Shape()

    def widths(self, count: int) -> Sequence[int]:
        """See `Steps`."""
        return ()

    def begin(self, plan: RoundPlan) -> CaughtUp:
        """See `Steps`."""
        feed, count = plan.feed, plan.count
        tokens, starts, rows, lengths, table, places, self.forks = self._send(
            *(real_tokens(feed.tokens, self._rules), feed.starts, feed.rows),
            *(plan.lengths, plan.table, plan.places, plan.forks),
        )
        self._sent = _Sent(
            plan=plan,
            lengths=lengths,
            lengths_cpu=torch.from_numpy(plan.lengths),
            places=places,
            table=table,
            starts=self._starts[: len(table) + 1],
            starts_cpu=self._starts_cpu[: len(table) + 1],
            longest=plan.lengths.max(1).tolist(),
        )
        sent = (tokens, starts, lengths[0, :count], table[:count], rows)
        logits = self._model.forward(ragged_batch(sent, feed, plan.lengths[0, :count]))
        logits = self._rules.only_real(logits)
        self.picked.best(logits[:count], 0)
        return CaughtUp(logits[:count], logits[count:] if feed.back else None)

    def step(self, number: int) -> torch.Tensor:
        """See `Steps`."""
        sent = self._sent
        assert sent is not None
        count = sent.plan.active[number]
        batch = ForwardBatch(
            ids=self.picked.ids(number - 1, count),
            positions=sent.places[number, 0, :count],
            slots=sent.places[number, 1, :count],
            starts=sent.starts[: count + 1],
            starts_cpu=sent.starts_cpu[: count + 1],
            lengths=sent.lengths[number, :count],
            lengths_cpu=sent.lengths_cpu[number, :count],
            table=sent.table[:count],
            max_query=1,
            max_length=sent.longest[number],
        )
        logits = self._rules.only_real(self._model.forward(batch))
        self.picked.best(logits, number)
        return logits

    def moved(self) -> None:
        """See `Steps`."""
        assert self._sent is not None
        plan = self._sent.plan
        lengths, places = self._send(plan.lengths, plan.places)
        self._sent = self._sent._replace(lengths=lengths, places=places)

    def again(self) -> None:
        """See `Steps`: every step is told its number."""
