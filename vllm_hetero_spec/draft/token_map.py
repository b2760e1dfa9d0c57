# SPDX-License-Identifier: Apache-2.0
"""Map of a drafter's distribution to the target's vocabulary: draft_probs.

A sampled method draws d from a row q over the drafter's vocabulary and proposes the target token
`first[d]`. The verifier needs the distribution of that token:
draft_probs(t) = sum of q(d) over all d with first[d] = t.
"""

import torch
from torch.nn.functional import pad

from vllm_hetero_spec.fast_argmax import fast_argmax

# Most likely tokens of a row that top_k and top_p choose among. Sorting a whole vocabulary can take
# longer than the drafter's forward.
_ORDERED = 1024
# Bytes that the draft_probs of a round may take; they are kept during the target's next forward.
_MOST_BYTES = 1 << 30


def most_rows(width: int) -> int:
    """Return how many rows of draft_probs, [width + 1] each, a drafting round may allocate."""
    return max(1, _MOST_BYTES // (4 * (width + 1)))


class TokenMap:
    """Map from drafter tokens to the target tokens that they propose.

    Attributes:
        first: int64 [V_D], target ids; -1 if a drafter token proposes nothing.
        width: Columns of the target's logits, V_T, including padding.
        renormalise: True if drafter tokens that propose nothing are never drawn (TLI,
            push-forward). If False, such a draw is a null proposal (union), and the most likely
            target token replaces it.
    """

    def __init__(self, first: torch.Tensor, width: int, renormalise: bool = True) -> None:
        self.first, self.width, self.renormalise = first, width, renormalise
        nothing = first < 0
        # Tokens that propose nothing map to an extra column, which `table[:, :-1]` removes.
        self._column = first.masked_fill(nothing, width)
        zeros = torch.zeros(len(first), device=first.device)
        self._forbidden = zeros.masked_fill_(nothing, float("-inf"))

    def forbidden(self, width: int) -> torch.Tensor | None:
        """Return what to add to logits [B, V_D], or wider: -inf for tokens never drawn, else 0.

        float32 [width]; None if every token may be drawn.
        """
        if not self.renormalise:
            return None
        padding = width - len(self.first)
        return pad(self._forbidden, (0, padding)) if padding else self._forbidden

    def table(self, count: int) -> torch.Tensor:
        """Return float32 zeros [count, V_T + 1] for `add_draft_probs`.

        The last column is scratch: it sums the probability of tokens that propose nothing.
        draft_probs are `table[:, :-1]`. They are not contiguous, so they must be made contiguous
        before they are sent as bytes.
        """
        return torch.zeros((count, self.width + 1), device=self.first.device)

    def likeliest(self, q: torch.Tensor) -> torch.Tensor:
        """Return the most likely drafter token that proposes each target token, int64 [B, V_T].

        For rows q [B, V_D] or wider. The id is V_D if no drafter token proposes a target token.
        """
        q = q[:, : len(self.first)]
        columns = self._column.expand(len(q), -1)
        best = q.new_zeros(len(q), self.width + 1).scatter_reduce(1, columns, q, "amax")
        ids = torch.arange(q.shape[1], device=q.device)
        ids = torch.where(q == best.gather(1, columns), ids, q.shape[1])
        found = ids.new_full((len(q), self.width + 1), q.shape[1])
        return found.scatter_reduce(1, columns, ids, "amin")[:, :-1]

    def add_draft_probs(self, q: torch.Tensor, table: torch.Tensor) -> None:
        """Add the draft_probs of rows q [B, V_D] or wider (padding is ignored) to a `table`."""
        table.index_add_(1, self._column, q[:, : len(self.first)])
        if not self.renormalise:
            # The most likely token replaces a null proposal, because rejection samplers have no
            # null token. It is fixed before the draw, so the row stays the exact distribution.
            nothing = table[:, -1:].clone()
            table.scatter_add_(1, fast_argmax(table[:, :-1])[:, None], nothing)


def probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    forbidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a request's sampling parameters to the drafter's logits.

    Args:
        logits: float [B, V_D]; -inf for tokens that must not be drawn.
        temperature: float [B], above 0.
        top_k: int64 [B], 0 for no limit; None if no request has a limit.
        top_p: float [B], 1 for no limit; None if no request has a limit.
        forbidden: float32 [V_D], 0, or -inf for tokens that must not be drawn; None if there are
            none.

    Returns:
        float32 [B, V_D], the distributions to draw from. Ties at the limit of top_k are kept. A row
        with a limit has at most `_ORDERED` tokens. This is lossless, because drafts may be drawn
        from any distribution; the parameters only bring it closer to the target's.
    """
    heat = temperature[:, None]
    # `addcdiv` computes in float32 for narrower logits, and a sum with 0 is exact.
    cooled = logits.float() / heat if forbidden is None else forbidden.addcdiv(logits, heat)
    rows = cooled.softmax(-1, dtype=torch.float32)
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
