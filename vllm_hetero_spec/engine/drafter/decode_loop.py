# SPDX-License-Identifier: Apache-2.0
"""The decode loop of the drafter: one catch-up forward, then single-token steps.

`begin` queues a round without waiting for the device. All lengths are known on the host, and a step
feeds the tokens that the step before picked on the device. `finish` waits once, for the picked
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.model import DrafterModel, GraphSupport
from vllm_hetero_spec.engine.drafter.recorded_steps import Capture, GraphPlan, RecordedSteps
from vllm_hetero_spec.engine.drafter.round import Round, RoundExtension
from vllm_hetero_spec.engine.drafter.round_plan import (
    STEPS_PER_TOKEN,
    BatchFeed,
    Planner,
    RoundPlan,
)
from vllm_hetero_spec.engine.drafter.steps import Steps, ragged_batch, read_in_parts
from vllm_hetero_spec.engine.drafter.tasks import Control, DrafterTokens, DraftRow
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers, PickConfig, RowPickers, wide
from vllm_hetero_spec.staging import Receiver, Sender, Stopwatch

# packets; upper bound for sampling, penalties and extensions in one round.
_OWN_PACKETS = 8


class Drafter:
    """Greedy and sampled drafting with a `DrafterModel`, one round at a time.

    Args:
        lookahead: Largest draft length in target tokens.

    Attributes:
        send: Sends arrays to the device in the middle of a round.
        most_steps: Largest number of drafter tokens per request and round.
        waits: True on a device, where reading a result synchronizes.
        may_wait: Allow `begin` to synchronize; True with asynchronous scheduling.
        restarted_rounds: Rounds whose steps were taken twice.
        stopwatch: Measures all forwards on their device, token picking included.
    """

    def __init__(
        self, model: DrafterModel, rules: PickConfig, lookahead: int, max_requests: int
    ) -> None:
        device = model.device
        self.model, self.rules, self.max_length = model, rules, model.max_length
        self.extensions: list[RoundExtension] = []
        self.most_steps = STEPS_PER_TOKEN * lookahead + 2
        self.forwards = self.restarted_rounds = 0
        self.waits, self.may_wait = device.type != "cpu", False
        self.stopwatch = Stopwatch(device)
        self.send_plan = Sender(device).send
        self.send = Sender(device, _OWN_PACKETS).send
        with torch.inference_mode(mode=False):
            picked = PickBuffers(self.most_steps, max_requests, rules)
        self._receiver = Receiver(device, 4 * picked.packet.numel())
        self._receiver_own = Receiver(device, 8 * self.most_steps * max_requests)
        self.planner = Planner(model.block_size, rules.vocab_size)
        # A sender of its own: it sends in the middle of a round, whose packets must stay valid.
        self._send_feed = Sender(device).send
        self.steps = Steps(model, rules, self.send_plan, picked)
        self._wrap: Callable[[Steps, GraphPlan | None], Steps] = lambda steps, _: steps
        self._round: Round | None = None

    def wrap_steps(self, wrap: Callable[[Steps, GraphPlan | None], Steps]) -> None:
        """Run rounds by `wrap(steps, None)`, and by `wrap(steps, plan)` after recording graphs."""
        self._wrap = wrap
        self.steps = wrap(self.steps, None)

    def record(
        self, capture: Capture, shapes: Sequence[tuple[int, int]], support: GraphSupport
    ) -> None:
        """Record CUDA graphs for (requests, tokens per request), and use them from now on."""
        # A `back` round feeds at least two tokens per request. If graphs take one token only, each
        # of its catch-up forwards would run eagerly.
        self.rules = replace(self.rules, back=self.rules.back and support.several_tokens)
        plan = GraphPlan(capture, shapes, support)
        recorded = RecordedSteps(self.model, self.rules, self.send_plan, self.steps.picked, plan)
        self.steps = self._wrap(recorded, plan)

    @property
    def parallel(self) -> bool:
        """True if one forward predicts all tokens of a round.

        The drafter then does not read its draft tokens, so they have no KV.
        """
        return self.steps.places > 1

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
        read_in_parts(rows, self.steps, self.planner, self.stopwatch)
        singles = len(rows) - len(apart)
        plan = self._planned(rows, singles)
        with self.stopwatch:
            behind = self.steps.begin(plan)
            if plan.copies:
                self.model.copy_blocks(plan.copies)
        # The device is busy by now, so that it does not wait for the host.
        own = RowPickers(rows[:singles], self.rules, self.send, plan)
        current = self._round = Round(rows, order, plan, own)
        for row in rows:
            row.sequence.kv_ids.extend(row.pending)
        for extension in self.extensions:
            extension.before_picking(current, behind)
        if current.own or current.plan.forks.size:
            with self.stopwatch:
                self._pick(current, 0, behind.logits)
        self.forwards += 1
        later = [extension.after_prefill(current, behind) for extension in self.extensions]
        if current.plan.active[0] and not any(later):
            self._take_steps(current, control)

    @torch.inference_mode()
    def finish(self) -> list[DrafterTokens]:
        """Wait for the round; return the drafter tokens of each row, in the order of `begin`."""
        current, self._round = self._round, None
        assert current is not None
        if True in [extension.restarts(current) for extension in self.extensions]:
            self.restarted_rounds += current.taken > 0 and not self.parallel
            self._take_steps(current, None)
        drafted = [DrafterTokens([])] * len(current.rows)
        if current.taken:
            stepwise = current.drafted(self.rules)
            drafted[: current.plan.active[0]] = stepwise
            for row, tokens in zip(current.rows, stepwise, strict=False):
                if not self.parallel:  # the last draft token was not fed, so it has no KV
                    row.sequence.kv_ids += tokens.tokens[:-1]
        for extension in self.extensions:
            extension.collect(current, drafted)
        restored = drafted.copy()
        for index, tokens in zip(current.order, drafted, strict=True):
            restored[index] = tokens
        return restored

    def run(self, rows: Sequence[DraftRow], control: Control | None = None) -> list[DrafterTokens]:
        self.begin(rows, control)
        return self.finish()

    @torch.inference_mode()
    def feed(self, feed: BatchFeed, table: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """Run a forward that is not a step of a round.

        `table` is int32 [n, W]; `lengths`, int32 [n], are those of the sequences after the forward.
        Return logits [n, V_D], restricted to tokens that may be picked.
        """
        self.forwards += 1
        with self.stopwatch:
            sent = self._send_feed(*feed.arrays, lengths, table, feed.rows)
            return self.rules.only_real(self.model.forward(ragged_batch(sent, feed, lengths)))

    def _planned(self, rows: Sequence[DraftRow], singles: int) -> RoundPlan:
        """Plan a round whose first `singles` rows draft step by step."""
        sequences, pending = [row.sequence for row in rows], [row.pending for row in rows]
        back = True in [of.back(rows) for of in self.extensions] and self.rules.back
        longest = max(1 + back, *map(len, pending))
        context = min([len(row.sequence.kv_ids) + len(row.pending) for row in rows])
        steps = [row.steps for row in rows[:singles]] + [0] * (len(rows) - singles)
        forks = [fork for of in self.extensions for fork in of.forks(rows[:singles])]
        shape = self.steps.shape(len(rows) + len(forks), longest, context)
        return self.planner.plan(sequences, pending, steps, *shape, forks, back=back)

    def _take_steps(self, current: Round, control: Control | None) -> None:
        """Queue all steps after catch-up, and the copy of the picked tokens to the host."""
        current.taken = 1
        if control is None or not control.can_stop_early or self.parallel:
            with self.stopwatch:
                for number in range(1, current.plan.steps):
                    self._take_step(current, number)
        else:
            for number in range(1, current.plan.steps):
                peaks = self.steps.picked.read(number - 1, current.plan.active[number - 1])
                if not control.continue_drafting(current.looked_at(number, peaks)):
                    break
                with self.stopwatch:
                    self._take_step(current, number)
        current.fetched = self._receiver.fetch(self.steps.picked.kept[: current.taken])
        stand_ins = None if current.own.draws is None else current.own.draws.stand_ins
        if stand_ins is not None:
            current.stand_ins = self._receiver_own.fetch(stand_ins)

    def _take_step(self, current: Round, number: int) -> None:
        self._pick(current, number, self.steps.step(number))
        current.taken += 1
        self.forwards += not self.parallel

    def _pick(self, current: Round, number: int, logits: torch.Tensor) -> None:
        current.own.pick(logits, self.steps.picked, number)
        if current.plan.forks.size:
            for extension in self.extensions:
                extension.after_step(current, number)
