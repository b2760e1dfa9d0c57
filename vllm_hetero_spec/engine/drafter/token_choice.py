# SPDX-License-Identifier: Apache-2.0
"""Which token comes next: the drafter's best for greedy drafts, a draw for others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hetero_spec.draft.penalties import PenalizedRow, Penalties
from vllm_hetero_spec.draft.sampling import BatchSampler, SampledMethod
from vllm_hetero_spec.engine.drafter.round_plan import RoundPlan
from vllm_hetero_spec.engine.drafter.tasks import DraftRow, DraftTask
from vllm_hetero_spec.engine.drafter.token_picking import PickBuffers
from vllm_hetero_spec.slrs.slrs import MergeSpan
from vllm_hetero_spec.staging import Send

_ONE_TOKEN = MergeSpan(1)
_FED = 2  # the place of `TopCandidates.fed` among its columns


@dataclass(frozen=True)
class PickConfig:
    """What holds for all requests.

    Attributes:
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond do not exist.
        banned: int64 ids that are never picked.
        ends: Ids after which a draft ends.
        sampling: What sampled drafts propose; None where all are greedy.
        confidences: Whether they are asked for.
        beside: Tokens of each row that are known beside the one that is picked, for trees.
        token_healing: Drafts may begin in the place of a text's last token.
    """

    vocab_size: int
    banned: torch.Tensor
    ends: frozenset[int]
    sampling: SampledMethod | None
    confidences: bool = False
    beside: int = 0
    token_healing: bool = False

    def span(self, task: DraftTask) -> MergeSpan:
        """How SLRS-n looks ahead for a request; one token where it is drafted otherwise.

        SLRS-n neither races nor penalises.
        """
        draw, sampling = task.draw, self.sampling
        if sampling is None or sampling.merging is None or draw is None:
            return _ONE_TOKEN
        plain = not draw.races and task.penalty is None
        return sampling.merge_span if plain else _ONE_TOKEN

    def draws(
        self,
        rows: Sequence[DraftRow],
        send: Send,
        drawn: Sequence[int],
        forked: Sequence[tuple[int, DraftRow]] = (),
        *,
        keep: bool = True,
    ) -> BatchSampler:
        """The draws of some rows of a round; `keep` makes room for as many as they have steps.

        Args:
            rows: Of the round.
            send: Brings arrays to the device.
            drawn: Which of them.
            forked: Places of their forks, which draw one token less, and whose they are.
            keep: See above.
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
        """Logits [n, V_D] of tokens that exist and may be picked, changed in place."""
        logits = logits[:, : self.vocab_size]
        return logits.index_fill_(1, self.banned, float("-inf"))


class RowPickers:
    """The requests of a round whose tokens are not simply the drafter's best.

    Args:
        rows: The round's requests, those with more steps first.
        rules: What holds for all of them.
        send: Brings arrays to the device.
        plan: Of the round; its forks are told what those of raced requests leave with.
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
        self._plan, self._steps = plan, [row.steps for row in rows]
        self.drawn = [i for i, row in enumerate(rows) if row.task.draw is not None and row.steps]
        forked = []
        if plan is not None and self.drawn:
            owners = enumerate(plan.forks[0].tolist(), plan.count)
            forked = [(at, rows[of]) for at, of in owners if rows[of].task.draw is not None]
            raced = np.array([row.task.draw is not None for row in rows])[plan.forks[0]]
            plan.forks[2] += _FED * rules.beside * raced
        self._forked = [at for at, _ in forked]
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
        """Overrule what was picked from logits [n, V_D] for the requests concerned.

        Args:
            logits: Of the first n requests, changed in place.
            picked: Of the round.
            step: 0 after catching up.
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

    def branch_off(self, picked: PickBuffers, step: int, forks: torch.Tensor) -> None:
        """Behind a step some forks leave, raced ones with a token that arrived.

        Args:
            picked: Of the round; see `PickBuffers.branch_off`.
            step: Has been picked.
            forks: See `RoundPlan`.
        """
        if self._plan is None or not self._plan.forks.size:
            return
        if not (self._plan.forks[1] >= step).any():
            return
        draws, drawn, first = self.draws, len(self.drawn), self._plan.count
        if draws is None or not self._forked:
            picked.branch_off(step, first, forks)
            return
        ids, places = picked.ids(step, self._forked[-1] + 1), draws.index[drawn:]
        if step:
            draws.skip(drawn, ids[places], -1)
        picked.branch_off(step, first, forks)
        draws.skip(drawn, ids[places])

    def feed(self, ids: torch.Tensor) -> None:
        """These int32 ids [n] of the first n requests are going to be fed."""
        if self._penalties is not None:
            self._penalties.add(ids)

    def row_of(self, steps: int) -> dict[int, list[int]]:
        """For each request that is drawn, where its draft_probs lie: step by step, row by row.

        Args:
            steps: That were taken.
        """
        row_of: dict[int, list[int]] = {index: [] for index in self.drawn}
        position = 0
        for step in range(steps):
            for place, index in enumerate(self.drawn[: self._num_drawn(step)]):
                row_of[index].append(position + place)
            position += self._num_drawn(step)
        return row_of

    def _num_drawn(self, step: int) -> int:
        """Of those that are drawn, how many are in a step: those with most steps come first, then
        forks, which are there only where all have as many."""
        requests = sum(self._steps[index] > step for index in self.drawn)
        return requests + len(self._forked) * (step > 0 and requests > 0)


def wide(rows: Sequence[DraftRow]) -> bool:
    """Whether a round has use for more than its next tokens: some of its drafts may be trees."""
    return any(row.task.paths for row in rows)
