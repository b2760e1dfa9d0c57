# SPDX-License-Identifier: Apache-2.0
"""Which token comes next: the drafter's best for greedy drafts, a draw for others.

What is picked stays on the device, where the next step feeds it, and is fetched at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hetero_spec.draft.drawing import DrawBatch, SampledMethod
from vllm_hetero_spec.draft.penalties import PenalisedRow, Penalties
from vllm_hetero_spec.draft.race_tree import Arrivals
from vllm_hetero_spec.draft.slrs import MergeSpan
from vllm_hetero_spec.engine.drafter.round_plan import RoundPlan
from vllm_hetero_spec.engine.drafter.tasks import Beside, DraftRow, DraftTask
from vllm_hetero_spec.largest import largest
from vllm_hetero_spec.staging import Send

_ONE_TOKEN = MergeSpan(1)
_FIRST_BESIDE = 3  # of the lines of `Picked.packet`
_FED = 2  # the place of `Beside.fed` among its columns


@dataclass(frozen=True)
class PickRules:
    """What holds for all requests.

    Attributes:
        vocab_size: Ids of the drafter's tokenizer; embedding rows beyond do not exist.
        banned: int64 ids that are never picked.
        ends: Ids after which a draft ends.
        sampling: What sampled drafts propose; None where all are greedy.
        confidences: Whether they are asked for.
        beside: Tokens of each row that are known beside the one that is picked, for trees.
    """

    vocab_size: int
    banned: torch.Tensor
    ends: frozenset[int]
    sampling: SampledMethod | None
    confidences: bool = False
    beside: int = 0

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
    ) -> DrawBatch:
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
        return DrawBatch(
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


class Picked:
    """What was picked in up to T steps for up to B requests: one tensor, fetched at once.

    Args:
        steps: T.
        size: B.
        confidences: Whether the largest probability that each token competed with is kept.
        beside: Tokens that are known of each row, m: where there are any, the likeliest; in their
            place, where tokens are raced for, the first arrivals.
        device: Where the drafter runs.

    Attributes:
        packet: int32 [T, 3 + 4 m, B]: ids, then the bits of the float32 scores and confidences,
            then the columns of `Beside`.
        confidences: See above.
        beside: See above.
        wide: Whether the present round keeps what is beside: only trees have use for it.
    """

    def __init__(
        self,
        steps: int,
        size: int,
        device: torch.device,
        *,
        confidences: bool,
        beside: int = 0,
    ) -> None:
        lines = _FIRST_BESIDE + len(Beside._fields) * beside
        self.packet = torch.zeros((steps, lines, size), dtype=torch.int32, device=device)
        self.confidences, self.beside, self.wide = confidences, beside, False
        self._ids = self.packet[:, 0]
        self._scores, self._peaks = (self.packet[:, i].view(torch.float32) for i in (1, 2))

    @property
    def kept(self) -> torch.Tensor:
        """The lines of the packet that the present round keeps."""
        return self.packet if self.wide else self.packet[:, :_FIRST_BESIDE]

    def ids(self, step: int, count: int) -> torch.Tensor:
        """int32 [count], picked in a step."""
        return self._ids[step, :count]

    def best(self, logits: torch.Tensor, step: int) -> None:
        """Pick each row's likeliest token.

        Args:
            logits: float [n, V_D], of the first n requests.
            step: 0 after catching up.
        """
        count = len(logits)
        ids = largest(logits)
        scores = logits.gather(1, ids[:, None])[:, 0]
        self._ids[step, :count].copy_(ids)
        self._scores[step, :count].copy_(scores)
        if not self.confidences and not self.wide:
            return
        total = logits.logsumexp(-1)
        if self.confidences:
            self._peaks[step, :count].copy_((scores - total).exp_())
        if self.wide:
            found = logits.topk(self.beside, -1)
            shares = (found.values - total[:, None]).exp_().float().view(torch.int32)
            middle = _FIRST_BESIDE + self.beside
            self.packet[step, _FIRST_BESIDE:middle, :count].copy_(found.indices.T)
            self.packet[step, middle : middle + self.beside, :count].copy_(shares.T)

    def arrived(self, step: int, index: torch.Tensor, arrivals: Arrivals) -> None:
        """What came first in the races of the requests `index`, int64 [n]."""
        floats = (of.contiguous().view(torch.int32) for of in (arrivals.shares, arrivals.speeds))
        shares, speeds = floats
        columns = torch.cat([arrivals.tokens.int(), shares, arrivals.fed.int(), speeds], 1)
        self.packet[step, _FIRST_BESIDE:].index_copy_(1, index, columns.T)

    def leave(self, step: int, first: int, forks: torch.Tensor) -> None:
        """Let those forks leave their requests' paths that do so behind a step.

        Args:
            step: What has been picked in it stays for other forks; with 0 all begin.
            first: Place of the first fork; the others are behind it.
            forks: See `RoundPlan`.
        """
        request, leaves, column = forks
        now = self.packet[step, :, first : first + forks.shape[1]]
        if step == 0:
            now.copy_(self.packet[0].index_select(1, request))
        other = now.gather(0, _FIRST_BESIDE + column[None])[0]
        now[0].copy_(torch.where(leaves == step, other, now[0]))

    def overrule(self, step: int, index: torch.Tensor, other: "Picked", count: int) -> None:
        """In place of what was picked for some requests, what `other` has in its first step.

        Args:
            step: Of the round.
            index: int64 [count], the requests.
            other: Has them in this order.
            count: How many.
        """
        self.kept[step].index_copy_(1, index, other.kept[0, :, :count])

    def put(self, step: int, index: torch.Tensor, ids: torch.Tensor) -> None:
        """Other ids in place of what was picked for the requests `index`, int64 [n]."""
        self._ids[step].index_copy_(0, index, ids.to(torch.int32))

    def read(self, step: int, count: int) -> list[float]:
        """The confidences of a step; only on a CPU, where nobody has to be waited for."""
        peaks: list[float] = self._peaks[step, :count].tolist()
        return peaks


class PickedTokens:
    """`Picked.packet` on the host.

    Args:
        packet: int32 [S, 3 + 4 m, B].
        confidences: Whether it has any.

    Attributes:
        ids: Of each request, S of them; of one that ended earlier the first count.
        peaks: As `ids`; none without confidences.
        sound: Of each request, how many of its first logits were finite.
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

    def beside(self, request: int, count: int) -> Beside:
        """What is known of the first `count` rows of a request."""
        lines = self._packet[:count, _FIRST_BESIDE:, request].copy()
        tokens, shares, fed, speeds = np.split(lines, len(Beside._fields), axis=1)
        return Beside(tokens, shares.view(np.float32), fed, speeds.view(np.float32))


