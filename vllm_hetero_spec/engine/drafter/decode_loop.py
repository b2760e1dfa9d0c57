# SPDX-License-Identifier: Apache-2.0
"""The decode loop of the drafter: one catch-up forward, then single-token steps.

`begin` queues a round without waiting for the device. All lengths are known on the host, and a step
feeds the tokens that the step before picked on the device. `finish` waits once, for the picked
tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.extension import RoundExtension
from vllm_hetero_spec.engine.drafter.model import DrafterModel, GraphSupport
from vllm_hetero_spec.engine.drafter.recorded_steps import Graphs, RecordedSteps
from vllm_hetero_spec.engine.drafter.round import Round
from vllm_hetero_spec.engine.drafter.round_plan import STEPS_PER_TOKEN, BatchFeed, Planner
from vllm_hetero_spec.engine.drafter.steps import (
    CaughtUp,
    EagerSteps,
    Forwards,
    Steps,
    read_in_parts,
)
from vllm_hetero_spec.engine.drafter.tasks import Control, DrafterTokens, DraftRow
from vllm_hetero_spec.engine.drafter.token_healing import CANDIDATE_BYTES, TokenHealing
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig, RowPickers, wide
from vllm_hetero_spec.staging import Receiver, Sender, Stopwatch

# packets; upper bound for sampling, penalties and token healing in one round.
_OWN_PACKETS = 8


class Drafter:
    """Greedy and sampled drafting with a `DrafterModel`, one round at a time.

    A context may contain ids beyond `vocab_size` if both tokenizers are the same: a prompt may have
    padding ids of the target. The drafter reads id 0 instead.

    Args:
        lookahead: Largest draft length in target tokens.

    Attributes:
        extensions: Optional features of the rounds.
        steps: Runs the forwards of a round.
        send: Sends arrays to the device in the middle of a round.
        most_steps: Largest number of drafter tokens per request and round.
        waits: True on a device, where reading a result synchronizes.
        may_wait: Allow `begin` to synchronize; True with asynchronous scheduling.
        shortened_drafts: Drafts that were shortened to a replaced first token.
    """

    def __init__(
        self, model: DrafterModel, rules: PickConfig, lookahead: int, max_requests: int
    ) -> None:
        device = model.device
        self.model, self.rules, self.max_length = model, rules, model.max_length
        self.extensions: list[RoundExtension] = []
        self.most_steps = STEPS_PER_TOKEN * lookahead + 2
        self.forwards = self.restarted_rounds = self.shortened_drafts = 0
        self.waits, self.may_wait = device.type != "cpu", False
        self._stopwatch = Stopwatch(device)
        self._send = Sender(device).send
        self.send = Sender(device, _OWN_PACKETS).send
        most = self.most_steps, max_requests
        with torch.inference_mode(mode=False):
            picked = PickBuffers(*most, device, confidences=rules.confidences, beside=rules.beside)
        self._receiver = Receiver(device, 4 * picked.packet.numel())
        own = max(CANDIDATE_BYTES, 8 * self.most_steps)
        self._receiver_own = Receiver(device, max_requests * own)
        self.planner = Planner(model.block_size)
        self._healing = TokenHealing(self._receiver_own, self.planner, self.send)
        # A sender of its own: it sends in the middle of a round, whose packets must stay valid.
        self._forwards = Forwards(model, rules, Sender(device).send)
        self.steps: Steps = EagerSteps(model, rules, self._send, picked)
        self._round: Round | None = None

    def record(
        self, graphs: Graphs, shapes: Sequence[tuple[int, int]], support: GraphSupport
    ) -> None:
        """Record CUDA graphs for (requests, tokens per request), and use them from now on."""
        # Token healing feeds two tokens per request. If graphs take one token only, every catch-up
        # forward would run eagerly.
        self.rules = replace(
            self.rules, token_healing=self.rules.token_healing and support.several_tokens
        )
        self.steps = RecordedSteps(
            self.model, self.rules, self._send, self.steps.picked, graphs, shapes, support
        )

    @property
    def forward_seconds(self) -> float:
        """Seconds of all forwards so far, token picking included, measured on their device."""
        return self._stopwatch.seconds

    @property
    def replays(self) -> int:
        """Number of forwards so far that replayed a graph."""
        return self.steps.replays

    @torch.inference_mode()
    def begin(self, rows: Sequence[DraftRow], control: Control | None = None) -> None:
        """Feed the pending ids of every row and queue the draft steps. `finish` must follow.

        All pending ids may go into one forward. The caller limits their sum to its token budget. No
        row has more than `most_steps` steps. If `control` can stop early, it is called after every
        step, which synchronizes with the device.
        """
        apart = {index for of in self.extensions for index in of.drafts(rows)}
        order = sorted(range(len(rows)), key=lambda at: (at in apart, -rows[at].steps))
        self.steps.picked.wide = self.rules.beside > 0 and wide(rows)
        rows = [rows[i] for i in order]
        if self.waits and any(row.choose for row in rows) and not self._healing.due():
            rows = [row._replace(choose=None) for row in rows]
        read_in_parts(rows, self.steps, self.planner, self._stopwatch)
        current = self._round = self._planned(rows, order, len(rows) - len(apart))
        with self._stopwatch:
            behind = self.steps.begin(current.plan)
            if current.plan.copies:
                self.model.copy_blocks(current.plan.copies)
        for row in rows:
            row.sequence.kv_ids.extend(row.pending)
        heals = behind.last is not None and current.own.draws and not current.plan.forks.size
        if heals and self._healing.before_sampling(current, behind):
            drafting = current.rows[: current.plan.active[0]]
            current.own = RowPickers(drafting, self.rules, self.send, current.plan)
        if current.own or current.plan.forks.size:
            with self._stopwatch:
                self._pick(current, 0, behind.logits)
        self.forwards += 1
        for extension in self.extensions:
            extension.after_prefill(current, behind.logits)
        if current.plan.active[0]:
            self._queue_steps(current, behind, control)

    @torch.inference_mode()
    def finish(self) -> list[DrafterTokens]:
        """Wait for the round; return the drafter tokens of each row, in the order of `begin`."""
        current, self._round = self._round, None
        assert current is not None
        if current.candidates is not None and not current.taken:
            self._healing.heal(current, self.steps)
            self._take_steps(current, None)
            self._fetch(current)
        drafted = [DrafterTokens([])] * len(current.rows)
        if current.taken:
            drafted[: current.plan.active[0]] = self._collect(current)
        for extension in self.extensions:
            extension.collect(current, drafted)
        restored = drafted.copy()
        for index, tokens in zip(current.order, drafted, strict=True):
            restored[index] = tokens
        return restored

    def run(self, rows: Sequence[DraftRow], control: Control | None = None) -> list[DrafterTokens]:
        """Run a whole round."""
        self.begin(rows, control)
        return self.finish()

    @torch.inference_mode()
    def feed(self, feed: BatchFeed, table: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """Run a forward that is not a step of a round, as `Forwards.feed`."""
        self.forwards += 1
        with self._stopwatch:
            return self._forwards.feed(feed, table, lengths)

    def _planned(self, rows: list[DraftRow], order: list[int], singles: int) -> Round:
        sequences, pending = [row.sequence for row in rows], [row.pending for row in rows]
        back = self.rules.token_healing and any(row.choose is not None for row in rows)
        longest = max(1 + back, *map(len, pending))
        context = min([len(row.sequence.kv_ids) + len(row.pending) for row in rows])
        steps = [row.steps for row in rows[:singles]] + [0] * (len(rows) - singles)
        forks = [fork for of in self.extensions for fork in of.forks(rows[:singles])]
        shape = self.steps.shape(len(rows) + len(forks), longest, context)
        plan = self.planner.plan(sequences, pending, steps, *shape, forks, back=back)
        own = RowPickers(rows[:singles], self.rules, self.send, plan)
        return Round(rows, order, plan, own)

    def _queue_steps(self, current: Round, behind: CaughtUp, control: Control | None) -> None:
        """Queue everything after catch-up, up to the copy of the picked tokens to the host."""
        healing, heals = self._healing, current.others is not None
        if not heals and any(row.choose for row in current.rows):
            with self._stopwatch:
                current.candidates = healing.fetch(behind, current.plan.active[0])
            often = healing.heals_often(current.plan.active[0])
            heals = not self.waits or bool(current.own) or (often and self.may_wait)
            if often and not heals:
                return  # `finish` heals, and queues the steps
        if heals:
            healing.heal(current, self.steps)
        self._take_steps(current, control)
        self._fetch(current)

    def _take_steps(self, current: Round, control: Control | None) -> None:
        current.taken = 1
        if control is None or not control.can_stop_early:
            with self._stopwatch:
                for number in range(1, current.plan.steps):
                    self._take_step(current, number)
            return
        for number in range(1, current.plan.steps):
            peaks = self.steps.picked.read(number - 1, current.plan.active[number - 1])
            if not control.continue_drafting(current.looked_at(number, peaks)):
                break
            with self._stopwatch:
                self._take_step(current, number)

    def _take_step(self, current: Round, number: int) -> None:
        self._pick(current, number, self.steps.step(number))
        current.taken += 1
        self.forwards += 1

    def _pick(self, current: Round, number: int, logits: torch.Tensor) -> None:
        current.own.pick(logits, self.steps.picked, number)
        if current.plan.forks.size:
            for extension in self.extensions:
                extension.after_step(current, number)

    def _fetch(self, current: Round) -> None:
        current.fetched = self._receiver.fetch(self.steps.picked.kept[: current.taken])
        stand_ins = None if current.own.draws is None else current.own.draws.stand_ins
        if stand_ins is not None:
            current.stand_ins = self._receiver_own.fetch(stand_ins)

    def _collect(self, current: Round) -> list[DrafterTokens]:
        if self._healing.repeats(current, self.steps):
            self.restarted_rounds += 1
            self._take_steps(current, None)
            self._fetch(current)
        self.shortened_drafts += len(current.cut)
        return current.drafted(self.rules.confidences, self.rules.ends, self.rules.sampling)
