# SPDX-License-Identifier: Apache-2.0
"""A drafter's row carried over to the target's vocabulary: draft_probs.

Every method that verifies by probability draws d from a row q over the drafter's vocabulary and
proposes the target token `first[d]`. The verifier needs the distribution of that token, which is q
carried over by `first`: draft_probs(t) = sum of q(d) over all d with first[d] = t.
"""

from dataclasses import dataclass, field

import torch

from vllm_hetero_spec.fast_argmax import fast_argmax

# How many of a row's likeliest tokens top_k and top_p choose among: to order a whole vocabulary can
# take longer than the forward that the row comes from.
_ORDERED = 1024
# Bytes that the rows of a round may take: they are kept through the target's next forward.
_MOST_BYTES = 1 << 30


def most_rows(width: int) -> int:
    """How many rows of the target's vocabulary a round may make, one for each drawn token.

    Args:
        width: Columns of the target's logits, V_T.
    """
    return max(1, _MOST_BYTES // (4 * (width + 1)))


@dataclass(frozen=True)
class TokenMap:
    """Which target token each drafter token proposes.

    Attributes:
        first: int64 [V_D], target id, -1 where a drafter token proposes nothing.
        width: Columns of the target's logits, V_T, padding included.
        renormalise: Never draw a drafter token that proposes nothing (TLI, push-forward). Where
            False such a draw is a null proposal (union), for which the likeliest token stands in.
    """

    first: torch.Tensor
    width: int
    renormalise: bool = True
    _nothing: torch.Tensor = field(init=False, repr=False)
    _column: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        allowed = self.first >= 0
        object.__setattr__(self, "_nothing", ~allowed)
        # What proposes nothing goes to a column of its own, which is cut off.
        object.__setattr__(self, "_column", torch.where(allowed, self.first, self.width))

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, V_D] without the tokens that propose nothing, in place."""
        if self.renormalise:
            logits[:, : len(self.first)].masked_fill_(self._nothing, float("-inf"))
        return logits

    def table(self, count: int) -> torch.Tensor:
        """float32 zeros [count, V_T + 1], to be filled by `add_draft_probs`.

        The last column is scratch: there the probability of all that proposes nothing is added up.
        draft_probs are `table[:, :-1]`, whose rows do not lie behind one another in memory: who
        sends them as bytes has to make them contiguous.
        """
        return torch.zeros((count, self.width + 1), device=self.first.device)

    def likeliest(self, q: torch.Tensor) -> torch.Tensor:
        """int64 [B, V_T], the likeliest drafter token that proposes each target token.

        Any id beyond the drafter's where none does. Of rows q [B, V_D] or wider.
        """
        q = q[:, : len(self.first)]
        columns = self._column.expand(len(q), -1)
        best = q.new_zeros(len(q), self.width + 1).scatter_reduce(1, columns, q, "amax")
        ids = torch.arange(q.shape[1], device=q.device)
        ids = torch.where(q == best.gather(1, columns), ids, q.shape[1])
        found = ids.new_full((len(q), self.width + 1), q.shape[1])
        return found.scatter_reduce(1, columns, ids, "amin")[:, :-1]

    def add_draft_probs(self, q: torch.Tensor, table: torch.Tensor) -> None:
        """Carry rows q [B, V_D] or wider (padding is not read) over to rows of a `table`."""
        table.index_add_(1, self._column, q[:, : len(self.first)])
        if not self.renormalise:
            # A null proposal becomes the likeliest real one: samplers of whole rows know no null,
            # and with any token fixed before the draw the row is still what is drawn from.
            nothing = table[:, -1:].clone()
            table.scatter_add_(1, fast_argmax(table[:, :-1])[:, None], nothing)


def probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a drafter draws from: its logits under the request's own sampling parameters.

    Args:
        logits: float [B, V_D]; -inf for tokens that must not be drawn.
        temperature: float [B], above 0.
        top_k: int64 [B], 0 for all; None where no request has one.
        top_p: float [B], 1 for all; None where no request has one.

    Returns:
        float32 [B, V_D]; ties at the edge of top_k are kept. Any distribution may be drawn from:
        the parameters only bring it nearer to the target's. So where they leave more than
        `_ORDERED` tokens, those are all.
    """
    rows = (logits.float() / temperature[:, None]).softmax(-1)
    if top_k is None and top_p is None:
        return rows
    ordered, order = rows.topk(min(_ORDERED, rows.shape[-1]), -1)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    limited = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    if top_k is not None:
        last = ordered.gather(1, (top_k - 1).clamp(0, ordered.shape[-1] - 1)[:, None])
        keep &= (top_k <= 0)[:, None] | (ordered >= last)
        limited |= top_k > 0
    if top_p is not None:
        before = ordered.cumsum(-1) - ordered
        keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
        limited |= top_p < 1
    rows.masked_fill_(limited[:, None], 0.0)
    rows.scatter_(1, order, ordered.masked_fill_(~keep, 0.0))
    return rows / rows.sum(-1, keepdim=True)
