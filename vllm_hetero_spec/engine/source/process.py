# SPDX-License-Identifier: Apache-2.0
"""Drafts made by a drafter in a process of its own, while the target verifies the ones before.

After a step of the target, a request's next draft is what has been drafted behind the text that the
step has written, if that is among what was drafted ahead: a look into a table, and a translation.
Then the process is told what the texts are now, and what is taken to come; it drafts on behind
that. A request whose text went another way is left to the target for a step.

Drafts are greedy. Whatever the process does, or does not, the target decides what is written.
"""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from vllm_hetero_spec.draft.continuations import Remainder, find_remainder
from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.request_state import RequestState
from vllm_hetero_spec.engine.drafter.tasks import Control, DraftTask, DraftTiming
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.engine.source.drafter_process import Deployment
from vllm_hetero_spec.engine.source.kept_process import KeptProcess
from vllm_hetero_spec.engine.source.messages import MOST_IDS, Commit, Row
from vllm_hetero_spec.engine.source.sent_texts import SentText, SentTexts


class _Found(NamedTuple):
    """What was drafted ahead for a request.

    Attributes:
        task: The request.
        ids: Drafter tokens, see `Remainder`.
        known: Leading bytes of them that its text has.
        peaks: The drafter's largest probability in the place of each.
        proposal: The draft in target tokens.
        ends: Leading ones of `ids` that each of them needs.
    """

    task: DraftTask
    ids: list[int]
    known: int
    peaks: list[float]
    proposal: Sequence[int] = ()
    ends: Sequence[int] = ()


class _Line(NamedTuple):
    """Drafter tokens behind a text, and the drafter's largest probability in the place of each."""

    ids: list[int]
    peaks: list[float]


