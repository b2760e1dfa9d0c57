# SPDX-License-Identifier: Apache-2.0
"""A round of drafting that has begun."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.round_plan import RoundPlan
from vllm_hetero_spec.engine.drafter.sampled_drafts import SampledDraft
from vllm_hetero_spec.engine.drafter.tasks import DrafterBranch, DrafterTokens, DraftRow
from vllm_hetero_spec.engine.drafter.token_choice import RowPickers
from vllm_hetero_spec.engine.drafter.token_healing import Candidates, HealedStart
from vllm_hetero_spec.engine.drafter.token_picking import PickedTokens
from vllm_hetero_spec.staging import Fetched


@dataclass
class Round:
    """A round on its way.

    Attributes:
        rows: Its requests, those with more steps first, those drafted by SLRS-n last.
        order: Where each came from.
        plan: Where everything goes.
        own: What is not the drafter's best.
        taken: Steps that were queued, catching up included; 0 where nothing is drafted.
        confidences: By request, of the tokens so far, where a controller looks at them.
        candidates: For the first tokens, on their way: see `TokenHealing`.
        others: What drafts begin with, where that had to be known before tokens were drawn.
        cut: By row, the replaced first token of a draft that has no other: the steps followed the
            drafter's own.
        known: Of the requests whose draft begins in the place of the text's last token, the bytes
            of that.
        fetched: What was picked, on its way.
        stand_ins: See `BatchSampler`, on their way.
        spans: What SLRS-n drafted, already there.
    """

    rows: list[DraftRow]
    order: list[int]
    plan: RoundPlan
    own: RowPickers
    taken: int = 0
    confidences: dict[str, list[float]] = field(default_factory=dict)
    candidates: Candidates | None = None
    others: dict[int, HealedStart] | None = None
    cut: dict[int, HealedStart] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    fetched: Fetched | None = None
    stand_ins: Fetched | None = None
    spans: list[DrafterTokens] = field(default_factory=list)

    def looked_at(self, number: int, peaks: Sequence[float]) -> dict[str, list[float]]:
        """The confidences so far of the requests that are drafted for in a step.

        Args:
            number: Of the step.
            peaks: Those of the step before, of all that were in it.
        """
        before = self.rows[: self.plan.active[number - 1]]
        rows = [row for row in before if row.steps >= number]
        for row, peak in zip(rows, peaks, strict=False):
            self.confidences.setdefault(row.task.req_id, []).append(peak)
        return {row.task.req_id: self.confidences[row.task.req_id] for row in rows}

    def drafted(
        self, confidences: bool, ends: frozenset[int], sampling: SampledMethod | None
    ) -> list[DrafterTokens]:
        """What was fetched, for each row that was drafted for step by step; waits for it.

        Args:
            confidences: Whether drafts are to come with confidences.
            ends: Ids after which a draft ends.
            sampling: What sampled drafts propose.
        """
        assert self.fetched is not None
        active = self.plan.active[: self.taken]
        packet = self.fetched.wait()[:, :, : max(active)]
        picked = PickedTokens(packet, confidences=confidences)
        drafted = []
        for index, (row, ids, peaks, sound) in enumerate(
            zip(self.rows[: active[0]], picked.ids, picked.peaks, picked.sound, strict=False)
        ):
            if (other := self.cut.get(index)) is not None:
                drafted.append(self._first_alone(row, other, peaks, picked, index))
                continue
            wanted = min(row.steps, self.taken)
            count = min(wanted, sound)
            del ids[count:]
            # The last drafted token has been picked but never fed: it has no KV.
            row.sequence.kv_ids += ids[:-1]
            tokens = DrafterTokens(ids, count == wanted, peaks[:count])
            if row.task.paths:
                forks = [
                    DrafterBranch(picked.ids[at][:sound], picked.beside(at, sound), leaves)
                    for at, leaves in self.plan.forks_of(index)
                    if wanted > leaves + 1  # it was fed what it leaves with
                    and (sound := min(wanted, picked.sound[at])) > leaves + 1
                ]
                tokens = tokens._replace(beside=picked.beside(index, count), forks=forks)
            drafted.append(tokens)
        for index, known in self.known.items():
            drafted[index] = drafted[index]._replace(known=known)
        if (draws := self.own.draws) is not None and sampling is not None:
            stand_ins = None if self.stand_ins is None else self.stand_ins.wait()
            probs = draws.draft_probs  # one tensor for all
            for index, lines in self.own.row_of(self.taken).items():
                tokens, task = drafted[index], self.rows[index].task
                # Up to a row that was not finite: what was drawn in front of it has to be verified.
                drawn = SampledDraft(tokens.tokens, lines, tokens.confidences)
                draft = drawn.draft(task, sampling, ends, probs, stand_ins)
                drafted[index] = tokens._replace(proposal=draft)
        return drafted

    def _first_alone(
        self,
        row: DraftRow,
        other: HealedStart,
        peaks: Sequence[float],
        picked: PickedTokens,
        index: int,
    ) -> DrafterTokens:
        """A draft of one token. The KV of the steps does not belong to the text, so it is void."""
        finite = picked.sound[index] > 0
        if other.known:
            row.sequence.kv_ids.pop()
            peaks = [other.confidence] if peaks else ()
        tokens = DrafterTokens([other.id][:finite], finite, peaks[:finite], known=other.known)
        if row.task.paths:
            tokens = tokens._replace(beside=picked.beside(index, int(finite)))
        return tokens
