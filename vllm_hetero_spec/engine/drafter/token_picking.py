# SPDX-License-Identifier: Apache-2.0
"""Choice of the next token of each row of a round.

Each forward picks the likeliest token of every row (`PickBuffers.best`); with CUDA graphs this is
part of the graph. `RowPickers` then replaces the tokens of rows with penalties, and of sampled and
raced rows. Picked tokens stay on the device, because the next step feeds them. The host reads them
once, at the end of the round (`PickedTokens`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hetero_spec.draft.penalties import PenalizedRow, Penalties
from vllm_hetero_spec.draft.sampling import Arrivals, BatchSampler, SampledMethod
from vllm_hetero_spec.engine.drafter.round_plan import RoundPlan
from vllm_hetero_spec.engine.drafter.tasks import DraftRow, TopCandidates
from vllm_hetero_spec.fast_argmax import fast_max
from vllm_hetero_spec.staging import Send

_FIRST_BESIDE = 3  # index of the first top candidate in axis 1 of `PickBuffers.packet`


@dataclass(frozen=True)
class PickConfig:
    """Rules of token choice for all requests.

    Attributes:
        vocab_size: Ids of the drafter's tokenizer. Embedding rows beyond are no tokens.
        banned: int64 ids that are never picked.
        ends: Ids that end a draft.
        beside: Number of top candidates per position; 0 if no task has `paths`.
        back: Allow rounds with `BatchFeed.back`.
    """

    vocab_size: int
    banned: torch.Tensor
    ends: frozenset[int] = frozenset()
    sampling: SampledMethod | None = None
    confidences: bool = False
    beside: int = 0
    back: bool = False

    def only_real(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask banned ids in logits [n, V_D] in place; cut columns that are no tokens."""
        logits = logits[:, : self.vocab_size]
        return logits.index_fill_(1, self.banned, float("-inf"))


class PickBuffers:
    """Picked tokens of up to T steps for up to B rows, in one tensor that is fetched in one copy.

    Attributes:
        packet: int32 [T, 3 + 4 m, B] with m = `PickConfig.beside`: ids, bits of float32 logits,
            bits of float32 confidences, fields of `TopCandidates`.
        wide: True if this round keeps top candidates; only trees need them.
    """

    def __init__(self, steps: int, size: int, rules: PickConfig) -> None:
        self.confidences, self.beside, self.wide = rules.confidences, rules.beside, False
        lines = _FIRST_BESIDE + len(TopCandidates._fields) * self.beside
        device = rules.banned.device
        self.packet = torch.zeros((steps, lines, size), dtype=torch.int32, device=device)
        self._ids = self.packet[:, 0]
        self._scores, self._peaks = (self.packet[:, i].view(torch.float32) for i in (1, 2))

    @property
    def kept(self) -> torch.Tensor:
        """The leading columns of the packet that this round uses."""
        return self.packet if self.wide else self.packet[:, :_FIRST_BESIDE]

    def ids(self, step: int, count: int) -> torch.Tensor:
        """Return the ids int32 [count] of a step."""
        return self._ids[step, :count]

    def best(self, logits: torch.Tensor, step: int) -> None:
        """Pick each row's likeliest token from logits [n, V_D]. Step 0 is catch-up."""
        count = len(logits)
        scores, ids = fast_max(logits)
        self._ids[step, :count].copy_(ids)
        self._scores[step, :count].copy_(scores)
        if not self.confidences and not self.wide:
            return
        # The sum is float32: the logarithm of a 16-bit sum has an error of up to 1/8.
        best = scores[:, None]
        total = (logits - best).exp_().sum(-1, dtype=torch.float32)
        if self.confidences:
            self._peaks[step, :count].copy_(total.reciprocal())
        if self.wide:
            found = logits.topk(self.beside, -1)
            shares = (found.values.float() - best.float()).exp_().div_(total[:, None])
            shares = shares.view(torch.int32)
            middle = _FIRST_BESIDE + self.beside
            self.packet[step, _FIRST_BESIDE:middle, :count].copy_(found.indices.T)
            self.packet[step, middle : middle + self.beside, :count].copy_(shares.T)

    def arrived(self, step: int, index: torch.Tensor, arrivals: Arrivals) -> None:
        """Set the top candidates of rows `index`, int64 [n], to the first arrivals of races."""
        floats = (of.contiguous().view(torch.int32) for of in (arrivals.shares, arrivals.speeds))
        shares, speeds = floats
        columns = torch.cat([arrivals.tokens.int(), shares, arrivals.fed.int(), speeds], 1)
        self.packet[step, _FIRST_BESIDE:].index_copy_(1, index, columns.T)

    def branch_off(self, step: int, first: int, forks: torch.Tensor) -> None:
        """Set the tokens of forks that leave the chain after a step.

        Step 0 first copies each request's entry to its forks, which start at row `first`.
        """
        request, leaves, column = forks
        now = self.packet[step, :, first : first + forks.shape[1]]
        if step == 0:
            now.copy_(self.packet[0].index_select(1, request))
        other = now.gather(0, _FIRST_BESIDE + column[None])[0]
        now[0].copy_(torch.where(leaves == step, other, now[0]))

    def overrule(self, step: int, index: torch.Tensor, other: "PickBuffers", count: int) -> None:
        """Replace the entries of some rows in a step by those in step 0 of `other`."""
        self.kept[step].index_copy_(1, index, other.kept[0, :, :count])

    def put(self, step: int, index: torch.Tensor, ids: torch.Tensor) -> None:
        """Replace the ids of rows `index`, int64 [n], in a step by int32 or int64 [n]."""
        self._ids[step].index_copy_(0, index, ids.to(torch.int32))

    def lead(self, step: int, ids: torch.Tensor) -> None:
        """Replace the ids of the first n rows, int64 [n], in a step."""
        self._ids[step, : len(ids)].copy_(ids)

    def trust(self, step: int, index: torch.Tensor, confidences: torch.Tensor) -> None:
        """Replace the confidences of rows `index`, int64 [n], in a step by float32 [n]."""
        self._peaks[step].index_copy_(0, index, confidences)

    def read(self, step: int, count: int) -> list[float]:
        """Return the confidences of a step. Used on a CPU only; a device would synchronize."""
        return self._peaks[step, :count].tolist()


