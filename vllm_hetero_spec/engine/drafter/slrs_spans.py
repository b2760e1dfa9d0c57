# SPDX-License-Identifier: Apache-2.0
"""SLRS-n on the drafter's KV: each request follows its own path with side branches.

A side branch writes KV to blocks that are lent for the round. The tokens of the request's last
block are fed again there. Its KV is discarded after the round.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.sampling import BatchSampler
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable, KVPool
from vllm_hetero_spec.engine.drafter.round import Round, RoundExtension
from vllm_hetero_spec.engine.drafter.steps import CaughtUp
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.slrs.slrs import Slrs, SlrsMethod, SlrsPath


class SlrsSpans(RoundExtension):
    """Drafts the requests of a drafter that use SLRS-n.

    SLRS-n supports neither race verification nor penalties.
    """

    def __init__(self, drafter: Drafter, pool: KVPool, method: SlrsMethod, budget: int) -> None:
        self._drafter, self._pool, self._method, self._budget = drafter, pool, method, budget
        self._lent = BlockTable()  # blocks of this round's side branches
        self._side_blocks: dict[str, Sequence[int]] = {}  # by request, one per side branch
        self._drafted: list[DrafterTokens] = []

    def steps(self, task: DraftTask, steps: int) -> int:
        # half of the merge span per target token
        return steps * max(2, self._method.merge_span.tokens) // 2 if _merges(task) else steps

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Lend blocks for side branches, as long as budget, blocks and `max_lines` permit.

        A side branch also feeds again the tokens that share its block, at most one block of tokens.
        """
        self._lent, self._side_blocks, tokens = BlockTable(), {}, self._budget
        self._drafted = []  # those of a round that failed
        lines = self._drafter.model.max_lines - len(rows)
        branches = self._method.merge_span.candidates - 1
        for index in self.drafts(rows) if branches else ():
            blocks = len(self._lent.blocks) + branches
            tokens -= branches * self._pool.block_size
            if (
                tokens < 0
                or blocks > lines
                or not self._pool.grow(self._lent, blocks * self._pool.block_size)
            ):
                break
            self._side_blocks[rows[index].task.req_id] = self._lent.blocks[-branches:]

    def drafts(self, rows: Sequence[DraftRow]) -> Sequence[int]:
        return [index for index, row in enumerate(rows) if row.steps and _merges(row.task)]

    def after_prefill(self, current: Round, behind: CaughtUp) -> bool:
        if rows := [current.rows[index] for index in self.drafts(current.rows)]:  # the last ones
            spans = _SpanRound(rows, self._side_blocks, self._drafter, self._method)
            self._drafted = spans.run(behind.logits[-len(rows) :])
        return False

    def collect(self, current: Round, drafted: list[DrafterTokens]) -> None:
        if self._drafted:
            drafted[-len(self._drafted) :] = self._drafted
            self._drafted = []
        self._pool.close(self._lent)


def _merges(task: DraftTask) -> bool:
    return task.draw is not None and not task.draw.races and task.penalty is None


class _SpanRound:
    """The SLRS-n requests of one round, after catch-up."""

    def __init__(
        self,
        rows: Sequence[DraftRow],
        side_blocks: Mapping[str, Sequence[int]],
        drafter: Drafter,
        method: SlrsMethod,
    ) -> None:
        self._rows, self._rules, self._drafter, self._method = rows, drafter.rules, drafter, method
        self._table = drafter.planner.table([row.sequence for row in rows])
        draws = [draw for row in rows if (draw := row.task.draw) is not None]
        # `Slrs` keeps the draft_probs: the sampler needs no room for them.
        self._draws = BatchSampler(range(len(rows)), draws, [0] * len(rows), method, drafter.send)
        self._cached = np.array([len(row.sequence.kv_ids) for row in rows])
        self._side_blocks = [side_blocks.get(row.task.req_id, ()) for row in rows]
        self._paths = [
            SlrsPath(row.steps, row.task.lookahead, len(blocks), seed=draw.seed, place=draw.place)
            for row, draw, blocks in zip(rows, draws, self._side_blocks, strict=True)
        ]

    def run(self, logits: torch.Tensor) -> list[DrafterTokens]:
        """Draft from the logits [n, V_D] at the end of each request's context."""
        finite = logits.isfinite().any(-1).tolist()
        method, ends = self._method, self._rules.ends
        slrs = Slrs(method.tokens, method.merging, ends, method.merge_span.tokens)
        first = self._draws.rows(logits, list(range(len(self._rows))))
        probs = slrs.draft(first, self._paths, self._feed)
        peaks = probs.amax(-1).tolist() if self._rules.confidences and len(probs) else []
        return [
            self._drafted(row, path, sound, probs, peaks)
            for row, path, sound in zip(self._rows, self._paths, finite, strict=True)
        ]

    def _drafted(
        self, row: DraftRow, path: SlrsPath, finite: bool, probs: torch.Tensor, peaks: list[float]
    ) -> DrafterTokens:
        row.sequence.kv_ids.extend(path.drafted[: path.fed])
        confidences = [peaks[i] if i >= 0 else 1.0 for i in path.row_of] if peaks else []
        draft_probs = DraftProbs(probs, path.row_of)
        draft = Draft.chain(row.task.req_id, path.proposal, confidences, draft_probs)
        draft = draft.first(row.task.lookahead if finite else 0)
        return DrafterTokens(path.drafted, finite, confidences, draft)

    def _feed(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        paths = self._paths
        cached = self._cached[indices] + [paths[index].written for index in indices]
        pending, lines = list(ids), self._table[indices]
        size = self._drafter.planner.block_size
        spare = [*map(iter, self._side_blocks)] if side_branches else []
        for line in range(len(indices) - side_branches, len(indices)):
            index, block = indices[line], cached[line] // size
            lines[line, block] = next(spare[index])
            start = cached[line] = block * size
            before = self._rows[index].sequence.kv_ids[start:]
            path = paths[index]
            drafted = path.drafted[max(0, start - self._cached[index]) : path.fed]
            pending[line] = [*before, *drafted, *ids[line]]
        feed = self._drafter.planner.ragged(lines, cached.tolist(), pending)
        lengths = (cached + np.diff(feed.starts)).astype(np.int32)
        return self._draws.rows(self._drafter.feed(feed, lines, lengths), indices)
