# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of a drafting round."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState


class DraftTask(NamedTuple):
    """One request of a round.

    Attributes:
        lookahead: Largest useful number of target tokens; 0 only catches up.
        draw: Sampling parameters; None for a greedy draft.
        paths: Number of drafter paths for a tree; 0 for a chain, which keeps no top candidates.
    """

    state: RequestState[Any]
    lookahead: int
    penalty: Penalty | None = None
    draw: DraftSampling | None = None
    paths: int = 0

    @property
    def req_id(self) -> str:
        return self.state.req_id


class DraftRow(NamedTuple):
    """One request in one call of the decode loop.

    Attributes:
        sequence: Its KV. The table must have room for `pending` and `steps` tokens.
        pending: Drafter ids to feed first, at least one.
        steps: Number of drafter tokens to draft; 0 only writes the KV of `pending`.
    """

    task: DraftTask
    sequence: DraftSequence
    pending: Sequence[int]
    steps: int

    def greedy(self) -> "DraftRow":
        """Return the row with a greedy draft instead of a sampled one."""
        if self.task.draw is None:
            return self
        return self._replace(task=self.task._replace(draw=None))


class TopCandidates(NamedTuple):
    """The m top candidates at each of S positions of a request's draft, all [S, m].

    Greedy drafts have drafter ids, the likeliest first. Races have target ids, the first arrival
    first.

    Attributes:
        tokens: int32 ids.
        shares: float32 probabilities.
        fed: int32, drafter token to feed after each target id; races only.
        speeds: float32, 1 / arrival time; races only.
    """

    tokens: np.ndarray
    shares: np.ndarray
    fed: np.ndarray
    speeds: np.ndarray


class DrafterTokens(NamedTuple):
    """Result of the decode loop for one row.

    Attributes:
        tokens: Drafter ids, up to the first non-finite logits.
        finite: True if all logits were finite.
        confidences: For each token, the largest probability at its position, known before the token
            was picked. Empty without confidences.
        proposal: The draft in target tokens of a sampled row. Greedy rows are translated later.
        beside: Top candidates at the positions of `tokens`, if the task has `paths`.
        known: Leading bytes of the first token that the context already has, because the token
            replaces its last one. 0 if the draft follows the context.
    """

    tokens: list[int]
    finite: bool = True
    confidences: Sequence[float] = ()
    proposal: Draft | None = None
    beside: TopCandidates | None = None
    known: int = 0


class DraftTiming(NamedTuple):
    """Duration and size of a drafting round.

    Attributes:
        seconds: Seconds in the drafter's forwards, token picking included.
        overhead: Seconds in everything else.
        caught_up: Context tokens that were read.
        tree_seconds: Seconds to build the trees, not in `overhead`.
        exposed: Number of forwards that the target waited for; None for all.
    """

    seconds: float
    overhead: float
    forwards: int
    picked: int
    caught_up: int
    trees: int = 0
    tree_seconds: float = 0.0
    exposed: float | None = None


class Control(Protocol):
    """Controls drafting, and receives its timing."""

    can_stop_early: bool

    def continue_drafting(self, confidences: Mapping[str, Sequence[float]]) -> bool:
        """Return True if the drafter should run another step. Called if `can_stop_early`.

        `confidences` has those of each request's tokens so far.
        """

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        """Receive the timing and drafts of a finished round."""
