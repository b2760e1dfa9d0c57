# SPDX-License-Identifier: Apache-2.0
"""What goes into a round of drafting, and what its decode loop gives back."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState
from vllm_hetero_spec.text.drafts import FirstToken
from vllm_hetero_spec.trees.race_tree import Chances


class DraftTask(NamedTuple):
    """One request of a round.

    Attributes:
        state: Its text in drafter ids, and its KV.
        lookahead: Target tokens that are useful to propose; 0 only catches up.
        penalty: Its penalties; None where there are none.
        draw: How its tokens are drawn; None for a greedy draft.
        paths: How many paths the drafter follows for a tree; 0 for a chain.
    """

    state: RequestState
    lookahead: int
    penalty: Penalty | None = None
    draw: DraftSampling | None = None
    paths: int = 0

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
        choose: Picks the first token among the drafter's best candidates, next ones and such for
            the place of the text's last token (none where they are not known); the drafter's best
            where None.
        side_blocks: KV blocks in which SLRS-n may feed side branches, one for each.
        forks: Its text once more for each path of a tree beside the chain, with as much room; each
            leaves the chain one token later.
        copies: Blocks of their KV, (from, to), once `pending` is written.
    """

    task: DraftTask
    sequence: DraftSequence
    pending: Sequence[int]
    steps: int
    choose: Callable[[Sequence[int], Sequence[int]], FirstToken] | None = None
    side_blocks: Sequence[int] = ()
    forks: Sequence[DraftSequence] = ()
    copies: Sequence[tuple[int, int]] = ()

    def greedy(self) -> "DraftRow":
        """With the drafter's likeliest tokens in the place of drawn ones."""
        if self.task.draw is None:
            return self
        return self._replace(task=self.task._replace(draw=None))


class TopCandidates(NamedTuple):
    """What is known of the rows that a request's tokens were picked from: m tokens of each.

    Attributes:
        tokens: int32 [S, m], the likeliest drafter ids; target ids where they are raced for, the
            first to arrive first.
        shares: float32 [S, m], their probabilities.
        fed: int32 [S, m], where raced for, the drafter token to be fed behind each;
        speeds: float32 [S, m], 1 / the times of arrival.
    """

    tokens: np.ndarray
    shares: np.ndarray
    fed: np.ndarray
    speeds: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["TopCandidates"]) -> "TopCandidates":
        """One behind the other, at least one."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


class DrafterBranch(NamedTuple):
    """A path beside the chain.

    Attributes:
        tokens: Drafter ids, from the text on.
        beside: What is known of their rows, as far as they are not the chain's.
        leaves: Tokens that it has in common with the chain.
    """

    tokens: list[int]
    beside: TopCandidates
    leaves: int


class DrafterTokens(NamedTuple):
    """What the decode loop made of one row.

    Attributes:
        tokens: Drafter ids, cut at the first whose logits were not finite.
        finite: Whether all logits were.
        confidences: Of each token, where asked for: the largest probability that the drafter gave
            any token in its place, known before one was picked.
        proposal: The draft in target tokens, of a row whose tokens were drawn; greedy ones are
            still to be translated.
        beside: What else is known of the rows behind them, where the draft may be a tree.
        forks: Other paths.
        known: Leading bytes of them that the text has already: the first one takes the place of its
            last token. 0 where they stand behind the text.
    """

    tokens: list[int]
    finite: bool = True
    confidences: Sequence[float] = ()
    proposal: Draft | None = None
    beside: TopCandidates | None = None
    forks: Sequence[DrafterBranch] = ()
    known: int = 0


class DraftTiming(NamedTuple):
    """What a round of drafting took.

    Attributes:
        seconds: In the drafter's forwards, picking tokens included.
        overhead: Seconds in everything else.
        forwards: How many there were, the one that caught up included.
        picked: Drafter tokens, over all requests.
        caught_up: Context tokens that were read.
        trees: Trees that were found,
        tree_seconds: and the seconds that they took besides.
        exposed: Those of the forwards that the target waited for; all where None.
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
    """Who is asked, and told, while drafts are made."""

    can_stop_early: bool

    @property
    def race_chances(self) -> Chances:
        """What values children that are raced for."""

    def continue_drafting(self, confidences: Mapping[str, Sequence[float]]) -> bool:
        """Whether the drafter takes another step, from what each request's tokens are worth."""

    def drafted(self, timing: DraftTiming, drafts: Sequence[Draft]) -> None:
        """A round has ended."""
