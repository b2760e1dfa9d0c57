# SPDX-License-Identifier: Apache-2.0
"""Run one drafting round of a batch: admission, catch-up, drafting, translation.

The lookahead counts target tokens, and the number of drafter tokens that they need depends on the
text. A round therefore drafts the expected number and translates it. On a CPU it continues for
requests whose draft is still too short.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_hetero_spec.draft.draft import Draft, confidences_of
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.requests import UNSTABLE_TAIL, RequestState
from vllm_hetero_spec.engine.drafter.tasks import (
    Control,
    DrafterTokens,
    DraftRow,
    DraftTask,
    DraftTiming,
)
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.text.bridge import Bridge

# steps; pause of a request after the pool had no blocks for it.
_STEPS_BETWEEN_TRIES = 8
# tokens; with a context of this length, the context and the pair have equal weight in the ratio.
# Measured ratio of variances (per token within a text / between texts) for seven pairs of
# tokenizers: 6 to 74, median 34.
_EVEN = 32


class DraftLength:
    """Plans the number of drafter tokens that cover a draft's target tokens.

    On a CPU a request takes part in the steps of its own draft only, and a round continues if a
    draft is too short. The plan of a request therefore uses the ratio of its own context. On a
    device a round runs without the host, and is as long as its longest draft. All plans therefore
    use the mean ratio of the round.
    """

    def __init__(self, bridge: Bridge, drafter: Drafter) -> None:
        self._bridge, self._drafter = bridge, drafter

    def mean_ratio(self, tasks: Sequence[DraftTask]) -> float:
        """Return drafter tokens per target token, as the mean over the round's greedy drafts.

        The weight of a request's own ratio against the pair's grows with the length of its context.
        """
        texts = [task.state.context for task in tasks if task.lookahead and task.draw is None]
        pair = self._bridge.tokens_ratio
        if not texts:
            return pair
        known = ((text.ratio - pair) * len(text.ids) / (len(text.ids) + _EVEN) for text in texts)
        return pair + sum(known) / len(texts)

    def steps(self, task: DraftTask, room: int, mean_ratio: float) -> int:
        """Return the number of drafter steps that cover a request's lookahead in one round.

        The result is at most `room`. A CPU does not use `mean_ratio`.
        """
        if not task.lookahead:
            return 0
        if task.draw is not None:  # one step per sampled target token
            steps = task.lookahead
            for extension in self._drafter.extensions:
                steps = extension.steps(task, steps)
            return min(room, steps)
        ratio = mean_ratio if self._drafter.waits else task.state.context.ratio
        needed = task.lookahead * ratio
        if self._drafter.parallel and not self._drafter.waits:
            return min(room, math.ceil(needed) + 1)  # one more completes the last target token
        # As a forward of its own, such a step costs more than it gains.
        return min(room, max(1, round(needed)))

    def most_steps(self, task: DraftTask) -> int:
        """Return the upper bound of a greedy draft's drafter steps, over all its rounds."""
        room = self._drafter.max_length - len(task.state.context.ids)
        return min(room, math.ceil(2 * task.lookahead * max(1.0, task.state.context.ratio)) + 1)


@dataclass(slots=True)
class _Greedy:
    """A greedy draft in progress, over one or more rounds; `row` belongs to the newest one."""

    row: DraftRow
    steps: int
    drafted: Sequence[int]
    known: int
    peaks: Sequence[float]
    proposal: list[int] = field(init=False)


class _Round(NamedTuple):
    """A round between `begin` and `finish`, with the counters and the time of its start."""

    rows: list[DraftRow]
    control: Control
    before: tuple[float, ...]
    began: float
    seconds: float


