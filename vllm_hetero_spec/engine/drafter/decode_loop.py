# SPDX-License-Identifier: Apache-2.0
"""The decode loop of the drafter: one catch-up forward, then single-token steps.

`begin` queues a round without waiting for the device. All lengths are known on the host, and a step
feeds the tokens that the step before picked on the device. `finish` waits once, for the picked
tokens.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.graphs import Graphs
from vllm_hetero_spec.engine.drafter.model import DrafterModel, GraphSupport
from vllm_hetero_spec.engine.drafter.reading import read_in_parts, read_texts
from vllm_hetero_spec.engine.drafter.recorded_steps import RecordedSteps
from vllm_hetero_spec.engine.drafter.replaced_tokens import replace_first
from vllm_hetero_spec.engine.drafter.round import Round
from vllm_hetero_spec.engine.drafter.round_plan import STEPS_PER_TOKEN, BatchFeed, Planner
from vllm_hetero_spec.engine.drafter.slrs_spans import SlrsSpans
from vllm_hetero_spec.engine.drafter.steps import CaughtUp, EagerSteps, Forwards, Steps
from vllm_hetero_spec.engine.drafter.tasks import Control, DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.engine.drafter.token_choice import PickConfig, RowPickers, wide
from vllm_hetero_spec.engine.drafter.token_healing import CANDIDATE_BYTES, HealedStart, TokenHealing
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers
from vllm_hetero_spec.slrs.slrs import MergeSpan
from vllm_hetero_spec.staging import Receiver, Sender, Stopwatch

# requests; a larger round does not repeat its steps for a replaced first token, because they cost
# more than the rest of one draft gains (estimated).
_FEW = 2
# packets; upper bound for sampling, penalties and token healing in one round.
_OWN_PACKETS = 8


class Drafter:
    """Greedy and sampled drafting with a `DrafterModel`, one round at a time.

    A context may contain ids beyond `vocab_size` if both tokenizers are the same: a prompt may have
    padding ids of the target. The drafter reads id 0 instead.

    Args:
        vocab_size: Ids of the drafter's tokenizer. Embedding rows beyond are never drafted.
        lookahead: Largest draft length in target tokens.
        ends: Ids that end a draft.
        beside: Number of top candidates that are fetched for each position, for draft trees.
        token_healing: Allow drafts that replace the last token of a request by a longer one.

    Attributes:
        most_steps: Largest number of drafter tokens per request and round.
        waits: True on a device, where reading a result synchronizes.
        may_wait: Allow `begin` to synchronize; True with asynchronous scheduling.
        shortened_drafts: Drafts that were shortened to a replaced first token.
    """

    def __init__(
        self,
        model: DrafterModel,
        banned: Collection[int],
        vocab_size: int,
        lookahead: int,
        max_requests: int,
        sampling: SampledMethod | None = None,
        ends: frozenset[int] = frozenset(),
        confidences: bool = False,
        beside: int = 0,
        token_healing: bool = False,
    ) -> None:
        device = model.device
        self.model = model
        self.sampling, self.beside, self.max_length = sampling, beside, model.max_length
        self.most_steps = STEPS_PER_TOKEN * lookahead + 2
        self.forwards = self.restarted_rounds = self.shortened_drafts = 0
        self.waits, self.may_wait = device.type != "cpu", False
        self._stopwatch = Stopwatch(device)
        self._send = Sender(device).send
        self._send_own = Sender(device, _OWN_PACKETS).send
        with torch.inference_mode(mode=False):
            picked = PickBuffers(
                self.most_steps, max_requests, device, confidences=confidences, beside=beside
            )
        self._receiver = Receiver(device, 4 * picked.packet.numel())
        own = max(CANDIDATE_BYTES, 8 * self.most_steps)
        self._receiver_own = Receiver(device, max_requests * own)
        self._first = TokenHealing(self._receiver_own)
        self._rules = PickConfig(
            vocab_size=vocab_size,
            banned=torch.tensor(sorted(banned), dtype=torch.long, device=device),
            ends=ends,
            sampling=sampling,
            confidences=confidences,
            beside=beside,
            token_healing=token_healing,
        )
        self._planner = Planner(model.block_size)
        # A sender of its own: it sends in the middle of a round, whose packets must stay valid.
        self._forwards = Forwards(model, self._rules, Sender(device).send)
        self._steps: Steps = EagerSteps(model, self._rules, self._send, picked)
        self._round: Round | None = None

    def record(
        self, graphs: Graphs, shapes: Sequence[tuple[int, int]], support: GraphSupport
    ) -> None:
        """Record CUDA graphs for (requests, tokens per request), and use them from now on."""
        # Token healing feeds two tokens per request. If graphs take one token only, every catch-up
        # forward would run eagerly.
        self._rules = replace(
            self._rules, token_healing=self.token_healing and support.several_tokens
        )
        self._steps = RecordedSteps(
            self.model, self._rules, self._send, self._steps.picked, graphs, shapes, support
        )

    @property
    def token_healing(self) -> bool:
        """True if a draft may replace the last token of a request by a longer one."""
        return self._rules.token_healing

    @property
    def forward_seconds(self) -> float:
        """Seconds of all forwards so far, token picking included, measured on their device."""
        return self._stopwatch.seconds

    @property
    def replays(self) -> int:
        """Number of forwards so far that replayed a graph."""
        return self._steps.replays

    @torch.inference_mode()
    def begin(self, rows: Sequence[DraftRow], control: Control | None = None) -> None:
        """Feed the pending ids of every row and queue the draft steps. `finish` must follow.

        All pending ids may go into one forward. The caller limits their sum to its token budget. No
        row has more than `most_steps` steps. If `control` can stop early, it is called after every
        step, which synchronizes with the device.
        """
        spans = [False] * len(rows)
        if self.merges:
            spans = [row.steps > 0 and self.span(row.task).tokens > 1 for row in rows]
        order = sorted(range(len(rows)), key=lambda at: (spans[at], -rows[at].steps))
        self._steps.picked.wide = self.beside > 0 and wide(rows)
        rows = [rows[i] for i in order]
        if self.waits and any(row.choose for row in rows) and not self._first.due():
            rows = [row._replace(choose=None) for row in rows]
        read_in_parts(rows, self._steps, self._planner, self._stopwatch)
        singles = len(rows) - sum(spans)
        current = self._round = self._planned(rows, order, singles)
        with self._stopwatch:
            behind = self._steps.begin(current.plan)
            if copies := [copy for row in rows for copy in row.copies]:
                self.model.copy_blocks(copies)
        for row in rows:
            row.sequence.kv_ids.extend(row.pending)
        if behind.last is not None and current.own.draws and not current.plan.forks.size:
            self._judge_before_drawing(current, behind)
        if current.own or current.plan.forks.size:
            with self._stopwatch:
                current.own.pick(behind.logits, self._steps.picked, 0)
                current.own.branch_off(self._steps.picked, 0, self._steps.forks)
        self.forwards += 1
        if singles < len(rows):
            current.spans = self._along_spans(rows[singles:], behind.logits[singles:])
        if rows[0].steps and singles:
            self._queue_steps(current, behind, control)

    @torch.inference_mode()
    def finish(self) -> list[DrafterTokens]:
        """Wait for the round; return the drafter tokens of each row, in the order of `begin`."""
        current, self._round = self._round, None
        assert current is not None
        if current.candidates is not None and not current.taken:
            self._choose_first(current)
            self._take_steps(current, None)
            self._fetch(current)
        drafted = [DrafterTokens([])] * len(current.rows)
        if current.taken:
            drafted[: current.plan.active[0]] = self._collect(current)
        if current.spans:
            drafted[-len(current.spans) :] = current.spans
        restored = drafted.copy()
        for index, tokens in zip(current.order, drafted, strict=True):
            restored[index] = tokens
        return restored

    def run(self, rows: Sequence[DraftRow], control: Control | None = None) -> list[DrafterTokens]:
        """Run a whole round."""
        self.begin(rows, control)
        return self.finish()

    def has_room(self, places: int) -> bool:
        """Return True if a round of this many requests and forks fits buffers and graphs."""
        size = self._steps.picked.packet.shape[2]
        recorded = self._steps.shape(1, 1, 1).size > 0
        return places <= size and (not recorded or self._steps.shape(places, 1, 1).size > 0)

    @property
    def merges(self) -> bool:
        """True if sampled drafts use SLRS-n."""
        return self.sampling is not None and self.sampling.merging is not None

    def span(self, task: DraftTask) -> MergeSpan:
        """Return the merge span of a request; one token if the request does not use SLRS-n."""
        return self._rules.span(task)

    @torch.inference_mode()
    def step(self, batch: int) -> None:
        """Queue one decode step of a batch size, on the padding block, for timing."""
        nowhere, shape = self._planner.nowhere([1] * batch), self._steps.shape(batch, 1, 1)
        self._steps.begin(self._planner.plan(nowhere, [[0]] * batch, [1] * batch, *shape))

    @torch.inference_mode()
    def read(self, tokens: int) -> None:
        """Queue a prefill of this many tokens as in a round, on the padding block, for timing."""
        lengths = [min(self.max_length, tokens - at) for at in range(0, tokens, self.max_length)]
        nowhere, texts = self._planner.nowhere(lengths), [[0] * length for length in lengths]
        left = read_texts(nowhere, texts, self._steps, self._planner, nullcontext())
        shape = self._steps.shape(len(left), max(map(len, left)), min(lengths))
        self._steps.begin(self._planner.plan(nowhere, left, [1] * len(left), *shape))

    def _planned(self, rows: list[DraftRow], order: list[int], singles: int) -> Round:
        sequences, pending = [row.sequence for row in rows], [row.pending for row in rows]
        back = self.token_healing and any(row.choose is not None for row in rows)
        longest = max(1 + back, *map(len, pending))
        context = min([len(row.sequence.kv_ids) + len(row.pending) for row in rows])
        steps = [row.steps for row in rows[:singles]] + [0] * (len(rows) - singles)
        forks = [row.forks for row in rows[:singles]]
        num_forks = sum(map(len, forks))
        shape = self._steps.shape(len(rows) + num_forks, longest, context)
        forks = forks if num_forks else []
        plan = self._planner.plan(sequences, pending, steps, *shape, forks, back=back)
        own = RowPickers(rows[:singles], self._rules, self._send_own, plan)
        return Round(rows, order, plan, own)

    def _queue_steps(self, current: Round, behind: CaughtUp, control: Control | None) -> None:
        """Queue everything after catch-up, up to the copy of the picked tokens to the host.

        Token healing checks first tokens on the host. On a CPU it does so before the steps. On a
        device the steps are queued first. If a first token was replaced, a small round repeats
        them. A large round shortens the draft to that token. The check precedes the steps if tokens
        are often replaced. It also does if the round samples or has penalties, because its steps
        cannot be repeated.
        """
        if current.others is not None:
            self._begin_with(current, current.others)
        elif any(row.choose for row in current.rows):
            with self._stopwatch:
                current.candidates = self._first.fetch(behind, current.plan.active[0])
            often = self._first.heals_often(current.plan.active[0])
            if not self.waits or current.own or (often and self.may_wait):
                self._choose_first(current)
            elif often:
                return
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
            peaks = self._steps.picked.read(number - 1, current.plan.active[number - 1])
            if not control.continue_drafting(current.looked_at(number, peaks)):
                break
            with self._stopwatch:
                self._take_step(current, number)

    def _take_step(self, current: Round, number: int) -> None:
        picked, own = self._steps.picked, current.own
        if own:
            own.feed(picked.ids(number - 1, current.plan.active[number]))
        own.pick(self._steps.step(number), picked, number)
        own.branch_off(picked, number, self._steps.forks)
        current.taken += 1
        self.forwards += 1

    def _fetch(self, current: Round) -> None:
        current.fetched = self._receiver.fetch(self._steps.picked.kept[: current.taken])
        stand_ins = None if current.own.draws is None else current.own.draws.stand_ins
        if stand_ins is not None:
            current.stand_ins = self._receiver_own.fetch(stand_ins)

    def _choose_first(self, current: Round) -> None:
        self._begin_with(current, self._others(current))

    def _others(self, current: Round) -> dict[int, HealedStart]:
        """Return the replaced first tokens by row. Waits for the copy of the candidates."""
        assert current.candidates is not None
        candidates, current.candidates = current.candidates, None
        return self._first.choose(current.rows, candidates)

    def _judge_before_drawing(self, current: Round, behind: CaughtUp) -> None:
        """Choose first tokens before sampling.

        A draft that replaces the last token of its request becomes greedy, because the first bytes
        of its first token are given.
        """
        count, rows = current.plan.active[0], current.rows
        candidates = self._first.fetch(behind, count)
        current.others = self._first.choose(rows, candidates, drawn=True)
        given = [index for index, other in current.others.items() if other.known]
        if any(rows[index].task.draw is not None for index in given):
            for index in given:
                rows[index] = rows[index].greedy()
            current.own = RowPickers(rows[:count], self._rules, self._send_own, current.plan)

    def _begin_with(self, current: Round, others: dict[int, HealedStart]) -> None:
        if others:
            replace_first(current, others, self._steps, self._planner, self._send_own)

    def _collect(self, current: Round) -> list[DrafterTokens]:
        others = {} if current.candidates is None else self._others(current)
        if others and current.plan.active[0] <= _FEW:
            self.restarted_rounds += 1
            self._begin_with(current, others)
            self._steps.again()
            self._take_steps(current, None)
            self._fetch(current)
        else:
            self.shortened_drafts += len(others)
            current.cut = others
        return current.drafted(self._rules.confidences, self._rules.ends, self.sampling)

    def _along_spans(self, rows: Sequence[DraftRow], logits: torch.Tensor) -> list[DrafterTokens]:
        spans = SlrsSpans(rows, self._rules, self._planner, self._feed, self._send_own)
        return spans.run(logits)

    def _feed(self, feed: BatchFeed, table: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        self.forwards += 1
        with self._stopwatch:
            return self._forwards.feed(feed, table, lengths)
