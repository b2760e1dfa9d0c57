# SPDX-License-Identifier: Apache-2.0
"""Records of drafts until the target has verified them, to learn from the results."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView


class PendingDraft(NamedTuple):
    """A draft under verification, with all proposed tokens, including trimmed ones.

    Attributes:
        wanted: Planned number of tokens; 0 if the round was ended early.
        chain: For a tree, the leading tokens of the drafter's own chain that are verified.
    """

    confidences: Sequence[float]
    wanted: int
    random: bool
    chain: Sequence[int] | None = None

    def accepted(self, request: RequestView) -> tuple[int, int]:
        """Verified and accepted tokens of the chain, given its request after that step."""
        if self.chain is None:
            return request.num_drafted, request.num_accepted
        chain = self.chain[: request.num_drafted]
        pairs = enumerate(zip(chain, request.new_tokens, strict=False))
        differs = (place for place, (drafted, emitted) in pairs if drafted != emitted)
        return len(chain), next(differs, min(len(chain), len(request.new_tokens)))


class PendingDrafts(dict[str, PendingDraft]):
    """The drafts under verification, by request."""

    def take(self, step: StepView) -> list[tuple[PendingDraft, RequestView]]:
        """Remove and return the drafts that a step has verified, with their requests."""
        found = []
        for request in step.requests if self else ():
            draft = self.pop(request.req_id, None)
            if draft is not None and request.new_tokens:
                found.append((draft, request))
        # With pipeline stages, drafts of live requests may be verified in later steps.
        for req_id in self.keys() - step.live:
            del self[req_id]
        return found
