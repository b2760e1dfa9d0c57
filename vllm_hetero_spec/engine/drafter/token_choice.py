# SPDX-License-Identifier: Apache-2.0
"""Pick the next tokens: the likeliest one for greedy drafts, a sample for others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hetero_spec.draft.penalties import PenalizedRow, Penalties
from vllm_hetero_spec.draft.sampling import BatchSampler, SampledMethod
from vllm_hetero_spec.engine.drafter.round_plan import RoundPlan
from vllm_hetero_spec.engine.drafter.tasks import DraftRow
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers
from vllm_hetero_spec.staging import Send


@dataclass(frozen=True)
class PickConfig:
    """Rules of token choice for all requests.

    Attributes:
        vocab_size: Ids of the drafter's tokenizer. Embedding rows beyond are no tokens.
        banned: int64 ids that are never picked.
        ends: Ids that end a draft.
        beside: Number of top candidates per position; 0 if no task has `paths`.
        token_healing: Allow drafts that replace the last token of a request by a longer one.
    """

    vocab_size: int
    banned: torch.Tensor
    ends: frozenset[int] = frozenset()
    sampling: SampledMethod | None = None
    confidences: bool = False
    beside: int = 0
    token_healing: bool = False

    def draws(
        self,
        rows: Sequence[DraftRow],
        send: Send,
        drawn: Sequence[int],
        forked: Sequence[tuple[int, DraftRow]] = (),
        *,
        keep: bool = True,
    ) -> BatchSampler:
        """Create the sampler of the rows `drawn` and of their forks.

        Forks are given as (index, row of the request), and sample one token less. If `keep`, there
        is room for `draft_probs` of all steps.
        """
        assert self.sampling is not None
        each = [rows[index] for index in drawn] + [row for _, row in forked]
        looks = self.sampling.tokens.renormalise and wide(rows)
        return BatchSampler(
            [*drawn, *(place for place, _ in forked)],
            [draw for row in each if (draw := row.task.draw) is not None],
            [row.steps if keep else 0 for row in each],
            self.sampling,
            send,
            self.beside if looks else 0,
        )

    def only_real(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask banned ids in logits [n, V_D] in place; cut columns that are no tokens."""
        logits = logits[:, : self.vocab_size]
        return logits.index_fill_(1, self.banned, float("-inf"))


class RowPickers:
    """Picks tokens for the rows of a round that are sampled or have penalties.

    `drawn` are the indices of the sampled rows, `forked` those of their forks, and `draws` is the
    sampler of both.
    """

    def __init__(
        self,
        rows: Sequence[DraftRow],
        rules: PickConfig,
        send: Send,
        plan: RoundPlan | None = None,
    ) -> None:
        device = rules.banned.device
        penalised = [
            PenalizedRow(index, penalty, row.task.state.count_tokens(rules.vocab_size, device))
            for index, row in enumerate(rows)
            if row.steps and (penalty := row.task.penalty) is not None
        ]
        self._steps = [row.steps for row in rows]
        self.drawn = [i for i, row in enumerate(rows) if row.task.draw is not None and row.steps]
        forked = []
        if plan is not None and self.drawn:
            owners = enumerate(plan.forks[0].tolist(), plan.count)
            forked = [(at, rows[of]) for at, of in owners if rows[of].task.draw is not None]
        self.forked = [at for at, _ in forked]
        self.draws = rules.draws(rows, send, self.drawn, forked) if self.drawn else None
        self._penalties: Penalties | None = None
        if penalised:
            self._penalties = Penalties(penalised, send)
            self._own = PickBuffers(
                1, len(penalised), device, confidences=rules.confidences, beside=rules.beside
            )

    def __bool__(self) -> bool:
        return self.draws is not None or self._penalties is not None

    def pick(self, logits: torch.Tensor, picked: PickBuffers, step: int) -> None:
        """Overwrite picked tokens of the rows that are sampled or have penalties.

        The logits [n, V_D] of the first n rows are changed in place. Step 0 is catch-up.
        """
        if self._penalties is not None and (index := self._penalties.first(len(logits))).numel():
            rows = self._penalties.apply(logits)
            self._own.wide = picked.wide
            self._own.best(rows, 0)
            picked.overrule(step, index, self._own, len(rows))
        if self.draws is not None and (count := self._num_drawn(step)):
            index = self.draws.index[:count]
            picked.put(step, index, self.draws.draw(logits.index_select(0, index)))
            if self.draws.arrivals is not None:
                picked.arrived(step, index, self.draws.arrivals)

    def feed(self, ids: torch.Tensor) -> None:
        """Count int32 ids [n] of the first n rows for penalties, before they are fed."""
        if self._penalties is not None:
            self._penalties.add(ids)

    def row_of(self, steps: int) -> dict[int, list[int]]:
        """Return the `draft_probs` rows of each sampled request, one for each step."""
        row_of: dict[int, list[int]] = {index: [] for index in self.drawn}
        position = 0
        for step in range(steps):
            for place, index in enumerate(self.drawn[: self._num_drawn(step)]):
                row_of[index].append(position + place)
            position += self._num_drawn(step)
        return row_of

    def _num_drawn(self, step: int) -> int:
        """Return the number of sampled rows in a step, forks included.

        Requests with more steps come first. Sampled forks exist only if all sampled requests have
        equal steps.
        """
        requests = sum(self._steps[index] > step for index in self.drawn)
        return requests + len(self.forked) * (step > 0 and requests > 0)


def wide(rows: Sequence[DraftRow]) -> bool:
    """Return True if a round keeps top candidates for some of its tasks."""
    return any(row.task.paths for row in rows)
