# SPDX-License-Identifier: Apache-2.0
"""One round of drafting for a batch: admit, catch up, draft until covered, translate.

The lookahead counts TARGET tokens. How many drafter tokens they take depends on the text, so a
round drafts the expected number, translates, and goes on only for requests still short of it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_hetero_spec.draft.drawing import Draw
from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter, Proceed
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable, KVPool
from vllm_hetero_spec.engine.drafter.request_state import RequestState
from vllm_hetero_spec.engine.drafter.token_choice import DraftRow
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.verifier.draft_probs import DraftProbs
from vllm_hetero_spec.text.bridge import Bridge

# The last drafter tokens of a context may still merge with what follows: not published for reuse.
_UNSTABLE_TAIL = 32
# A request that found the pool full waits this many steps before it asks again.
_STEPS_BETWEEN_TRIES = 8


@dataclass
class Job:
    """A request in this round.

    Attributes:
        index: Its place in the batch.
        state: What the drafter knows of it.
        lookahead: Target tokens that are useful to propose; 0 only catches up.
        penalty: The request's penalties, if any.
        draw: How its drafts are drawn; None for greedy ones.
        steps_left: Drafter steps it may still spend.
        drafted: Drafter ids so far, with the drafter's `peaks` (`DraftRow.confidences`).
        proposal: Their translation.
        confidences: Of each token of the proposal, where they are asked for: known before it was
            drawn.
        draft_probs: What the proposal was drawn from, where it was drawn.
    """

    index: int
    state: RequestState
    lookahead: int
    penalty: Penalty | None = None
    draw: Draw | None = None
    steps_left: int = 0
    drafted: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    proposal: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    draft_probs: DraftProbs | None = None


class Rounds:
    """Runs rounds over one drafter.

    Args:
        bridge: Between the two tokenizers.
        drafter: The decode loop.
        pool: The drafter's KV blocks.
        stats: Counters to add to.
        budget: Context tokens that the drafter may read in one round.
        spell: Target tokens that a drafter token proposes, for drafts that are drawn.
    """

    def __init__(
        self,
        bridge: Bridge,
        drafter: Drafter,
        pool: KVPool,
        stats: DraftStats,
        budget: int,
        spell: Callable[[int], Sequence[int]] | None,
    ) -> None:
        self._spell = spell
        self._bridge = bridge
        self._drafter = drafter
        self._pool = pool
        self._stats = stats
        self._budget = budget

    def run(
        self, jobs: list[Job], idle: Iterator[RequestState], proceed: Proceed | None = None
    ) -> None:
        """Fill the jobs' proposals, as far as tokens, blocks and lengths allow.

        Args:
            jobs: Requests whose text has been read and whose KV is aligned.
            idle: Requests outside the batch, whose KV may be taken.
            proceed: Asked between drafter steps whether to go on.
        """
        rows = self._admit(jobs, idle)
        if not rows:
            return
        scratch = self._lend_scratch(rows)
        try:
            self._drafter.run([row for _, row in rows], proceed)
        finally:
            self._pool.close(scratch)
        for job, row in rows:
            state = job.state
            state.agreed += len(row.pending)
            if row.finite:
                stable = state.agreed - _UNSTABLE_TAIL
                self._pool.publish(row.sequence.table, state.context.ids, stable)
        for job, row in rows:
            if job.draw is not None and row.steps:
                self._spell_out(job, row)
        rows = [(job, row) for job, row in rows if row.steps and job.draw is None]
        while rows:
            self._translate(rows)
            rows = [(job, more) for job, row in rows if (more := self._continue(job, row))]
            if rows:
                self._drafter.run([row for _, row in rows], proceed)
        for job in jobs:
            if job.peaks:
                job.confidences = self._confidences(job)

    def _admit(self, jobs: list[Job], idle: Iterator[RequestState]) -> list[tuple[Job, DraftRow]]:
        """Give out the round's token budget and KV blocks: drafts first, then long prompts."""
        rows = []
        budget = self._budget
        for job in sorted(jobs, key=lambda job: (job.lookahead == 0, job.state.pending)):
            state = job.state
            room = self._drafter.max_length - len(state.context.ids)
            if room < bool(job.lookahead):
                self._skip(job, "drafter_length")
                continue
            pending, steps = state.pending, self._plan(job, room)
            if pending > budget:
                self._skip(job, "catching_up")
                pending, steps = budget, 0
            if not pending:
                continue
            if not self._reserve(state, pending + steps, idle):
                self._skip(job, "no_blocks")
                state.wait = _STEPS_BETWEEN_TRIES
                state.close(self._pool)
                continue
            budget -= pending
            self._stats.catch_up_tokens += pending
            ids = state.context.ids[state.agreed : state.agreed + pending]
            rows.append((job, self._row(job, ids, steps, first=True)))
        return rows

    def _plan(self, job: Job, room: int) -> int:
        """Steps expected to cover the lookahead; what more may be spent goes to `steps_left`.

        One step more than the ratio says: it completes the last target token, and a step of the
        whole batch costs less than going on for the few that fell short.
        """
        if not job.lookahead:
            return 0
        if job.draw is not None:  # a drawn target token takes a step, or half of its span
            span = max(2, self._drafter.merge_span(job).tokens)
            return min(room, job.lookahead * span // 2)
        context = job.state.context
        ratio = len(context.ids) / context.num_target
        steps = min(room, max(1, math.ceil(job.lookahead * ratio) + 1))
        job.steps_left = min(room, math.ceil(2 * job.lookahead * max(1.0, ratio)) + 1) - steps
        return steps

    def _reserve(self, state: RequestState, tokens: int, idle: Iterator[RequestState]) -> bool:
        """KV room for `tokens` more; requests outside the batch give theirs up for it."""
        assert state.sequence is not None
        need = len(state.sequence.kv_ids) + tokens
        while not self._pool.grow(state.sequence.table, need):
            other = next(idle, None)
            if other is None:
                return False
            other.close(self._pool)
        return True

    def _lend_scratch(self, rows: list[tuple[Job, DraftRow]]) -> BlockTable:
        """Blocks for side branches of drafts, for as many requests as they and tokens allow.

        A side branch takes the tokens of its block along, which are read anew.
        """
        lent, tokens = BlockTable(), self._budget
        for job, row in rows:
            side_branches = self._drafter.merge_span(job).candidates - 1
            if not side_branches or not row.steps:
                continue
            blocks = len(lent.blocks) + side_branches
            tokens -= side_branches * self._pool.block_size
            if tokens < 0 or not self._pool.grow(lent, blocks * self._pool.block_size):
                break
            row.scratch = lent.blocks[-side_branches:]
        return lent

    def _spell_out(self, job: Job, row: DraftRow) -> None:
        """What was drawn as target tokens: the first of each draw was drawn, the rest is certain.

        The draft ends by count or with a draw that says so itself, never by how likely it was.
        """
        self._stats.drafter_tokens += len(row.drafted)
        if row.path is not None and row.draft_probs is not None:
            job.proposal = row.path.proposal[: job.lookahead if row.finite else 0]
            job.confidences = row.confidences[: len(job.proposal)]
            job.draft_probs = DraftProbs(row.draft_probs, row.path.row_of[: job.lookahead])
            self._settle(job, row)
            return
        assert self._spell is not None
        row_of: list[int] = []
        for place, (drafted, index) in enumerate(zip(row.drafted, row.row_of, strict=False)):
            tokens = self._spell(drafted)
            ended = not len(tokens) or drafted in self._bridge.drafter_eos
            if not len(tokens):
                tokens = row.substitutes[place : place + 1]
            job.proposal += tokens
            if row.confidences:
                job.confidences += [row.confidences[place], *[1.0] * (len(tokens) - 1)]
            row_of += [index, *[-1] * (len(tokens) - 1)][: len(tokens)]
            if ended:
                break
        del job.proposal[job.lookahead if row.finite else 0 :]
        del job.confidences[len(job.proposal) :]
        if row.draft_probs is not None:
            job.draft_probs = DraftProbs(row.draft_probs, row_of[: job.lookahead])
        self._settle(job, row)

    def _settle(self, job: Job, row: DraftRow) -> None:
        if not row.finite:
            self._skip(job, "nan_logits")
            job.state.retire("nan_logits", self._pool)

    def _translate(self, rows: list[tuple[Job, DraftRow]]) -> None:
        for job, row in rows:
            job.drafted += row.drafted
            job.peaks += row.confidences[: len(row.drafted)]
            self._stats.drafter_tokens += len(row.drafted)
        began = time.perf_counter()
        proposals = self._bridge.to_target(
            [job.state.context for job, _ in rows],
            [job.drafted for job, _ in rows],
            [job.lookahead for job, _ in rows],
        )
        self._stats.translate_seconds += time.perf_counter() - began
        for (job, row), proposal in zip(rows, proposals, strict=True):
            job.proposal = proposal
            self._settle(job, row)

    def _confidences(self, job: Job) -> list[float]:
        """The drafter's confidence in each proposed token: in all ids that only it needs."""
        found, start = [], 0
        for end in self._bridge.ids_covering(job.drafted, job.proposal):
            found.append(math.prod(job.peaks[start:end]))
            start = max(start, end)
        return found

    def _continue(self, job: Job, row: DraftRow) -> DraftRow | None:
        """The row that goes on for a job still short of its lookahead, None where it is done."""
        missing = job.lookahead - len(job.proposal)
        stopped = len(row.drafted) < row.steps  # the logits were not finite, or it does not pay
        ended = stopped or row.drafted[-1] in self._bridge.drafter_eos
        if missing <= 0 or ended or job.steps_left <= 0:
            return None
        made = len(job.proposal) or 1
        steps = min(job.steps_left, max(1, round(missing * len(job.drafted) / made)))
        if not self._pool.grow(row.sequence.table, len(row.sequence.kv_ids) + 1 + steps):
            return None
        job.steps_left -= steps
        return self._row(job, row.drafted[-1:], steps, first=False)

    def _row(self, job: Job, pending: list[int], steps: int, *, first: bool) -> DraftRow:
        state = job.state
        assert state.sequence is not None
        choose = None
        if first and steps and job.draw is None and not self._bridge.identity:
            choose = partial(self._bridge.first_choice, state.context)
        return DraftRow(
            state.sequence,
            pending,
            steps,
            job.penalty,
            state.prompt_length,
            choose,
            job.draw,
            job.lookahead,
            job.index,
        )

    def _skip(self, job: Job, reason: str) -> None:
        if job.lookahead:
            self._stats.skip(reason)
