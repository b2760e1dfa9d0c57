# SPDX-License-Identifier: Apache-2.0
"""Buffers of the picked tokens of a round.

Picked tokens stay on the device, because the next step feeds them. The host reads them once, at the
end of the round.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from vllm_hetero_spec.draft.sampling import Arrivals
from vllm_hetero_spec.engine.drafter.tasks import TopCandidates
from vllm_hetero_spec.fast_argmax import fast_argmax

_FIRST_BESIDE = 3  # index of the first top candidate in axis 1 of `PickBuffers.packet`


class PickBuffers:
    """Picked tokens of up to T steps for up to B rows, in one tensor that is fetched in one copy.

    Args:
        steps: T.
        size: B.
        beside: Number of top candidates per position, m.

    Attributes:
        packet: int32 [T, 3 + 4 m, B]: ids, bits of float32 logits, bits of float32 confidences,
            fields of `TopCandidates`.
        wide: True if this round keeps top candidates; only trees need them.
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
        """The leading columns of the packet that this round uses."""
        return self.packet if self.wide else self.packet[:, :_FIRST_BESIDE]

    def ids(self, step: int, count: int) -> torch.Tensor:
        """Return the ids int32 [count] of a step."""
        return self._ids[step, :count]

    def best(self, logits: torch.Tensor, step: int) -> None:
        """Pick each row's likeliest token from logits [n, V_D]. Step 0 is catch-up."""
        count = len(logits)
        ids = fast_argmax(logits)
        scores = logits.gather(1, ids[:, None])[:, 0]
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
        """Replace the ids of rows `index`, int64 [n], in a step."""
        self._ids[step].index_copy_(0, index, ids.to(torch.int32))

    def trust(self, step: int, index: torch.Tensor, confidences: torch.Tensor) -> None:
        """Replace the confidences of rows `index`, int64 [n], in a step by float32 [n]."""
        self._peaks[step].index_copy_(0, index, confidences)

    def read(self, step: int, count: int) -> list[float]:
        """Return the confidences of a step. Used on a CPU only; a device would synchronize."""
        peaks: list[float] = self._peaks[step, :count].tolist()
        return peaks


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
