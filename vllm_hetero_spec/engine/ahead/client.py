# SPDX-License-Identifier: Apache-2.0
"""Drafts from a drafter process, which drafts while the target verifies the previous drafts.

After each target step, `Lookup` searches a shared table for continuations that start with the
tokens that the target has just emitted. The rest of a match is the next draft; it only needs
translation. The client then sends the new state of each request and the draft under verification,
and the process drafts on from there. If nothing matches, the client waits for a new draft if that
pays. Otherwise the request has no draft for one step.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.ahead.control import PrecomputedDrafts
from vllm_hetero_spec.engine.ahead.deployment import Deployment
from vllm_hetero_spec.engine.ahead.lookup import (
    Lookup,
    LookupResult,
    bytes_of_tokens,
    ids_for_each,
    text_of,
)
from vllm_hetero_spec.engine.ahead.messages import MOST_IDS, MOST_ROWS, RequestUpdate, UpdateBatch
from vllm_hetero_spec.engine.ahead.remote_requests import RemoteRequests
from vllm_hetero_spec.engine.ahead.sampled_records import SampledRecordDecoder
from vllm_hetero_spec.engine.ahead.supervisor import SupervisedProcess
from vllm_hetero_spec.engine.drafter.requests import RequestState
from vllm_hetero_spec.engine.drafter.tasks import Control, DraftTask, DraftTiming
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair

_A_MOMENT = 1e-4  # seconds between two look-ups while waiting
_LONGEST_FORWARD = 10.0  # seconds; timeout of a forward that is timed at start-up
# The serial after this one is 1. The table stores it as int32, and 0 means "never sent".
_LAST_SERIAL = 2**31 - 1
_FADE = 0.05  # weight of the newest look-up in `hit_rate`


class ProcessSource:
    """A `DraftSource` whose drafter runs in a process of its own.

    The constructor waits until the process has loaded the drafter.

    Args:
        max_length: Maximum drafter tokens of a request's context.
        drawn: Decoder of sampled drafts; None if all drafts are greedy.

    Raises:
        ConfigError: The process cannot load the drafter.
    """

    early = True  # `begin` does not wait

    def __init__(
        self,
        deployment: Deployment,
        pair: TokenizerPair,
        stats: DraftStats,
        max_length: int,
        drawn: SampledRecordDecoder | None,
    ) -> None:
        self.draws = drawn is not None
        self._stats = stats
        self._some_id = next(iter(bytes_of_tokens(pair)))
        self._process = SupervisedProcess(deployment)
        self._look = Lookup(self._process, pair, stats, drawn)
        ready = self._process.start()
        self.pool = RemoteRequests(deployment.slots, ready.num_blocks - 1, ready.block_size)
        self.max_length, self.most_steps = max_length, deployment.longest
        self._most_rows = deployment.most_rows
        self._serial = 0
        # Between `begin` and `finish`.
        self._control: PrecomputedDrafts
        self._found: list[LookupResult] = []
        self._took = 0.0
        self._before = self._process.counts  # at the previous step
        self._unheard = -1  # `Counts.beats` at the last wait without a result, or -1

    def begin(
        self, tasks: Sequence[DraftTask], outside: Iterator[RequestState[Any]], control: Control
    ) -> None:
        began = time.perf_counter()
        self._control, self._found = cast(PrecomputedDrafts, control), []
        if self._process.up:
            tasks = [task for task in tasks if self._admit(task, outside)]
            self._found = [self._look_up(task) for task in tasks]
            self._look.translate(self._found)
            self._commit(self._found)
        else:
            self._stats.skip("drafter_down", times=sum(task.lookahead > 0 for task in tasks))
        self._took = time.perf_counter() - began

    def finish(self) -> list[Draft]:
        began, waited = time.perf_counter(), self._stats.wait_seconds
        found, self._found = self._found, []
        came = self._waited([of for of in found if of.missing])
        waited = self._stats.wait_seconds - waited
        if came:
            self._commit(came)
        late = {of.task.req_id: of for of in came}
        found = [late.get(of.task.req_id, of) for of in found]
        for of in found:
            self._stats.skip(of.missing, times=bool(of.missing))
        drafts = [of.draft for of in found if of.task.lookahead]
        if found:
            overhead = self._took + time.perf_counter() - began - waited
            self._report_timing(waited, overhead, drafts)
        return drafts

    def record(self) -> int:
        """Return 0, because the process records its own CUDA graphs."""
        return 0

    def step(self, batch: int) -> None:
        """Includes the time of the messages to and from the process."""
        self._forward([[self._some_id]] * batch)

    def read(self, tokens: int) -> None:
        self._forward([[self._some_id] * tokens])

    def reset(self) -> None:
        self._found = []
        self.pool.reset()

    def sleep(self, level: int) -> None:
        """At level 2 the process ends, which frees its device memory."""
        if level >= 2:
            self._process.rest()
        elif self._process.up and self._process.send(UpdateBatch(0, [*self.pool.closed], [])):
            self.pool.closed.clear()

    def wake(self) -> None:
        """Requests continue without drafts until the process has loaded the drafter."""
        self._process.wake()

    def close(self) -> None:
        self._process.rest()

    def export_to(self, stats: DraftStats) -> None:
        counts = self._process.done
        stats.restarts, stats.forwards = self._process.restarts, counts.forwards
        stats.drafter_tokens, stats.kv_blocks_held = counts.tokens, counts.blocks
        stats.catch_up_tokens, stats.graph_forwards = counts.caught_up, counts.replays
        stats.reused_tokens, stats.forward_seconds = counts.reused, counts.seconds

    def _admit(self, task: DraftTask, outside: Iterator[RequestState[Any]]) -> bool:
        """Return True if the request has a slot. It may take the slot of one in `outside`."""
        text = text_of(task)
        while not self.pool.admit(text):
            other = next(outside, None)
            if other is None:
                self._stats.skip("no_blocks", times=bool(task.lookahead))
                return False
            other.close(self.pool)
        return True

    def _look_up(self, task: DraftTask) -> LookupResult:
        """Look up the precomputed draft of a request, and count the result."""
        text = text_of(task)
        if not text.serial or text.life != self._process.life:
            text.sent.clear()  # the current process does not have it
            task.state.num_kv_valid = text.serial = 0
            return LookupResult(task, missing="not_ready" if task.lookahead else "")
        found = self._look.behind(task)
        if task.lookahead:
            hit = bool(found.ids)
            self._stats.hit_rate += _FADE * (hit - self._stats.hit_rate)
            self._stats.drafts_ahead += hit
            self._stats.drafts_guessed += found.rank > 0
            if hit or found.missing == "not_guessed":
                self._control.looked_up(found.rank if hit else None, self._stats.guesses)
        return found

    def _waited(self, missing: Sequence[LookupResult]) -> list[LookupResult]:
        """Wait for missing drafts if that pays. Return those that arrived."""
        told = [of for of in missing if of.text.serial == self._serial]
        beats = self._process.counts.beats
        if not told or beats == self._unheard:
            return []
        lookaheads = {of.task.req_id: of.task.lookahead for of in told}
        unread = sum(of.text.unread for of in told)
        wrong = {of.task.req_id for of in told if of.missing == "not_guessed"}
        each = max(ids_for_each(of.task) for of in told)
        tokens, seconds = self._control.wait(lookaheads, each, unread, wrong)
        if not tokens:
            return []
        began, came, left = time.perf_counter(), list[LookupResult](), told
        while left:
            time.sleep(_A_MOMENT)
            late = time.perf_counter() - began > seconds
            looked, left = [self._look.behind(of.task) for of in left], []
            for of in looked:
                if not late and not self._look.done(of, math.ceil(tokens * ids_for_each(of.task))):
                    left.append(of)
                elif of.ids:
                    came.append(of)
        self._unheard = -1 if came else self._process.counts.beats
        self._stats.drafts_waited += len(came)
        self._stats.wait_seconds += time.perf_counter() - began
        self._look.translate(came)
        return came

    def _commit(self, found: Sequence[LookupResult]) -> None:
        """Send the new state of each request, with the draft that the target verifies next."""
        self._serial = self._serial % _LAST_SERIAL + 1
        rows, room, guesses = [], MOST_IDS, self._guesses(found)
        if len(found) > MOST_ROWS:  # those sent most recently wait for the next step
            found = sorted(found, key=lambda of: of.text.serial)[:MOST_ROWS]
        for of in found:
            if room <= 0:
                break
            row = self._update_of(of, room, guesses)
            rows.append(row)
            room -= len(row.ids) + len(row.drafted)
        if not self._process.send(UpdateBatch(self._serial, [*self.pool.closed], rows)):
            return  # earlier messages are unread: try again in the next step
        self.pool.closed.clear()
        for of, row in zip(found, rows, strict=False):
            state, text = of.task.state, of.text
            assert state.sequence is not None
            text.sent = state.sequence.kv_ids
            text.sent += row.ids
            text.unread = len(row.ids)
            state.num_kv_valid += len(row.ids)
            text.serial, text.life, text.gone = self._serial, self._process.life, []
            text.drafted, text.peaks = row.drafted, [*of.peaks[: len(row.drafted)]]
            text.rows, text.seen = [*of.rows[: len(row.drafted)]], min(text.seen, row.at_stake)

    def _update_of(self, of: LookupResult, room: int, guesses: int) -> RequestUpdate:
        """Make the update of a request, with at most `room` new ids of its text."""
        state, text = of.task.state, of.text
        ids = state.context.ids[state.num_kv_valid :][:room]
        whole = state.num_kv_valid + len(ids) == len(state.context.ids)
        drafted = [*of.ids] if whole and not of.known else []
        wanted = self._wanted(of.task, 2) if whole else 0
        beside = self._wanted(of.task, 1) if whole else 0
        return RequestUpdate(
            slot=text.slot,
            keep=state.num_kv_valid if text.serial else -1,
            ids=ids,
            drafted=drafted,
            wanted=wanted,
            at_stake=of.ends[-1] if drafted and of.ends else 0,
            beside=beside,
            guesses=guesses if beside else 0,
            salt=state.salt,
            draw=of.task.draw,
        )

    def _guesses(self, found: Sequence[LookupResult]) -> int:
        """Choose the number of branches beside each chain."""
        tasks = [of.task for of in found if of.task.lookahead]
        if not tasks:
            return 0
        most = min(self._process.table.branches, self._most_rows // len(tasks) - 1)
        longest, each = max(of.lookahead for of in tasks), max(map(ids_for_each, tasks))
        self._stats.guesses = self._control.guesses(len(tasks), longest, each, max(most, 0))
        return self._stats.guesses

    def _report_timing(self, waited: float, overhead: float, drafts: Sequence[Draft]) -> None:
        now, before = self._process.counts, self._before
        self._before = now
        forwards, seconds = now.forwards - before.forwards, now.seconds - before.seconds
        if forwards <= 0 or seconds <= 0:  # no forward, or a restarted process
            forwards, exposed = 0, 0.0
        else:
            exposed = waited * forwards / seconds
        tokens = now.tokens - before.tokens
        fed = max(0, now.read - before.read - tokens)
        timing = DraftTiming(seconds, overhead, forwards, tokens, fed, exposed=exposed)
        self._control.drafted(timing, drafts)

    def _forward(self, texts: Sequence[list[int]]) -> None:
        """Have the process run a forward over made-up contexts, and wait for the result."""
        self._serial = self._serial % _LAST_SERIAL + 1
        salt = f"timing {self._serial}"
        rows = [RequestUpdate(slot, -1, ids, [], 1, salt=salt) for slot, ids in enumerate(texts)]
        if not self._process.send(UpdateBatch(self._serial, [], rows)):
            raise RuntimeError("the drafter process does not read messages")
        self.pool.closed |= {row.slot for row in rows}  # by the next message
        deadline = time.perf_counter() + _LONGEST_FORWARD
        for row in rows:
            while (of := self._process.table.read(row.slot)) is None or of.serial != self._serial:
                if time.perf_counter() > deadline:
                    raise TimeoutError("the drafter's process does not answer")
                time.sleep(_A_MOMENT)
        self._before = self._process.counts

    def _wanted(self, task: DraftTask, drafts: int) -> int:
        """Drafter tokens for `drafts` drafts, and the target's own token before or between them."""
        if not task.lookahead:
            return 0
        tokens = drafts * task.lookahead + 1
        return min(self.most_steps, math.ceil(tokens * ids_for_each(task)) + 1)
