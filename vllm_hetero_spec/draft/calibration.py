# SPDX-License-Identifier: Apache-2.0
"""How often one drafted token is accepted, computed from the rows of both models.

Every method proposes a token with a law that follows from the drafter's row and the maps of the
pair, so that its acceptance at a place of a text is a sum over two rows: nothing is drawn, and all
methods are compared on the same places. Whole drafts of a running engine accept in the same order,
but less where their contexts come from earlier drafts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.draft.slrs import DEFAULT_REACH, Merging, Path, Reach, Slrs
from vllm_hetero_spec.verify.noise import Noise

# Given places and for each a path of drafter tokens, the drafter's rows [n, V_D] behind it.
Follow = Callable[[Sequence[int], Sequence[Sequence[int]]], torch.Tensor]


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over independent groups, such as the texts that places lie in.

    Attributes:
        value: The ratio.
        influence: float64 [G], how much each group moves it; adds up to 0.
    """

    value: float
    influence: torch.Tensor

    @classmethod
    def of(cls, parts: torch.Tensor, wholes: torch.Tensor) -> "Estimate":
        """sum(parts) / sum(wholes), of tensors [G].

        Raises:
            ValueError: Fewer than two groups, which say nothing about the error, or empty ones.
        """
        parts, wholes = parts.double().cpu(), wholes.double().cpu()
        total = wholes.sum()
        if len(wholes) < 2 or total <= 0:
            raise ValueError(f"an estimate needs two groups that hold something, not {wholes}")
        value = parts.sum() / total
        return cls(value.item(), (parts - value * wholes) / total)

    @property
    def error(self) -> float:
        """Standard error; groups may be of any size and alike inside."""
        count = len(self.influence)
        return math.sqrt(count / (count - 1) * self.influence.square().sum().item())

    def minus(self, other: "Estimate") -> "Estimate":
        """The difference of two ratios over the same groups, its error that of pairs."""
        return Estimate(self.value - other.value, self.influence - other.influence)


class Calibration:
    """Acceptance of every method at places of a text.

    Args:
        twins: The target token with the bytes of each drafter token; -1 outside the intersection.
        firsts: The first target token of each drafter token; -1 where the target cannot spell it.
        merging: Target tokens of several drafter tokens.
        reaches: Of SLRS-n, each once.
    """

    def __init__(
        self,
        twins: TokenMap,
        firsts: TokenMap,
        merging: Merging,
        reaches: Sequence[Reach] = (DEFAULT_REACH,),
    ) -> None:
        self._twins, self._firsts = twins, firsts
        device = twins.first.device
        self._slrs = {
            reach: Slrs(firsts, merging, frozenset(), Noise(device), reach.span)
            for reach in sorted(reaches)
        }
        shared = twins.first[twins.first >= 0]
        self._shared = torch.zeros(twins.width, dtype=torch.bool, device=device)
        self._shared[shared] = True

    def measure(
        self, p: torch.Tensor, q: torch.Tensor, greedy: Sequence[int], follow: Follow
    ) -> dict[str, torch.Tensor]:
        """Acceptance at each of n places.

        Args:
            p: float32 [n, V_T], the target's law of its next token behind a text.
            q: float32 [n, V_D] or wider, the drafter's of its next token behind the same text;
                nothing where a token must not be drafted.
            greedy: The first target token of a greedy draft, -1 where it gave none.
            follow: The drafter's rows behind what it may draft next.

        Returns:
            float64 [n] by name. `target_shared`: mass of target tokens that the drafter has;
            `drafter_shared`: the same the other way round. Acceptance of `union` (what has no twin
            is rejected), `tli`, `push_forward`, SLRS-n by `Reach.name`, `slem_greedy`,
            `slem_sampled` (a draw of SLRS-n with the largest reach, matched as a string),
            `ersd_tli` and `ersd_slrs` (races, on the row of the same reach).
        """
        union = self._twins.laws(q)
        tli = _normalised(union)
        found = {
            "target_shared": p[:, self._shared].double().sum(-1),
            "drafter_shared": union.double().sum(-1),
            "union": overlap(p, union),
            "tli": overlap(p, tli),
            "push_forward": overlap(p, _normalised(self._firsts.laws(q))),
        }
        for reach in self._slrs:
            psi = self._slrs_laws(q, follow, reach)
            found[reach.name] = overlap(p, psi)
        picked = torch.tensor(greedy, device=p.device)
        matched = p.gather(1, picked.clamp_min(0)[:, None])[:, 0]
        return found | {
            "slem_greedy": torch.where(picked >= 0, matched, 0.0).double(),
            "slem_sampled": (p.double() * psi).sum(-1),
            "ersd_tli": race_acceptance(p, tli),
            "ersd_slrs": race_acceptance(p, psi),
        }

    def _slrs_laws(self, q: torch.Tensor, follow: Follow, reach: Reach) -> torch.Tensor:
        """float32 [n, V_T], the law of the first token that SLRS-n proposes."""
        fed: list[list[int]] = [[] for _ in q]

        def feed(
            indices: Sequence[int], ids: Sequence[Sequence[int]], aside: int = 0
        ) -> torch.Tensor:
            texts = [[*fed[place], *tokens] for place, tokens in zip(indices, ids, strict=True)]
            kept = len(indices) - aside
            for place, text in zip(indices[:kept], texts, strict=False):
                fed[place] = text
            return follow(indices, texts)

        rows = q[:, : len(self._firsts.first)] * (self._firsts.first >= 0)
        paths = [Path(reach.span, wanted=1, asides=reach.candidates - 1) for _ in q]
        return self._slrs[reach].draft(_normalised(rows), paths, feed)


def overlap(p: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """float64 [n], how often a draw from psi is accepted for p, rows [n, V]: sum of min(p, psi)."""
    return torch.minimum(p, psi).double().sum(-1)


def race_acceptance(p: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """How often two races over the same clocks have the same winner.

    With rates p and psi that is the sum over i of 1 / sum_j max(p_j / p_i, psi_j / psi_i)
    (`verify.reference.race_acceptance`). Sorted by psi / p, the maximum is p_j / p_i up to i and
    psi_j / psi_i from there on: two running sums instead of all pairs.

    Args:
        p: float [n, V].
        psi: float [n, V]; 0 everywhere where nothing is proposed.

    Returns:
        float64 [n].
    """
    p, psi = p.double(), psi.double()
    order = (psi / p).nan_to_num(posinf=math.inf).argsort(-1)
    p, psi = p.gather(-1, order), psi.gather(-1, order)
    before = p.cumsum(-1) / p
    behind = (psi.sum(-1, keepdim=True) - psi.cumsum(-1)).clamp_min(0.0) / psi
    return torch.where((p > 0) & (psi > 0), 1.0 / (before + behind), 0.0).sum(-1)


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    """Rows as laws; a row of nothing stays one."""
    return rows / rows.sum(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
