# SPDX-License-Identifier: Apache-2.0
"""A drafting round between `Drafter.begin` and `Drafter.finish`, and its results."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.round_plan import Fork, RoundPlan
from vllm_hetero_spec.engine.drafter.steps import CaughtUp
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.engine.drafter.token_picking import PickConfig, PickedTokens, RowPickers
from vllm_hetero_spec.staging import Fetched


def sampled_draft(
    task: DraftTask,
    tokens: DrafterTokens,
    rows: Sequence[int],
    probs: torch.Tensor,
    sampling: SampledMethod,
    ends: Collection[int],
    stand_ins: np.ndarray | None = None,
) -> Draft:
    """Return the draft of sampled drafter tokens.

    Each drafter token spells one sampled target token, and then certain ones. The draft ends at the
    lookahead, or at a sampled token that ends a draft. It never ends because of the probability of
    a token.

    Args:
        rows: Row of `probs` that each token was sampled from; -1 if it was certain.
        probs: float32 [R, V_T].
        ends: Drafter ids that end a draft.
        stand_ins: int64 [R], target tokens that replace null proposals.
    """
    proposal: list[int] = []
    row_of: list[int] = []
    peaks: list[float] = []
    for place, (drawn, row) in enumerate(zip(tokens.tokens, rows, strict=False)):
        spelled = sampling.spell(drawn)
        ended = not len(spelled) or drawn in ends
        if not len(spelled) and stand_ins is not None:
            spelled = [int(stand_ins[row])]
        proposal += spelled
        row_of += [row, *[-1] * (len(spelled) - 1)][: len(spelled)]
        if tokens.confidences:
            peaks += [tokens.confidences[place], *[1.0] * (len(spelled) - 1)][: len(spelled)]
        if ended:
            break
    draft = Draft.chain(task.req_id, proposal, peaks, DraftProbs(probs, row_of))
    return draft.first(task.lookahead)


@dataclass
class Round:
    """A round in progress.

    Attributes:
        rows: Its requests, those with more steps first, then those that an extension drafts.
        order: Index of each row in the caller's order.
        taken: Queued steps, catch-up included; 0 if nothing is drafted.
        confidences: Confidences so far by request id, if a controller reads them.
        shortened: Rows whose drafts consist of their first token only.
        picked: All picked tokens, after `drafted`.
    """

    rows: list[DraftRow]
    order: list[int]
    plan: RoundPlan
    own: RowPickers
    taken: int = 0
    confidences: dict[str, list[float]] = field(default_factory=dict)
    shortened: Collection[int] = ()
    fetched: Fetched | None = None
    stand_ins: Fetched | None = None
    picked: PickedTokens | None = None

    def looked_at(self, number: int, peaks: Sequence[float]) -> dict[str, list[float]]:
        """Return the confidences so far of the requests that still draft in step `number`.

        `peaks` has the confidences of the step before, for all rows that were active in it.
        """
        before = self.rows[: self.plan.active[number - 1]]
        rows = [row for row in before if row.steps >= number]
        for row, peak in zip(rows, peaks, strict=False):
            self.confidences.setdefault(row.task.req_id, []).append(peak)
        return {row.task.req_id: self.confidences[row.task.req_id] for row in rows}

    def drafted(self, rules: PickConfig) -> list[DrafterTokens]:
        """Return the drafter tokens of each row that drafted step by step. Waits for the copy."""
        assert self.fetched is not None
        active = self.plan.active[: self.taken]
        packet = self.fetched.wait()[:, :, : max(active)]
        picked = self.picked = PickedTokens(packet, confidences=rules.confidences)
        drafted = []
        for index, (row, ids, peaks, sound) in enumerate(
            zip(self.rows[: active[0]], picked.ids, picked.peaks, picked.sound, strict=False)
        ):
            wanted = 1 if index in self.shortened else min(row.steps, self.taken)
            count = min(wanted, sound)
            del ids[count:]
            tokens = DrafterTokens(ids, count == wanted, peaks[:count])
            if row.task.paths:
                tokens = tokens._replace(beside=picked.beside(index, count))
            drafted.append(tokens)
        if (draws := self.own.draws) is not None and rules.sampling is not None:
            stand_ins = None if self.stand_ins is None else self.stand_ins.wait()
            probs = draws.draft_probs  # shared by all drafts
            for index, rows in self.own.row_of(self.taken).items():
                tokens, task = drafted[index], self.rows[index].task
                # If logits are not finite, the tokens sampled before are still proposed. Otherwise
                # the sampled token would affect the draft length.
                draft = sampled_draft(
                    task, tokens, rows, probs, rules.sampling, rules.ends, stand_ins
                )
                drafted[index] = tokens._replace(proposal=draft)
        return drafted


class RoundExtension:
    """Optional behavior of drafting rounds; this base class changes nothing.

    `DraftBatchRunner` calls `steps`, `admit` and `complete`, and `Drafter` the other methods. An
    extension keeps its data of a round itself.

    Attributes:
        completed: Number of drafts that `complete` has changed so far.
        seconds: Seconds that `complete` took so far, which are not in `DraftTiming.overhead`.
    """

    completed: int = 0
    seconds: float = 0.0

    def steps(self, task: DraftTask, steps: int) -> int:
        """Return the number of drafter steps for a sampled draft that would have `steps`."""
        return steps

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Prepare the rows of a new round, and reserve KV blocks. `collect` releases them."""

    def drafts(self, rows: Sequence[DraftRow]) -> Sequence[int]:
        """Return the indices of the rows that `after_prefill` drafts. The steps leave them out."""
        return ()

    def forks(self, rows: Sequence[DraftRow]) -> Sequence[Fork]:
        """Return the forks of the rows that draft step by step, sorted by row."""
        return ()

    def back(self, rows: Sequence[DraftRow]) -> bool:
        """Begin a round. Return True to get `CaughtUp.last`, which not all drafters can compute."""
        return False

    def before_picking(self, current: Round, behind: CaughtUp) -> None:
        """Change the round before its sampled and penalized rows pick their first tokens."""

    def after_prefill(self, current: Round, behind: CaughtUp) -> bool:
        """Change the picked first tokens. Return True to take the steps in `finish`."""
        return False

    def after_step(self, current: Round, number: int) -> None:
        """Change the picked tokens of a step in a round with forks; step 0 is catch-up."""

    def restarts(self, current: Round) -> bool:
        """Return True if `finish` has to take the steps, for the first time or once more."""
        return False

    def collect(self, current: Round, drafted: list[DrafterTokens]) -> None:
        """Change the results of a finished round, in the order of its rows, in place."""

    def complete(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts of a batch, in target tokens, changed."""
        return drafts