class OwnPicks:
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
        rules: PickRules,
        send: Send,
        plan: RoundPlan | None = None,
    ) -> None:
        device = rules.banned.device
        penalised = [
            PenalisedRow(index, penalty, row.task.state.count_tokens(rules.vocab_size, device))
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
            self._own = Picked(
                1, len(penalised), device, confidences=rules.confidences, beside=rules.beside
            )

    def __bool__(self) -> bool:
        return self.draws is not None or self._penalties is not None

    def pick(self, logits: torch.Tensor, picked: Picked, step: int) -> None:
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
            picked.put(step, index, self.draws.draw(logits[index]))
            if self.draws.arrivals is not None:
                picked.arrived(step, index, self.draws.arrivals)

    def leave(self, picked: Picked, step: int, forks: torch.Tensor) -> None:
        """Behind a step some forks leave, raced ones with a token that arrived.

        Args:
            picked: Of the round; see `Picked.leave`.
            step: Has been picked.
            forks: See `RoundPlan`.
        """
        if self._plan is None or not self._plan.forks.size:
            return
        if not (self._plan.forks[1] >= step).any():
            return
        draws, drawn, first = self.draws, len(self.drawn), self._plan.count
        if draws is None or not self._forked:
            picked.leave(step, first, forks)
            return
        ids, places = picked.ids(step, self._forked[-1] + 1), draws.index[drawn:]
        if step:
            draws.skip(drawn, ids[places], -1)
        picked.leave(step, first, forks)
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