class DraftBatchRunner:
    """Runs the rounds of one drafter. A round reads at most `budget` context tokens."""

    def __init__(
        self, bridge: Bridge, drafter: Drafter, pool: KVPool, stats: DraftStats, budget: int
    ) -> None:
        self._bridge = bridge
        self._drafter = drafter
        self._pool = pool
        self._stats = stats
        self._budget = budget
        self._length = DraftLength(bridge, drafter)
        self._round: _Round | None = None

    def begin(
        self, tasks: Sequence[DraftTask], outside: Iterator[RequestState], control: Control
    ) -> None:
        """Admit requests and begin a round. `finish` must follow.

        Args:
            tasks: Requests with updated context and aligned KV.
            outside: Requests outside the batch. The round may take their KV blocks.
            control: Decides between drafter steps whether to continue, and receives the timing.
        """
        before, began = self._counts(), time.perf_counter()
        rows = self._admit(tasks, outside)
        if rows:
            for extension in self._drafter.extensions:
                extension.admit(rows)
            self._drafter.begin(rows, control)
        self._round = _Round(rows, control, before, began, time.perf_counter() - began)

    def finish(self) -> list[Draft]:
        """Finish the round and return a draft in target tokens for each drafted request."""
        current, self._round = self._round, None
        assert current is not None
        began = time.perf_counter()
        drafts = self._drafts(current) if current.rows else []
        # With asynchronous scheduling, the time between `begin` and `finish` counts as well. In a
        # step without drafts the target's forward hides that host work.
        began = current.began if self._drafter.may_wait else began - current.seconds
        took = time.perf_counter() - began
        seconds, apart, *counts = (
            now - then for now, then in zip(self._counts(), current.before, strict=True)
        )
        forwards, picked, caught_up, completed = map(int, counts)
        if self._drafter.parallel:  # the time of a forward depends on the requests alone
            picked = sum(row.steps > 0 for row in current.rows)
        overhead = max(0.0, took - seconds - apart)
        timing = DraftTiming(seconds, overhead, forwards, picked, caught_up, completed, apart)
        current.control.drafted(timing, drafts)
        return drafts

    def _counts(self) -> tuple[float, ...]:
        drafter, stats = self._drafter, self._stats
        seconds = sum([of.seconds for of in drafter.extensions])
        completed = sum([of.completed for of in drafter.extensions])
        counts = drafter.forwards, stats.drafter_tokens, stats.catch_up_tokens, completed
        return drafter.stopwatch.seconds, seconds, *counts

    def _drafts(self, current: "_Round") -> list[Draft]:
        rows, control = current.rows, current.control
        drafted = self._drafter.finish()
        self._publish(rows, drafted)
        drafts: list[Draft] = []
        greedy: list[_Greedy] = []
        for row, tokens in zip(rows, drafted, strict=True):
            if not row.steps:
                continue
            self._count(row.task, tokens)
            if tokens.proposal is None:
                made = tokens.tokens, tokens.known, tokens.confidences
                greedy.append(_Greedy(row.greedy(), row.steps, *made))
            else:
                drafts.append(tokens.proposal)
        drafts += self._cover(greedy, control) if greedy else []
        for extension in self._drafter.extensions:
            drafts = extension.complete(drafts)
        return drafts

    def _admit(self, tasks: Sequence[DraftTask], outside: Iterator[RequestState]) -> list[DraftRow]:
        """Assign token budget and KV blocks.

        Requests with drafts come first, and among them those with the shortest catch-up.
        """
        rows, budget, drafter = [], self._budget, self._drafter
        ratio = self._length.mean_ratio(tasks)
        for task in sorted(tasks, key=lambda task: (not task.lookahead, task.state.num_uncached)):
            state, start, known = task.state, task.state.num_kv_valid, task.state.context.ids
            room, pending = drafter.max_length - len(known), len(known) - start
            if room < bool(task.lookahead):
                self._skip(task, "drafter_length")
                continue
            steps = self._length.steps(task, min(room, drafter.most_steps), ratio)
            if pending > budget:
                self._skip(task, "catching_up")
                pending, steps = budget, 0
            if not pending:
                continue
            if not self._reserve(state, pending + steps, outside):
                self._skip(task, "no_blocks")
                state.wait = _STEPS_BETWEEN_TRIES
                state.close(self._pool)
                continue
            budget -= pending
            assert state.sequence is not None
            ids = known[start : start + pending]
            rows.append(DraftRow(task, state.sequence, ids, steps))
        self._stats.catch_up_tokens += self._budget - budget
        return rows

    def _reserve(self, state: RequestState, tokens: int, outside: Iterator[RequestState]) -> bool:
        """Grow a request's KV by `tokens`. If blocks are missing, close requests of `outside`."""
        assert state.sequence is not None
        need = len(state.sequence.kv_ids) + tokens
        while not self._pool.grow(state.sequence.table, need):
            other = next(outside, None)
            if other is None:
                return False
            other.close(self._pool)
        return True

    def _publish(self, rows: Sequence[DraftRow], drafted: Sequence[DrafterTokens]) -> None:
        """Publish the KV of the caught-up context for prefix reuse."""
        for row, tokens in zip(rows, drafted, strict=True):
            state = row.task.state
            state.num_kv_valid += len(row.pending) - bool(tokens.known)
            row.sequence.table.sound = bool(row.steps)  # no steps: its logits are not checked
            if tokens.finite:
                stable = state.num_kv_valid - UNSTABLE_TAIL
                self._pool.publish(row.sequence.table, state.context.ids, stable)

    def _cover(self, every: Sequence[_Greedy], control: Control) -> list[Draft]:
        """Translate greedy drafts. Continue those that are shorter than their lookahead."""
        making = every
        self._translate(making)
        while making := [made for made in making if self._goes_on(made)]:
            drafted = self._drafter.run([made.row for made in making], control)
            for made, tokens in zip(making, drafted, strict=True):
                self._count(made.row.task, tokens)
                made.drafted = [*made.drafted, *tokens.tokens]
                made.peaks = [*made.peaks, *tokens.confidences]
            self._translate(making)
        return [
            Draft.chain(made.row.task.req_id, made.proposal, self._confidences(made))
            for made in every
        ]

    def _translate(self, drafts: Sequence[_Greedy]) -> None:
        began = time.perf_counter()
        proposals = self._bridge.to_target(
            [made.row.task.state.context for made in drafts],
            [made.drafted for made in drafts],
            [made.row.task.lookahead for made in drafts],
            [made.known for made in drafts],
        )
        self._stats.translate_seconds += time.perf_counter() - began
        for made, proposal in zip(drafts, proposals, strict=True):
            made.proposal = proposal

    def _goes_on(self, made: _Greedy) -> bool:
        """Plan another round for a draft that is too short. Return True if one is planned."""
        row, drafted = made.row, made.drafted
        missing = row.task.lookahead - len(made.proposal)
        if self._drafter.waits or self._drafter.parallel or missing <= 0:
            return False
        stopped = len(drafted) < made.steps  # logits were not finite, or the controller stopped
        ended = not self._bridge.drafter_eos.isdisjoint(drafted)
        if stopped or ended or (left := self._length.most_steps(row.task) - made.steps) <= 0:
            return False
        steps = max(1, round(missing * len(drafted) / (len(made.proposal) or 1)))
        steps = min(left, steps, self._drafter.most_steps)
        if not self._pool.grow(row.sequence.table, len(row.sequence.kv_ids) + 1 + steps):
            return False
        made.steps += steps
        made.row = DraftRow(row.task, row.sequence, drafted[-1:], steps)
        return True

    def _confidences(self, made: _Greedy) -> list[float]:
        """Return the confidence of each proposed target token; empty without confidences."""
        if not made.peaks:
            return []
        known = made.known + len(made.row.task.state.context.held)
        covering = self._bridge.ids_covering(made.drafted, made.proposal, known)
        return confidences_of(made.peaks, covering)

    def _count(self, task: DraftTask, tokens: DrafterTokens) -> None:
        self._stats.drafter_tokens += len(tokens.tokens)
        if not tokens.finite:
            self._skip(task, "nan_logits")
            self._pool.suspect()
            task.state.retire("nan_logits", self._pool)

    def _skip(self, task: DraftTask, reason: str) -> None:
        if task.lookahead:
            self._stats.skip(reason)
