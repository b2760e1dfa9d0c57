# SPDX-License-Identifier: Apache-2.0
"""Which token comes next: the drafter's best for greedy drafts, a draw for others.

All state is on the device until `collect`, which reads what was drafted once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.drawing import DrawBatch, SampledMethod
from vllm_hetero_spec.draft.penalties import PenalisedRow, Penalties
from vllm_hetero_spec.draft.slrs import MergeSpan
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask

# How many of the drafter's best ids the first token is chosen from.
_CANDIDATES = 8
_ONE_TOKEN = MergeSpan(1)


@dataclass(frozen=True)
class PickRules:
    """What holds for all requests.

    Attributes:
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond do not exist.
        banned: int64 ids that are never picked.
        ends: Ids after which a draft ends.
        sampling: What sampled drafts propose; None where all are greedy.
        generator: The drafter's own random stream.
        confidences: Whether they are asked for.
    """

    vocab_size: int
    banned: torch.Tensor
    ends: frozenset[int]
    sampling: SampledMethod | None
    generator: torch.Generator
    confidences: bool = False

    def span(self, task: DraftTask) -> MergeSpan:
        """How SLRS-n looks ahead for a request; one token where it is drafted otherwise.

        SLRS-n neither races nor penalises.
        """
        draw, sampling = task.draw, self.sampling
        if sampling is None or sampling.merging is None or draw is None:
            return _ONE_TOKEN
        plain = draw.race_seed is None and task.penalty is None
        return sampling.merge_span if plain else _ONE_TOKEN

    def draws(self, rows: Sequence[DraftRow], *, keep: bool = True) -> DrawBatch:
        """The draws of rows that are drawn; `keep` makes room for as many as they have steps."""
        assert self.sampling is not None
        return DrawBatch(
            [row.task.draw for row in rows if row.task.draw is not None],
            [row.steps if keep else 0 for row in rows],
            self.sampling,
            self.generator,
        )

    def only_real(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [n, V_D] of tokens that exist and may be picked, changed in place."""
        logits = logits[:, : self.vocab_size]
        return logits.index_fill_(1, self.banned, float("-inf"))


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
        drawn = [i for i, row in enumerate(rows) if row.task.draw is not None and row.steps]
        self._drawn = drawn
        self._index = torch.tensor(drawn, device=device)
        self._draws = rules.draws([rows[index] for index in drawn]) if drawn else None
        self._confidences: list[list[float]] = [[] for _ in rows]

    @property
    def newest(self) -> torch.Tensor:
        """int64 ids picked last, the next input."""
        return self._picked[-1]

    def pick(self, logits: torch.Tensor) -> None:
        """Pick for the first len(logits) rows from logits [n, V], changed in place."""
        logits = self._rules.only_real(logits)
        if self._penalties is not None:
            self._penalties.apply(logits)
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

    def so_far(self) -> dict[str, Sequence[float]]:
        """The confidences of the rows that picked last; waits for the device."""
        self._read_confidences(self._peaks[-1:])
        picked = self._rows[: len(self._peaks[-1])]
        return {
            row.task.req_id: so_far for row, so_far in zip(picked, self._confidences, strict=False)
        }

    def collect(self) -> list[DrafterTokens]:
        """Read everything: what was drafted for each row."""
        finite = torch.isfinite(torch.cat(self._scores))
        chosen = torch.where(finite, torch.cat(self._picked), -1)
        picked = iter(chosen.tolist())  # the one wait for the device
        drafted: list[list[int]] = [[] for _ in self._rows]
        for ids in self._picked:
            for tokens, token in zip(drafted[: len(ids)], picked, strict=False):
                tokens.append(token)
        sound = [min(tokens, default=0) >= 0 for tokens in drafted]
        kept = [tokens[: tokens.index(-1)] if -1 in tokens else tokens for tokens in drafted]
        # What `so_far` has read already is not read again.
        self._read_confidences(self._peaks[len(self._confidences[0]) :])
        row_of = self._row_of()
        probs = None if self._draws is None else self._draws.draft_probs  # one tensor for all
        return [
            DrafterTokens(
                tokens,
                finite,
                confidences,
                self._spelled_out(row, tokens if finite else [], confidences, probs, row_of[index])
                if probs is not None and index in row_of
                else None,
            )
            for index, (row, tokens, finite, confidences) in enumerate(
                zip(self._rows, kept, sound, self._confidences, strict=True)
            )
        ]

    def _read_confidences(self, peaks: Sequence[torch.Tensor]) -> None:
        for step in peaks:
            for confidences, peak in zip(self._confidences, step.tolist(), strict=False):
                confidences.append(peak)

    def _row_of(self) -> dict[int, list[int]]:
        """For each row that is drawn, where its draft_probs lie: step by step, row by row."""
        row_of: dict[int, list[int]] = {index: [] for index in self._drawn}
        position = 0
        for ids in self._picked:
            for index in self._drawn:
                if index < len(ids):
                    row_of[index].append(position)
                    position += 1
        return row_of

    def _spelled_out(
        self,
        row: DraftRow,
        drafted: Sequence[int],
        confidences: Sequence[float],
        probs: torch.Tensor,
        rows: Sequence[int],
    ) -> Draft:
        """What was drawn as target tokens: the first of each draw with its row, the rest certain.

        The draft ends by count or with a draw that says so itself, never by how likely it was.
        """
        sampling = self._rules.sampling
        assert sampling is not None
        proposal: list[int] = []
        row_of: list[int] = []
        peaks: list[float] = []
        for place, (drawn, line) in enumerate(zip(drafted, rows, strict=False)):
            tokens = sampling.spell(drawn)
            ended = not len(tokens) or drawn in self._rules.ends
            if not len(tokens) and not sampling.tokens.renormalise:
                tokens = [int(probs[line].argmax())]  # what stands in for nothing
            proposal += tokens
            row_of += [line, *[-1] * (len(tokens) - 1)][: len(tokens)]
            if confidences:
                peaks += [confidences[place], *[1.0] * (len(tokens) - 1)][: len(tokens)]
            if ended:
                break
        draft = Draft.chain(row.task.req_id, proposal, peaks, DraftProbs(probs, row_of))
        return draft.first(row.task.lookahead)

    def _penalised(self) -> Penalties | None:
        vocab_size = self._rules.vocab_size
        penalised = [
            PenalisedRow(
                index, row.task.penalty, row.task.state.count_tokens(vocab_size, self._device)
            )
            for index, row in enumerate(self._rows)
            if row.task.penalty is not None and row.steps
        ]
        return Penalties(penalised, self._device) if penalised else None

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first step of rows that have a say in it; its score tells whether it is finite."""
        best = logits.topk(min(_CANDIDATES, logits.shape[-1]), dim=-1)
        ids = [
            row.choose(candidates) if row.choose else candidates[0]
            for row, candidates in zip(self._rows, best.indices.tolist(), strict=False)
        ]
        return best.values[:, 0], torch.tensor(ids, device=logits.device)
