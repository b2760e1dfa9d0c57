# SPDX-License-Identifier: Apache-2.0
"""Drafts made by a drafter in a process of its own, while the target verifies the ones before.

After a step of the target, a request's next draft is what has been drafted behind the text that the
step has written, if that is among what was drafted ahead: a look into a table, and a translation.
Then the process is told what the texts are now, and what is taken to come; it drafts on behind
that. Where a text went another way, its draft is waited for if that pays, or the request left to
the target for a step.

Drafts of sampled requests are sampled if the method allows that (`sampled_records.py`), and greedy
otherwise. Whatever the process does, or does not, the target decides what is written.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import cast

from vllm_hetero_spec.draft.draft import Draft
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
from vllm_hetero_spec.engine.draft_source import WaitPolicy
from vllm_hetero_spec.engine.drafter.requests import RequestState
from vllm_hetero_spec.engine.drafter.tasks import Control, DraftTask, DraftTiming
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair

_A_MOMENT = 1e-4  # seconds between two looks into the table
_LONGEST_FORWARD = 10.0  # seconds that one is waited for at start-up
# Of a commit; behind it comes 1 again. The table has four bytes for it, and 0 is none.
_LAST_SERIAL = 2**31 - 1
_FADE = 0.05  # weight of the newest look-up in `hit_rate`


class ProcessSource:
    """A drafter in a process of its own. See `DraftSource`.

    Args:
        deployment: What it runs.
        pair: The two tokenizers.
        stats: Counters to add to.
        max_length: Most drafter tokens of a text.
        drawn: Makes drafts of what was drawn; None where all are greedy.

    Raises:
        ConfigError: The process cannot load the drafter.
    """

    early = True  # up to the waiting

    def __init__(
        self,
        deployment: Deployment,
        pair: TokenizerPair,
        stats: DraftStats,
        max_length: int,
        drawn: SampledRecordDecoder | None,
    ) -> None:
        self.draws = drawn is not None
        self._bridge, self._stats = pair.bridge, stats
        self._some_id = next(iter(bytes_of_tokens(pair)))
        self._process = SupervisedProcess(deployment)
        self._look = Lookup(self._process, pair, stats, drawn)
        ready = self._process.start()
        self.pool = RemoteRequests(deployment.slots, ready.num_blocks - 1, ready.block_size)
        self.max_length, self.most_steps = max_length, deployment.longest
        self._most_rows = deployment.most_rows
        self._serial = 0
        # Of the step that was begun.
        self._control: WaitPolicy
        self._found: list[LookupResult] = []
        self._took = 0.0
        self._before = self._process.counts  # in the step before
        self._unheard = -1  # signs of life when it was waited for in vain

    def begin(
        self, tasks: Sequence[DraftTask], outside: Iterator[RequestState], control: Control
    ) -> None:
        """See `DraftSource`: look drafts up, and tell the process what the texts are now."""
        began = time.perf_counter()
        self._control, self._found = cast(WaitPolicy, control), []
        if self._process.up:
            tasks = [task for task in tasks if self._admit(task, outside)]
            self._found = [self._look_up(task) for task in tasks]
            self._look.translate(self._found)
            self._commit(self._found)
        else:
            self._stats.skip("drafter_down", times=sum(task.lookahead > 0 for task in tasks))
        self._took = time.perf_counter() - began

    def finish(self) -> list[Draft]:
        """See `DraftSource`: wait for drafts that were not foreseen, where that pays."""
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
        """See `DraftSource`: the process records its own."""
        return 0

    def step(self, batch: int) -> None:
        """See `DraftSource`: a forward of the process, and the way there and back."""
        self._forward([[self._some_id]] * batch)

    def read(self, tokens: int) -> None:
        """See `DraftSource`."""
        self._forward([[self._some_id] * tokens])

    def reset(self) -> None:
        """See `DraftSource`."""
        self._found = []
        self.pool.reset()

    def sleep(self, level: int) -> None:
        """See `DraftSource`: at level 2 the process ends, and its memory is free."""
        if level >= 2:
            self._process.rest()
        elif self._process.up and self._process.send(UpdateBatch(0, [*self.pool.closed], [])):
            self.pool.closed.clear()

    def wake(self) -> None:
        """See `DraftSource`: it is loaded while requests go on undrafted."""
        self._process.wake()

    def close(self) -> None:
        """See `DraftSource`."""
        self._process.rest()

    def export_to(self, stats: DraftStats) -> None:
        """See `DraftSource`."""
        counts = self._process.done
        stats.restarts, stats.forwards = self._process.restarts, counts.forwards
        stats.drafter_tokens, stats.kv_blocks_held = counts.tokens, counts.blocks
        stats.catch_up_tokens, stats.graph_forwards = counts.caught_up, counts.replays
        stats.reused_tokens, stats.forward_seconds = counts.reused, counts.seconds

    def _admit(self, task: DraftTask, outside: Iterator[RequestState]) -> bool:
        """Whether a request has a slot; one outside the batch gives its own up for it."""
        text = text_of(task)
        while not self.pool.admit(text):
            other = next(outside, None)
            if other is None:
                self._stats.skip("no_blocks", times=bool(task.lookahead))
                return False
            other.close(self.pool)
        return True

    def _look_up(self, task: DraftTask) -> LookupResult:
        """What was drafted ahead behind a request's text as it is now; counted."""
        text = text_of(task)
        if not text.serial or text.life != self._process.life:
            self._begin_anew(task)
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
        """What came of drafts that were not there, if they are worth waiting for."""
        told = [of for of in missing if of.text.serial == self._serial]
        beats = self._process.counts.beats
        if not told or beats == self._unheard:
            return []
        ratios = [ids_for_each(of.task) for of in told]
        lookaheads = {of.task.req_id: of.task.lookahead for of in told}
        unread = sum(of.text.unread for of in told)
        wrong = {of.task.req_id for of in told if of.missing == "not_guessed"}
        tokens, seconds = self._control.wait(lookaheads, max(ratios), unread, wrong)
        if not tokens:
            return []
        began, came, left = (
            time.perf_counter(),
            list[LookupResult](),
            list(zip(told, ratios, strict=True)),
        )
        while left:
            time.sleep(_A_MOMENT)
            late = time.perf_counter() - began > seconds
            looked = [(self._look.behind(of.task), ratio) for of, ratio in left]
            ended = [late or self._look.done(of, math.ceil(tokens * ratio)) for of, ratio in looked]
            came += [of for (of, _), end in zip(looked, ended, strict=True) if end and of.ids]
            left = [pair for pair, end in zip(looked, ended, strict=True) if not end]
        self._unheard = -1 if came else self._process.counts.beats
        self._stats.drafts_waited += len(came)
        self._stats.wait_seconds += time.perf_counter() - began
        self._look.translate(came)
        return came

    def _begin_anew(self, task: DraftTask) -> None:
        """The process knows nothing of a text, or is another one than that which did."""
        text, state = text_of(task), task.state
        assert state.sequence is not None
        state.sequence.kv_ids.clear()
        state.num_kv_valid = text.serial = 0

    def _commit(self, found: Sequence[LookupResult]) -> None:
        """Tell the process what the texts are, and what the target is about to verify."""
        self._serial = self._serial % _LAST_SERIAL + 1
        rows, room, guesses = [], MOST_IDS, self._guesses(found)
        if len(found) > MOST_ROWS:  # those that were told of last are told of next time
            found = sorted(found, key=lambda of: of.text.serial)[:MOST_ROWS]
        for of in found:
            state, text = of.task.state, of.text
            if room <= 0:
                break
            ids = state.context.ids[state.num_kv_valid :][:room]
            whole = state.num_kv_valid + len(ids) == len(state.context.ids)
            drafted = of.ids if whole and not of.known else []
            room -= len(ids) + len(drafted)
            wanted = self._wanted(of.task, 2) if whole else 0
            beside = self._wanted(of.task, 1) if whole else 0
            branches = guesses if beside else 0
            at_stake = of.ends[-1] if drafted and of.ends else 0
            keep = state.num_kv_valid if text.serial else -1
            told = (text.slot, keep, ids, [*drafted], wanted, at_stake, beside, branches, text.salt)
            rows.append(RequestUpdate(*told, of.task.draw))
        if not self._process.send(UpdateBatch(self._serial, [*self.pool.closed], rows)):
            return  # it has not read the last ones: told next time
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

    def _guesses(self, found: Sequence[LookupResult]) -> int:
        """Lines beside the chain of each request that is drafted for."""
        tasks = [of.task for of in found if of.task.lookahead]
        if not tasks:
            return 0
        most = min(self._process.table.branches, self._most_rows // len(tasks) - 1)
        longest, each = max(of.lookahead for of in tasks), max(map(ids_for_each, tasks))
        self._stats.guesses = self._control.guesses(len(tasks), longest, each, max(most, 0))
        return self._stats.guesses

    def _report_timing(self, waited: float, overhead: float, drafts: Sequence[Draft]) -> None:
        """Tell the controller what was done since the step before, and what was waited for."""
        now, before = self._process.counts, self._before
        self._before = now
        forwards, seconds = now.forwards - before.forwards, now.seconds - before.seconds
        if forwards <= 0 or seconds <= 0:  # nothing, or another process
            forwards, exposed = 0, 0.0
        else:
            exposed = waited * forwards / seconds
        tokens = now.tokens - before.tokens
        fed = max(0, now.read - before.read - tokens)
        timing = DraftTiming(seconds, overhead, forwards, tokens, fed, exposed=exposed)
        self._control.drafted(timing, drafts)

    def _forward(self, texts: Sequence[list[int]]) -> None:
        """Read texts of nobody's, and draft a token behind each."""
        self._serial = self._serial % _LAST_SERIAL + 1
        salt = f"timing {self._serial}"
        rows = [RequestUpdate(slot, -1, ids, [], 1, salt=salt) for slot, ids in enumerate(texts)]
        if not self._process.send(UpdateBatch(self._serial, [], rows)):
            raise RuntimeError("the drafter's process reads nothing")
        deadline = time.perf_counter() + _LONGEST_FORWARD
        for row in rows:
            while (of := self._process.table.read(row.slot)) is None or of.serial != self._serial:
                if time.perf_counter() > deadline:
                    raise TimeoutError("the drafter's process does not answer")
                time.sleep(_A_MOMENT)
        self.pool.closed |= {row.slot for row in rows}
        self._before = self._process.counts

    def _wanted(self, task: DraftTask, drafts: int) -> int:
        """Drafter tokens for so many drafts, and the target's own token between or before them."""
        if not task.lookahead:
            return 0
        tokens = drafts * task.lookahead + 1
        return min(self.most_steps, math.ceil(tokens * ids_for_each(task)) + 1)
