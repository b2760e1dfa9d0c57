# SPDX-License-Identifier: Apache-2.0
"""What goes into a round of drafting, and what its decode loop gives back."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.drawing import Draw
from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.engine.drafter.request_state import DraftSequence, RequestState


class DraftTask(NamedTuple):
    """One request of a round.

    Attributes:
        state: Its text in drafter ids, and its KV.
        lookahead: Target tokens that are useful to propose; 0 only catches up.
        penalty: Its penalties; None where there are none.
        draw: How its tokens are drawn; None for a greedy draft.
    """

    state: RequestState
    lookahead: int
    penalty: Penalty | None = None
    draw: Draw | None = None

    @property
    def req_id(self) -> str:
        """The request."""
        return self.state.req_id


class DraftRow(NamedTuple):
    """One request in one call of the decode loop.

    Attributes:
        task: What is wanted of it.
        sequence: Its KV; the table must have room for `pending` and `steps` tokens.
        pending: Drafter ids to feed first, at least one.
        steps: Drafter tokens to draft; 0 only writes the KV of `pending`.
        choose: Picks the first token among the drafter's best candidates; its best where None.
        side_blocks: KV blocks in which SLRS-n may feed side branches, one for each.
    """

    task: DraftTask
    sequence: DraftSequence
    pending: Sequence[int]
    steps: int
    choose: Callable[[list[int]], int] | None = None
    side_blocks: Sequence[int] = ()


class DrafterTokens(NamedTuple):
    """What the decode loop made of one row.

    Attributes:
        tokens: Drafter ids, cut at the first whose logits were not finite.
        finite: Whether all logits were.
        confidences: Of each token, where asked for: the largest probability that the drafter gave
            any token in its place, known before one was picked.
        proposal: The draft in target tokens, of a row whose tokens were drawn; greedy ones are
            still to be translated.
    """

    tokens: list[int]
    finite: bool = True
    confidences: list[float] | tuple[()] = ()
    proposal: Draft | None = None


class DraftTiming(NamedTuple):
    """What a round of drafting took.

    Attributes:
        seconds: In the drafter's forwards, picking tokens included.
        overhead: Seconds in everything else.
        forwards: How many there were, the one that caught up included.
        picked: Drafter tokens, over all requests.
        caught_up: Context tokens that were read.
    """

    seconds: float
    overhead: float
    forwards: int
    picked: int
    caught_up: int


class Control(Protocol):
    """Who is asked, and told, while drafts are made."""

    can_stop_early: bool

    def continue_drafting(self, confidences: Mapping[str, Sequence[float]]) -> bool:
        """Whether the drafter takes another step, from what each request's tokens are worth."""

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        """A round has ended."""