class RowPickers:
    """Picks tokens for the rows of a round that are sampled or have penalties.

    `drawn` are the indices of the sampled rows, `forked` those of their forks, and `draws` is the
    sampler of both.
    """

    def __init__(
        self, rows: Sequence[DraftRow], rules: PickConfig, send: Send, plan: RoundPlan
    ) -> None:
        device = rules.banned.device
        penalised = [
            PenalizedRow(index, penalty, row.task.state.count_tokens(rules.vocab_size, device))
            for index, row in enumerate(rows)
            if row.steps and (penalty := row.task.penalty) is not None
        ]
        self._steps = [row.steps for row in rows]
        self.drawn = [i for i, row in enumerate(rows) if row.task.draw is not None and row.steps]
        owners = enumerate(plan.forks[0].tolist(), plan.count)
        forked = [(at, rows[of]) for at, of in owners if rows[of].task.draw is not None]
        self.forked = [at for at, _ in forked]
        self._leading = not self.forked and self.drawn == list(range(len(self.drawn)))
        self.draws: BatchSampler | None = None
        if self.drawn:
            assert rules.sampling is not None
            each = [rows[index] for index in self.drawn] + [row for _, row in forked]
            looks = rules.sampling.tokens.renormalise and wide(rows)
            self.draws = BatchSampler(
                [*self.drawn, *self.forked],
                [draw for row in each if (draw := row.task.draw) is not None],
                [row.steps for row in each],  # forks sample one token less
                rules.sampling,
                send,
                rules.beside if looks else 0,
            )
        self._penalties: Penalties | None = None
        if penalised:
            self._penalties = Penalties(penalised, send)
            self._own = PickBuffers(1, len(penalised), rules)

    def __bool__(self) -> bool:
        return self.draws is not None or self._penalties is not None

    def pick(self, logits: torch.Tensor, picked: PickBuffers, step: int) -> None:
        """Replace the picked tokens of the rows that are sampled or have penalties.

        The logits [n, V_D] of the first n rows are changed in place. Step 0 is catch-up. Later
        steps count the tokens of the step before for penalties.
        """
        count = len(logits)
        if self._penalties is not None and (index := self._penalties.first(count)).numel():
            if step:
                self._penalties.add(picked.ids(step - 1, count))
            rows = self._penalties.apply(logits)
            self._own.wide = picked.wide
            self._own.best(rows, 0)
            picked.overrule(step, index, self._own, len(rows))
        if self.draws is not None and (drawn := self._num_drawn(step)):
            index = self.draws.index[:drawn]
            if self._leading:  # as in most rounds
                picked.lead(step, self.draws.draw(logits[:drawn]))
            else:
                picked.put(step, index, self.draws.draw(logits.index_select(0, index)))
            if self.draws.arrivals is not None:
                picked.arrived(step, index, self.draws.arrivals)

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


class PickedTokens:
    """`PickBuffers.kept` on the host, int32 [S, 3 or 3 + 4 m, B].

    Attributes:
        ids: S ids of each row. If a row ended earlier, only its first ones are valid.
        peaks: Confidences as `ids`; empty without confidences.
        sound: For each row, the number of leading steps with finite logits.
    """

    def __init__(self, packet: np.ndarray, *, confidences: bool) -> None:
        steps = len(packet)
        self.ids: list[list[int]] = packet[:, 0].T.tolist()
        self.peaks: list[Sequence[float]] = [()] * packet.shape[2]
        if confidences:
            self.peaks = packet[:, 2].view(np.float32).T.tolist()
        scores = packet[:, 1].view(np.float32)
        self.sound = [steps] * packet.shape[2]
        if not math.isfinite(sum(map(sum, scores.tolist()))):
            finite = np.isfinite(scores)
            self.sound = np.where(finite.all(0), steps, finite.argmin(0)).tolist()
        self._packet = packet

    def beside(self, request: int, count: int) -> TopCandidates:
        """Return the top candidates of a row's first `count` steps."""
        lines = self._packet[:count, _FIRST_BESIDE:, request].copy()
        tokens, shares, fed, speeds = np.split(lines, len(TopCandidates._fields), axis=1)
        return TopCandidates(tokens, shares.view(np.float32), fed, speeds.view(np.float32))