class ProcessSource:
    """A drafter in a process of its own. See `DraftSource`.

    Args:
        deployment: What it runs.
        pair: The two tokenizers.
        stats: Counters to add to.
        max_length: Most drafter tokens of a text.

    Raises:
        ConfigError: The process cannot load the drafter.
    """

    draws = False
    early = True

    def __init__(
        self, deployment: Deployment, pair: Pair, stats: DraftStats, max_length: int
    ) -> None:
        self._bridge, self._stats = pair.bridge, stats
        self._bytes = bytes_of_tokens(pair)
        self._process = KeptProcess(deployment)
        ready = self._process.start()
        self.pool = SentTexts(deployment.slots, ready.num_blocks - 1, ready.block_size)
        self.max_length, self.most_steps = max_length, deployment.longest
        self._serial = 0
        self._drafts: list[Draft] = []

    def begin(
        self, tasks: Sequence[DraftTask], outside: Iterator[RequestState], control: Control
    ) -> None:
        """See `DraftSource`: look drafts up, and tell the process what the texts are now."""
        began = time.perf_counter()
        if not self._process.up:
            self._stats.skip("drafter_down", times=sum(task.lookahead > 0 for task in tasks))
            return
        tasks = [task for task in tasks if self._admit(task, outside)]
        found = [self._look_up(task) for task in tasks]
        found = self._translated(found)
        self._drafts = [
            Draft.chain(of.task.req_id, list(of.proposal), self._confidences(of))
            for of in found
            if of.task.lookahead
        ]
        self._commit(found)
        took = time.perf_counter() - began
        control.drafted(DraftTiming(took, 0.0, 1, len(tasks), 0), self._drafts)

    def finish(self) -> list[Draft]:
        """See `DraftSource`."""
        drafts, self._drafts = self._drafts, []
        return drafts

    def record(self) -> int:
        """See `DraftSource`: the process records its own."""
        return 0

    def step(self, batch: int) -> None:
        """See `DraftSource`: nothing is waited for."""

    def read(self, tokens: int) -> None:
        """See `DraftSource`: nothing is waited for."""

    def reset(self) -> None:
        """See `DraftSource`."""
        self.pool.reset()

    def show(self, stats: DraftStats) -> None:
        """See `DraftSource`."""
        stats.restarts = self._process.restarts
        _, stats.forwards, stats.drafter_tokens, stats.kv_blocks_held = self._process.counts

    def _admit(self, task: DraftTask, outside: Iterator[RequestState]) -> bool:
        """Whether a request has a slot; one outside the batch gives its own up for it."""
        text = _text(task)
        while not self.pool.admit(text):
            other = next(outside, None)
            if other is None:
                self._stats.skip("no_blocks", times=bool(task.lookahead))
                return False
            other.close(self.pool)
        return True

    def _look_up(self, task: DraftTask) -> _Found:
        """What was drafted ahead behind a request's text as it is now; counted."""
        text, context = _text(task), task.state.context
        if not text.serial or text.life != self._process.life:
            self._begin_anew(task)
            self._stats.skip("not_ready", times=task.lookahead > 0)
            return _Found(task, [], 0, [])
        told = self._spelled(text.gone)
        now = self._spelled(context.ids[task.state.num_kv_valid :])
        seen: list[_Line] = []
        remainder = None
        if now.startswith(told):
            lines = (line.ids for line in self._lines(text, seen))
            outcome = now[len(told) :]
            fits = partial(self._bridge.may_follow, context)
            spelled = self._bytes.__getitem__
            remainder = find_remainder(lines, outcome, context.held, spelled, fits)
        if task.lookahead:
            self._count(remainder)
        if remainder is None:
            return _Found(task, [], 0, [])
        ids, peaks = seen[remainder.rank]
        first = len(ids) - len(remainder.ids)
        return _Found(task, remainder.ids, remainder.known, peaks[first:])

    def _lines(self, text: SentText, seen: "list[_Line]") -> Iterator["_Line"]:
        """What was drafted behind a text as it was told, the chain first; kept in `seen`."""
        table = self._process.table
        chain = _Line(text.drafted, text.peaks)
        for rank in range(1 + table.sides):
            of = table.read(text.slot, rank)
            line = chain if not rank else None
            if of is not None and of.serial == text.serial and of.place <= len(chain.ids):
                line = _Line(chain.ids[: of.place] + of.ids, chain.peaks[: of.place] + of.peaks)
            if line is not None:
                chain = chain if rank else line
                seen.append(line)
                yield line

    def _count(self, remainder: Remainder | None) -> None:
        if remainder is None:
            self._stats.skip("not_guessed")
        elif not remainder.ids:
            self._stats.skip("not_ready")
        else:
            self._stats.drafts_ahead += 1
            self._stats.drafts_guessed += remainder.rank > 0

    def _begin_anew(self, task: DraftTask) -> None:
        """The process knows nothing of a text, or is another one than that which did."""
        text, state = _text(task), task.state
        assert state.sequence is not None
        state.sequence.kv_ids.clear()
        state.num_kv_valid = text.serial = 0

    def _translated(self, found: Sequence[_Found]) -> list[_Found]:
        began = time.perf_counter()
        proposals = self._bridge.to_target(
            [of.task.state.context for of in found],
            [of.ids for of in found],
            [of.task.lookahead for of in found],
            [of.known for of in found],
        )
        self._stats.translate_seconds += time.perf_counter() - began
        return [
            of._replace(proposal=proposal, ends=self._bridge.ids_covering(of.ids, proposal))
            for of, proposal in zip(found, proposals, strict=True)
        ]

    @staticmethod
    def _confidences(found: _Found) -> list[float]:
        confidences, start = [], 0
        for end in found.ends:
            confidences.append(math.prod(found.peaks[start:end]))
            start = max(start, end)
        return confidences

    def _commit(self, found: Sequence[_Found]) -> None:
        """Tell the process what the texts are, and what the target is about to verify."""
        self._serial += 1
        rows, room = [], MOST_IDS
        for of in found:
            state, text = of.task.state, _text(of.task)
            if room <= 0:
                break
            ids = state.context.ids[state.num_kv_valid :][:room]
            whole = state.num_kv_valid + len(ids) == len(state.context.ids)
            drafted = of.ids if whole and not of.known else []
            room -= len(ids) + len(drafted)
            wanted = self._wanted(of.task, 2) if whole else 0
            beside = self._wanted(of.task, 1) if whole else 0
            at_stake = of.ends[-1] if drafted and of.ends else 0
            keep = state.num_kv_valid if text.serial else -1
            rows.append(Row(text.slot, keep, ids, drafted, wanted, at_stake, beside, text.salt))
        if not self._process.send(Commit(self._serial, [*self.pool.closed], rows)):
            return  # it has not read the last ones: told next time
        self.pool.closed.clear()
        for of, row in zip(found, rows, strict=False):
            state, text = of.task.state, _text(of.task)
            assert state.sequence is not None
            text.sent = state.sequence.kv_ids
            text.sent += row.ids
            state.num_kv_valid += len(row.ids)
            text.serial, text.life, text.gone = self._serial, self._process.life, []
            text.drafted, text.peaks = row.drafted, of.peaks[: len(row.drafted)]

    def _wanted(self, task: DraftTask, drafts: int) -> int:
        """Drafter tokens for so many drafts, and the target's own token between or before them."""
        if not task.lookahead:
            return 0
        tokens = drafts * task.lookahead + 1
        return min(self.most_steps, math.ceil(tokens * task.state.context.ratio) + 1)

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids))


class _TokenBytes(dict[int, bytes]):
    """Bytes of drafter ids; of those that are no text, bytes that no text has."""

    def __missing__(self, token: int) -> bytes:
        return b"\xff" + token.to_bytes(5, "little", signed=True)


def bytes_of_tokens(pair: Pair) -> dict[int, bytes]:
    """By drafter id: what it spells; something of its own for a control token, or any other id."""
    control = pair.bridge.special.drafter_control
    table = pair.drafter.token_bytes
    return _TokenBytes({i: data for i, data in enumerate(table) if data and i not in control})


def _text(task: DraftTask) -> SentText:
    assert task.state.sequence is not None
    table = task.state.sequence.table
    assert isinstance(table, SentText)
    return table
