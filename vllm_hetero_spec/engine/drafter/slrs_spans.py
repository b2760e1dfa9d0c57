# SPDX-License-Identifier: Apache-2.0
"""SLRS-n on the drafter's KV: each request follows its own path with side branches.

A side branch writes KV to blocks that are lent for the round. The tokens of the request's last
block are fed again there. Its KV is discarded after the round.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.engine.drafter.round_plan import BatchFeed, Planner
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow
from vllm_hetero_spec.engine.drafter.token_choice import PickConfig
from vllm_hetero_spec.slrs.path import SlrsPath
from vllm_hetero_spec.slrs.slrs import Slrs
from vllm_hetero_spec.staging import Send

# Arguments: tokens, KV blocks int32 [n, W], lengths after the forward int32 [n]. Result: logits
# [n, V_D].
Forward = Callable[[BatchFeed, np.ndarray, np.ndarray], torch.Tensor]


class SlrsSpans:
    """The SLRS-n requests of one round, after catch-up."""

    def __init__(
        self,
        rows: Sequence[DraftRow],
        rules: PickConfig,
        planner: Planner,
        forward: Forward,
        send: Send,
    ) -> None:
        self._rows, self._rules, self._planner, self._forward = rows, rules, planner, forward
        self._table = planner.table([row.sequence for row in rows])
        self._draws = rules.draws(rows, send, range(len(rows)), keep=False)
        self._cached = np.array([len(row.sequence.kv_ids) for row in rows])
        self._paths = [_path_of(row) for row in rows]

    def run(self, logits: torch.Tensor) -> list[DrafterTokens]:
        """Draft from the logits [n, V_D] at the end of each request's context."""
        sampling = self._rules.sampling
        assert sampling is not None
        assert sampling.merging is not None
        finite = logits.isfinite().any(-1).tolist()
        span = sampling.merge_span.tokens
        slrs = Slrs(sampling.tokens, sampling.merging, self._rules.ends, span)
        first = self._drawn_from(logits, list(range(len(self._rows))))
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

    def _drawn_from(self, logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        return self._draws.rows(self._rules.only_real(logits), indices)

    def _feed(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        paths = self._paths
        cached = self._cached[indices] + [paths[index].written for index in indices]
        pending, lines = list(ids), self._table[indices]
        size = self._planner.block_size
        spare = [iter(row.side_blocks) for row in self._rows] if side_branches else []
        for line in range(len(indices) - side_branches, len(indices)):
            index, block = indices[line], cached[line] // size
            lines[line, block] = next(spare[index])
            start = cached[line] = block * size
            before = self._rows[index].sequence.kv_ids[start:]
            path = paths[index]
            drafted = path.drafted[max(0, start - self._cached[index]) : path.fed]
            pending[line] = [*before, *drafted, *ids[line]]
        feed = self._planner.ragged(lines, cached.tolist(), pending)
        lengths = (cached + np.diff(feed.starts)).astype(np.int32)
        return self._drawn_from(self._forward(feed, lines, lengths), indices)


def _path_of(row: DraftRow) -> SlrsPath:
    draw = row.task.draw
    assert draw is not None
    return SlrsPath(
        row.steps, row.task.lookahead, len(row.side_blocks), seed=draw.seed, place=draw.place
    )
