# SPDX-License-Identifier: Apache-2.0
"""Frozen view of one step of the target, the same for both model runners.

`runner_v1` and `runner_v2` build it. Apart from them, only the code for attention over draft trees
reads vLLM's batch. A view is valid during its step only, because its arrays belong to the runner.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.engine.seam.tree_adapter import TreeRoom, TreesView

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def media_of(features: "Sequence[MultiModalFeatureSpec]") -> list[slice]:
    """Return the placeholder positions of a prompt, one slice for each multimodal feature."""
    places = [feature.mm_position for feature in features]
    return [slice(place.offset, place.offset + place.length) for place in places]


class RequestView(NamedTuple):
    """One request of the batch after a step of the target.

    Attributes:
        token_ids: int [num_tokens], target ids of prompt and output, in the runner's host memory.
        new_tokens: Target ids that it sampled in this step; empty in prefill.
        num_drafted: Draft tokens that the target verified in this step; for a tree, its nodes.
        num_padding: Other computed draft positions: padding, or tokens that a tree computes again.
        has_text: True if the prompt consists of token ids, not embeddings.
        media: Placeholder tokens of the prompt for images and the like.
    """

    req_id: str
    params: RequestParams
    token_ids: np.ndarray
    num_prompt_tokens: int
    new_tokens: Sequence[int]
    num_drafted: int = 0
    num_padding: int = 0
    has_text: bool = True
    media: Sequence[slice] = ()

    @property
    def num_tokens(self) -> int:
        """Number of target tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated target tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_accepted(self) -> int:
        """Number of draft tokens accepted in this step; in a tree, the depth reached."""
        return max(0, len(self.new_tokens) - 1)

    @property
    def prompt_text(self) -> np.ndarray:
        """int [n], target ids of the prompt without media."""
        prompt = self.token_ids[: self.num_prompt_tokens]
        if not self.media:
            return prompt
        is_text = np.ones(len(prompt), bool)
        for part in self.media:
            is_text[part] = False
        return prompt[is_text]

    def since(self, num_tokens: int) -> Sequence[int]:
        """Return the target ids after the first `num_tokens`."""
        if num_tokens + len(self.new_tokens) == len(self.token_ids):
            return self.new_tokens  # usual case; does not read the runner's memory
        ids: list[int] = self.token_ids[num_tokens:].tolist()
        return ids

    @property
    def begins(self) -> bool:
        """True until the step in which it samples its first token, inclusive."""
        return len(self.token_ids) - self.num_prompt_tokens <= len(self.new_tokens)


@dataclass(frozen=True)
class StepView:
    """A step of the target that has sampled, before its drafts are made.

    Attributes:
        requests: Requests of the batch, in its order.
        started: New requests since the last view, with their cache_salt.
        live: Ids of all requests of the runner, including waiting ones.
        lookahead: Maximum draft length of each request, in target tokens.
        buckets: Draft lengths that later steps can have, ascending, in rows of trees; empty if a
            step's drafts may have any length up to `lookahead`.
        longest: Longest chain of the buckets; 0 without buckets.
        trees: Limits of draft trees; None if drafts must be chains.
        preempted: Requests that lost their KV in this step. Their drafts are void. If one comes
            back, vLLM may schedule draft positions for it, which are padding.
        ended: Requests that vLLM has since reported as finished or preempted. With asynchronous
            scheduling, one more step may contain them.
        max_model_len: The target's maximum sequence length in tokens.
        num_rows: Tokens that the target computed in this step.
        target_seconds, step_seconds: As in `runner.StepTimes`.
        early_bonus: True if vLLM applies `min_tokens` to the bonus token as if no draft came before
            it. vLLM would then wrongly forbid stop tokens after a draft that reaches `min_tokens`.
    """

    requests: Sequence[RequestView]
    started: Mapping[str, str | None]
    live: Collection[str]
    lookahead: int
    max_model_len: int
    num_rows: int
    target_seconds: float | None = None
    step_seconds: float | None = None
    buckets: Sequence[int] = ()
    longest: int = 0
    trees: TreeRoom | None = None
    preempted: Collection[str] = ()
    ended: Collection[str] = ()
    early_bonus: bool = False

    @cached_property
    def index_of(self) -> dict[str, int]:
        return {request.req_id: index for index, request in enumerate(self.requests)}

    @property
    def num_new_tokens(self) -> int:
        """Number of target tokens sampled in this step by all requests."""
        return sum([len(request.new_tokens) for request in self.requests])

    @cached_property
    def room(self) -> list[int]:
        """Maximum useful draft length of each request; the target itself adds its last token."""
        rooms = []
        for request in self.requests:
            end, longest = self.max_model_len, request.params.max_tokens
            if longest is not None:
                end = min(end, request.num_prompt_tokens + longest)
            rooms.append(max(0, end - len(request.token_ids) - 1))
        return rooms

    @cached_property
    def going_on(self) -> list[bool]:
        """For each request, True if it sampled in this step and can take at least one draft token.

        vLLM reports the end of a request only later. Drafts for an ended request would delay
        others.
        """
        return [
            room > 0
            and bool(new := request.new_tokens)
            and request.params.end_ids.isdisjoint(new)
            and request.req_id not in self.ended
            for request, room in zip(self.requests, self.room, strict=True)
        ]

    @property
    def decodes_only(self) -> bool:
        """True if the step computed no prompt tokens, only decoding or verification."""
        rows = sum([1 + request.num_drafted + request.num_padding for request in self.requests])
        return not self.started and self.num_rows == rows

    def in_order(self, drafts: Sequence[Draft]) -> list[list[int]]:
        """Return the drafts' target tokens, one list per request, empty without a draft."""
        tokens: list[list[int]] = [[] for _ in self.requests]
        for draft in drafts:
            tokens[self.index_of[draft.req_id]] = draft.fed
        return tokens


@dataclass(frozen=True)
class BatchView:
    """Batch for which tokens are being sampled; empty while vLLM profiles with dummy requests.

    Fields other than `req_ids` are empty if the model runner passes them in another way.

    Attributes:
        req_ids: Requests, in the batch's order.
        noise_seeds: `RequestParams.noise_seed`.
        num_output_tokens: Target tokens generated before this step. On V2, 0 for a request without
            a draft.
        lengths: Draft tokens of each request.
        first_rows: int [B + 1], first row of logits of each request, then the number of rows.
        trees: Draft trees; None if all drafts are chains.
        named: Maximum number of `logprob_token_ids` of a request.
        void: Requests whose draft tokens in this step are padding.
    """

    req_ids: Sequence[str]
    noise_seeds: Sequence[int] = ()
    num_output_tokens: Sequence[int] = ()
    lengths: Sequence[int] = ()
    trees: TreesView | None = None
    named: int = 0
    void: Collection[str] = ()
    first_rows: np.ndarray | None = None
