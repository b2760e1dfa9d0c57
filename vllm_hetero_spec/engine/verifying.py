# SPDX-License-Identifier: Apache-2.0
"""What is kept of a draft until the target has verified it, to learn from."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_hetero_spec.engine.seam.step_view import RequestView


class PendingDraft(NamedTuple):
    """A draft on its way through the target: of all tokens proposed, those trimmed included.

    Attributes:
        confidences: Of each token.
        wanted: Tokens that were asked for; 0 where the round was ended early.
        random: Whether its request is.
        chain: Of a tree, the leading tokens of the drafter's own chain that are verified.
    """

    confidences: Sequence[float]
    wanted: int
    random: bool
    chain: Sequence[int] | None = None

    def accepted(self, request: RequestView) -> tuple[int, int]:
        """Tokens of the chain that were verified, and those of them that the target kept.

        Args:
            request: Its request, behind the step that verified it.
        """
        if self.chain is None:
            return request.num_drafted, request.num_accepted
        chain = self.chain[: request.num_drafted]
        pairs = enumerate(zip(chain, request.new_tokens, strict=False))
        differs = (place for place, (drafted, emitted) in pairs if drafted != emitted)
        return len(chain), next(differs, min(len(chain), len(request.new_tokens)))
