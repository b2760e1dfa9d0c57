# SPDX-License-Identifier: Apache-2.0
"""One step of the target as drafting sees it: frozen, and the same for every model runner.

One file per runner makes these views (`runner_v1`, `runner_v2`). Beside them only what shows
attention the paths of trees reads vLLM's batch. A view is good for its step alone: its arrays
belong to the runner.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.seam.request_params import RequestParams
from vllm_hetero_spec.trees.layout import TreeRows


class RequestView(NamedTuple):
    """One request of the batch after a step of the target.

    Attributes:
        req_id: vLLM's name for it.
        params: What it asks for.
        token_ids: int [num_tokens], all its target ids so far, in the runner's host memory.
        num_prompt_tokens: How many of them are its prompt.
        new_tokens: Target ids that it sampled in this step; none while it reads its prompt.
        num_drafted: Tokens of its draft that the target verified in this step, nodes if it was a
            tree.
        num_padding: Places beyond them that were computed: they hold nothing, or what a tree has
            fed again.
        has_text: Whether its prompt is token ids, not embeddings.
        media: Parts of its prompt that stand for images and the like.
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
        """Target tokens so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Target tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_accepted(self) -> int:
        """Tokens of its draft that the target kept in this step: how deep it went into a tree."""
        return max(0, len(self.new_tokens) - 1)

    @property
    def prompt_text(self) -> np.ndarray:
        """int [n], its prompt without media."""
        prompt = self.token_ids[: self.num_prompt_tokens]
        if not self.media:
            return prompt
        is_text = np.ones(len(prompt), bool)
        for part in self.media:
            is_text[part] = False
        return prompt[is_text]

    def since(self, num_tokens: int) -> Sequence[int]:
        """Target ids behind the first so many."""
        if num_tokens + len(self.new_tokens) == len(self.token_ids):
            return self.new_tokens  # the usual case, without a look at the runner's memory
        ids: list[int] = self.token_ids[num_tokens:].tolist()
        return ids

    @property
    def begins(self) -> bool:
        """Whether it waits for its first token, or has sampled it in this step."""
        return len(self.token_ids) - self.num_prompt_tokens <= len(self.new_tokens)


class TreeRoom(NamedTuple):
    """What the drafts of a step may be where they may be trees.

    Attributes:
        nodes: Most tokens of a tree; a path has no more than the step's lookahead.
        rows: Most rows of a draft, with what is fed again.
        branches: Most side sequences of a request.
    """

    nodes: int
    rows: int
    branches: int


@dataclass(frozen=True)
class StepView:
    """A step of the target that has sampled, before its drafts are made.

    Attributes:
        requests: Of the batch, in its order.
        started: Requests that are new since the last view, with their cache_salt.
        live: Ids of all requests that the runner knows, waiting ones included.
        lookahead: Target tokens that may be drafted for each request.
        buckets: Lookaheads that a later step may be asked for, rising; none where a step's drafts
            may have any length up to `lookahead`. They count rows of trees.
        longest: The longest chain among them; 0 where there are none.
        trees: What drafts may be beside chains; None where they may be chains alone.
        preempted: Requests that the step took the KV from: their drafts are void. vLLM may schedule
            places for one that comes back, which hold none.
        ended: Requests of which vLLM has said since that they are over. Where steps are scheduled
            ahead they may be in one more.
        max_model_len: The target's longest sequence in tokens.
        num_rows: Tokens that the target computed in this step.
        target_seconds: Wall time since the drafts before were handed out; None in the first step.
        step_seconds: Wall time since the view before was made; None in the first step.
        early_bonus: Whether a bonus token is held to `min_tokens` as if it came in front of the
            draft: no stop token may follow a draft then that reaches `min_tokens`.
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
        """Each request's place in the batch."""
        return {request.req_id: index for index, request in enumerate(self.requests)}

    @property
    def num_new_tokens(self) -> int:
        """Target tokens sampled in this step, over all requests."""
        return sum([len(request.new_tokens) for request in self.requests])

    @cached_property
    def room(self) -> list[int]:
        """Target tokens worth proposing for each request: none beyond the model's length or its
        own end, where the last one is the target's own."""
        rooms = []
        for request in self.requests:
            end, longest = self.max_model_len, request.params.max_tokens
            if longest is not None:
                end = min(end, request.num_prompt_tokens + longest)
            rooms.append(max(0, end - len(request.token_ids) - 1))
        return rooms

    @cached_property
    def going_on(self) -> list[bool]:
        """Whether each request sampled in this step, and has more than one token to come.

        That vLLM ends others it tells later: what is drafted for them keeps the next ones waiting.
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
        """Whether nothing of a prompt was computed: a plain step of decoding, or of verifying."""
        rows = sum([1 + request.num_drafted + request.num_padding for request in self.requests])
        return not self.started and self.num_rows == rows

    def in_order(self, drafts: Sequence[Draft]) -> list[list[int]]:
        """The drafts' target tokens, one list for each request of the batch, empty without one."""
        tokens: list[list[int]] = [[] for _ in self.requests]
        for draft in drafts:
            tokens[self.index_of[draft.req_id]] = draft.fed
        return tokens


class TreesView(NamedTuple):
    """A batch of which some requests have draft trees.

    Attributes:
        parents: Of each row behind each request's root, see `verify.trees.TreeBatch.of`; those of a
            chain are no nodes.
        planned: Which requests have a tree, [B].
        is_tree: bool [B] on the device: which requests have one that can be verified.
    """

    parents: Sequence[Sequence[int]]
    planned: Sequence[bool]
    is_tree: torch.Tensor


@dataclass(frozen=True)
class BatchView:
    """The batch that tokens are being chosen for; empty while vLLM profiles with made-up ones.

    Attributes:
        req_ids: In the batch's order.
        noise_seeds: See `RequestParams`; as the next, where the device does not know them.
        num_output_tokens: Target tokens that each has generated before this step.
        lengths: Tokens of each request's draft, where the runner tells them here.
        trees: Among the drafts; None where all are chains.
        named: Most tokens that one of them names, to be told their probabilities; as `lengths`.
    """

    req_ids: Sequence[str]
    noise_seeds: Sequence[int] = ()
    num_output_tokens: Sequence[int] = ()
    lengths: Sequence[int] = ()
    trees: TreesView | None = None
    named: int = 0


def trees_of(drafts: Sequence[Draft]) -> dict[str, TreeRows]:
    """The trees among some drafts, by request."""
    return {draft.req_id: draft.rows for draft in drafts if draft.rows is not None}
