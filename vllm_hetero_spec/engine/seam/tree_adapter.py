# SPDX-License-Identifier: Apache-2.0
"""Contact of the core with draft trees: protocols that `engine/trees/` implements.

Without draft trees, a model runner has no `TreeAdapter`, and no code of `engine/trees/` runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.staging import Send

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class TreeRoom(NamedTuple):
    """Limits of draft trees in a step.

    Attributes:
        nodes: Draft tokens of a tree; a path has at most `StepView.lookahead`.
        rows: Rows of a draft, including tokens that are computed again.
        branches: Branches of a request.
    """

    nodes: int
    rows: int
    branches: int


class Walk(Protocol):
    """Result of following the trees of a batch; `trees.walk.Walk` describes the tensors."""

    @property
    def trees(self) -> torch.Tensor: ...
    @property
    def walks(self) -> torch.Tensor: ...
    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def accepted(self) -> torch.Tensor: ...
    @property
    def order(self) -> torch.Tensor: ...


class TreeRows(Protocol):
    """All rows of a batch with trees; `trees.walk.TreeBatch` describes the tensors."""

    @property
    def request_of(self) -> torch.Tensor: ...
    @property
    def depths(self) -> torch.Tensor: ...

    def walk(self, best: torch.Tensor, walks: torch.Tensor, place_of: torch.Tensor) -> Walk:
        """Follow the trees.

        Args:
            best: int64 [R], the target's choice in each row: its likeliest token or the race's.
            walks: bool [B], True for requests whose tree is followed.
            place_of: int64 [R], index of each row in its request.
        """


class TreesView(Protocol):
    """Draft trees of a batch.

    `planned` [B] is True for requests with a tree. `is_tree`, bool [B] on the device, is True for
    those whose tree can be verified.
    """

    @property
    def planned(self) -> Sequence[bool]: ...
    @property
    def is_tree(self) -> torch.Tensor: ...

    def num_rows(self, part: slice) -> int:
        """Return the number of rows of some requests."""

    def rows(self, fed: torch.Tensor, part: slice, send: Send) -> TreeRows:
        """Return the rows of some requests. `fed` int64 [R] has their input tokens."""


class TreeAdapter(Protocol):
    """Draft trees of one worker, one implementation per model runner.

    Attributes:
        nodes: Number of verified tree tokens by request, in the present step.
        again: Number of recomputed rows by request, if not 0, in the present step.
    """

    nodes: dict[str, int]
    again: dict[str, int]

    @property
    def uneven(self) -> bool:
        """True if the present step has more sequences than requests."""

    def agree(self) -> bool:
        """Return whether drafts may be trees, the same on all ranks. Every rank must call it."""

    def room(self, requests: int, rows: int) -> TreeRoom | None:
        """Return the limits of the next trees; None without scratch blocks."""

    def on_step_start(self, output: "SchedulerOutput") -> None:
        """Begin a step: update requests and blocks (Model Runner V2)."""

    def before_forward(
        self, req_ids: Sequence[str], scheduled: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Plan the step's branches from scheduled tokens and draft lengths of its requests."""

    def view(self) -> TreesView | None:
        """Return the trees of the step that is verified; None if all drafts are chains."""

    def after_sampling(self, emitted: Mapping[str, Sequence[int]]) -> None:
        """Copy the KV of accepted branch tokens into the requests' own blocks.

        Must run before the next forward. `emitted` has the sampled target ids of each request.
        """

    def expect(self, drafts: Sequence[Draft], keeps_chain: Callable[[str], bool]) -> None:
        """Note the trees among a step's drafts. Every rank must call it; those of the first count.

        `keeps_chain` returns True for requests whose parameters forbid trees.
        """

    def on_drafts_taken(
        self, drafts: Mapping[str, Sequence[int]] | None, lengths: Mapping[str, int]
    ) -> None:
        """Record the drafts that vLLM gets; ignore a tree whose tokens differ from its draft.

        Args:
            drafts: Target ids by request; None for those of `expect`.
            lengths: Number of tokens of each request.
        """
