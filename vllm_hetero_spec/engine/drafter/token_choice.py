# SPDX-License-Identifier: Apache-2.0
"""Which token comes next: the drafter's best for greedy drafts, a draw for others.

All state is on the device until `collect`, which reads what was drafted once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch

from vllm_hetero_spec.draft.drawing import Draw, DrawBatch, SampledMethod
from vllm_hetero_spec.draft.path import Path
from vllm_hetero_spec.draft.penalties import PenalisedRow, Penalties, Penalty
from vllm_hetero_spec.draft.slrs import MergeSpan
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable

# How many of the drafter's best ids the first token is chosen from.
_CANDIDATES = 8


@dataclass
class DraftSequence:
    """What the drafter holds of one request.

    Attributes:
        table: Its KV blocks.
        kv_ids: Drafter ids whose KV is written, context first, then drafted ones.
    """

    table: BlockTable
    kv_ids: list[int] = field(default_factory=list)


@dataclass
class DraftRow:
    """One request in one call of `Drafter.run`.

    Attributes:
        sequence: Its KV; the table must have room for `pending` and `steps` tokens.
        pending: Ids to feed first, at least one.
        steps: Tokens to draft; 0 only writes the KV of `pending`.
        penalty: The request's penalties, if any.
        prompt_length: Leading ids of the context that are its prompt.
        choose: Picks the first token among the drafter's best candidates; its best where None.
        draw: How tokens are drawn; the drafter's best are taken where None.
        wanted: Target tokens to propose; read where tokens are drawn.
        index: The request's place in the batch.
        scratch: Blocks in which SLRS-n may feed side branches, one for each.
        drafted: Filled by `run`: the drafted ids, cut at the first that is not finite.
        finite: False where the drafter's logits were NaN or infinite.
        confidences: Filled by `run`, where asked for: of each drafted id the largest probability
            that the drafter gave any id in its place, known before one was picked.
        draft_probs: Filled by `run` for rows with `draw`: float32 [R, V_T], shared by all of them.
        row_of: The row of `draft_probs` of each drafted id.
        substitutes: What each drafted id proposes in the place of nothing.
        path: Filled by `run` for rows of SLRS-n, with `draft_probs`.
    """

    sequence: DraftSequence
    pending: Sequence[int]
    steps: int
    penalty: Penalty | None = None
    prompt_length: int = 0
    choose: Callable[[list[int]], int] | None = None
    draw: Draw | None = None
    wanted: int = 0
    index: int = 0
    scratch: Sequence[int] = ()
    drafted: list[int] = field(default_factory=list)
    finite: bool = True
    confidences: list[float] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None
    row_of: list[int] = field(default_factory=list)
    substitutes: list[int] = field(default_factory=list)
    path: Path | None = None


class Drawn(Protocol):
    """What tells how a request is drafted."""

    draw: Draw | None
    penalty: Penalty | None


@dataclass(frozen=True)
class PickRules:
    """What holds for all requests.

    Attributes:
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond do not exist.
        banned: int64 ids that are never picked: control tokens other than EOS.
        sampling: What sampled drafts propose; None where all are greedy.
        generator: The drafter's own random stream.
        confidences: Whether they are asked for.
    """

    vocab_size: int
    banned: torch.Tensor
    sampling: SampledMethod | None
    generator: torch.Generator
    confidences: bool = False

    def takes_paths(self, row: DraftRow) -> bool:
        """Whether a row is drafted by SLRS-n."""
        return bool(row.steps) and self.merge_span(row).tokens > 1

    def merge_span(self, request: Drawn) -> MergeSpan:
        """How far SLRS-n looks ahead for a request; it neither races nor penalises."""
        none = MergeSpan(1)
        if self.sampling is None or self.sampling.merging is None or request.draw is None:
            return none
        plain = request.draw.race_seed is None and request.penalty is None
        return self.sampling.merge_span if plain else none

    def draws(self, rows: Sequence[DraftRow], *, draft_probs: bool = True) -> DrawBatch:
        """The draws of rows that are drawn, with room for a row of `draft_probs` per step."""
        assert self.sampling is not None
        return DrawBatch(
            [row.draw for row in rows if row.draw is not None],
            [row.steps if draft_probs else 0 for row in rows],
            self.sampling,
            self.generator,
        )


class Picker:
    """Picks the tokens of one round.

    Args:
        rows: The round's requests, those with more steps first.
        rules: What holds for all of them.
        device: Where the logits are.
    """

    def __init__(self, rows: Sequence[DraftRow], rules: PickRules, device: torch.device) -> None:
        self._rows, self._rules, self._device = rows, rules, device
        self._penalties = self._penalised()
        self._picked: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._peaks: list[torch.Tensor] = []
        drawn = [index for index, row in enumerate(rows) if row.draw is not None and row.steps]
        self._drawn = drawn
        self._index = torch.tensor(drawn, device=device)
        self._draws = rules.draws([rows[index] for index in drawn]) if drawn else None

    @property
    def newest(self) -> torch.Tensor:
        """int64 ids picked last, the next input."""
        return self._picked[-1]

    def pick(self, logits: torch.Tensor) -> None:
        """Pick for the first len(logits) rows from logits [n, V], changed in place."""
        logits = logits[:, : self._rules.vocab_size]
        if self._penalties is not None:
            self._penalties.apply(logits)
        logits.index_fill_(1, self._rules.banned, float("-inf"))
        if not self._picked and any(row.choose for row in self._rows):
            scores, ids = self._choose(logits)
        else:
            scores, ids = logits.max(dim=-1)
        if self._rules.confidences:
            self._peaks.append((scores - logits.logsumexp(dim=-1)).exp())
        if self._draws is not None:
            count = sum(index < len(logits) for index in self._drawn)
            if count:
                index = self._index[:count]
                ids[index] = self._draws.draw(logits[index])
        if self._penalties is not None:
            self._penalties.add(ids)
        self._picked.append(ids)
        self._scores.append(scores)

    def so_far(self) -> Sequence[DraftRow]:
        """The rows that picked last, confidences filled; waits for the device."""
        rows = self._rows[: len(self._peaks[-1])]
        for row, peak in zip(rows, self._peaks[-1].tolist(), strict=True):
            row.confidences.append(peak)
        return rows

    def collect(self) -> None:
        """Read everything and fill the rows."""
        finite = torch.isfinite(torch.cat(self._scores))
        chosen = torch.where(finite, torch.cat(self._picked), -1)
        tokens = iter(chosen.tolist())  # the one wait for the device
        for ids in self._picked:
            for row, token in zip(self._rows[: len(ids)], tokens, strict=False):
                row.finite &= token >= 0
                if row.finite:
                    row.drafted.append(token)
        for row in self._rows:
            # The last drafted token has been chosen but never fed: it has no KV.
            row.sequence.kv_ids.extend(row.drafted[:-1])
        if self._peaks:
            self._fill_confidences()
        if self._draws is not None:
            self._hand_out(self._draws)

    def _fill_confidences(self) -> None:
        for row in self._rows:
            row.confidences.clear()
        for peaks in self._peaks:
            for row, peak in zip(self._rows[: len(peaks)], peaks.tolist(), strict=True):
                row.confidences.append(peak)

    def _hand_out(self, draws: DrawBatch) -> None:
        """Give every sampled row what it was drawn from."""
        # One tensor, by which a round is known.
        nulls, draft_probs = draws.substitutes, draws.draft_probs
        position = 0
        for ids in self._picked:
            for index in self._drawn:
                if index < len(ids):
                    row = self._rows[index]
                    row.draft_probs = draft_probs
                    row.row_of.append(position)
                    if nulls:
                        row.substitutes.append(nulls[position])
                    position += 1

    def _penalised(self) -> Penalties | None:
        penalised = []
        for index, row in enumerate(self._rows):
            if row.penalty is not None and row.steps:
                context = chain(row.sequence.kv_ids, row.pending)
                ids = [i if i < self._rules.vocab_size else 0 for i in context]
                prompt, output = ids[: row.prompt_length], ids[row.prompt_length :]
                penalised.append(PenalisedRow(index, row.penalty, prompt, output))
        if not penalised:
            return None
        return Penalties(penalised, self._rules.vocab_size, self._device)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first step of rows that have a say in it; its score tells whether it is finite."""
        best = logits.topk(min(_CANDIDATES, logits.shape[-1]), dim=-1)
        ids = [
            row.choose(candidates) if row.choose else candidates[0]
            for row, candidates in zip(self._rows, best.indices.tolist(), strict=False)
        ]
        return best.values[:, 0], torch.tensor(ids, device=logits.device)
