# SPDX-License-Identifier: Apache-2.0
"""What was picked in a round: it stays on the device, where the next step feeds it, and is fetched
at the end.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.tasks import TopCandidates
from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.trees.race_tree import Arrivals

_FIRST_BESIDE = 3  # of the lines of `PickBuffers.packet`


class PickBuffers:
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
            then the columns of `TopCandidates`.
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
        lines = _FIRST_BESIDE + len(TopCandidates._fields) * beside
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
        ids = fast_argmax(logits)
        scores = logits.gather(1, ids[:, None])[:, 0]
        self._ids[step, :count].copy_(ids)
        self._scores[step, :count].copy_(scores)
        if not self.confidences and not self.wide:
            return
        # In 16-bit arithmetic a logarithm of such a sum is off by up to an eighth.
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
        """What came first in the races of the requests `index`, int64 [n]."""
        floats = (of.contiguous().view(torch.int32) for of in (arrivals.shares, arrivals.speeds))
        shares, speeds = floats
        columns = torch.cat([arrivals.tokens.int(), shares, arrivals.fed.int(), speeds], 1)
        self.packet[step, _FIRST_BESIDE:].index_copy_(1, index, columns.T)

    def branch_off(self, step: int, first: int, forks: torch.Tensor) -> None:
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

    def overrule(self, step: int, index: torch.Tensor, other: "PickBuffers", count: int) -> None:
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

    def trust(self, step: int, index: torch.Tensor, confidences: torch.Tensor) -> None:
        """Other confidences, float32 [n], for the requests `index`, int64 [n]."""
        self._peaks[step].index_copy_(0, index, confidences)

    def read(self, step: int, count: int) -> list[float]:
        """The confidences of a step; only on a CPU, where nobody has to be waited for."""
        peaks: list[float] = self._peaks[step, :count].tolist()
        return peaks


class PickedTokens:
    """`PickBuffers.packet` on the host.

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

    def beside(self, request: int, count: int) -> TopCandidates:
        """What is known of the first `count` rows of a request."""
        lines = self._packet[:count, _FIRST_BESIDE:, request].copy()
        tokens, shares, fed, speeds = np.split(lines, len(TopCandidates._fields), axis=1)
        return TopCandidates(tokens, shares.view(np.float32), fed, speeds.view(np.float32))
