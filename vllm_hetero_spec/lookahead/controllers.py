# SPDX-License-Identifier: Apache-2.0
"""Who decides how far to draft: the base class, and two simple controllers.

Whatever is decided keeps the target's law, because every decision is a stopping time: whether a
token is in a draft depends on the tokens before it and on confidences that were known before the
token itself was drawn, never on which token it became.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from vllm_hetero_spec.lookahead.step_policy import StepPolicy
from vllm_hetero_spec.options import DEFAULT_TREE_WIDTH
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics
from vllm_hetero_spec.trees.policy import Trees


class LookaheadPlan(NamedTuple):
    """What to draft in this step.

    Attributes:
        lookahead: Target tokens to draft for each request; 0 leaves a request alone: the drafter
            need not even read what was emitted.
        probe: These drafts only look whether drafting would pay.
        trees: What they may be where drafts may be trees.
    """

    lookahead: tuple[int, ...]
    probe: bool = False
    trees: Trees = Trees()


def lookahead_of(chosen: Sequence[int], length: int, limits: Sequence[int]) -> tuple[int, ...]:
    """So many tokens for the chosen requests, within their limits, and none for the others."""
    lookahead = [0] * len(limits)
    for i in chosen:
        lookahead[i] = min(length, limits[i])
    return tuple(lookahead)


class Gauges(NamedTuple):
    """A controller's view of the present, for metrics. Seconds and rates are estimates.

    Attributes:
        lookahead: Target tokens it drafts for requests without a limit; 0 while off.
        tokens_per_second: Lambda, what a second is worth.
        gain: Rate of the best lookahead over the rate of the target alone; 0 where unknown.
        drafter_seconds: One drafter step of the present batch.
        target_seconds: A plain step of the target.
        acceptance: Conditional acceptance by position.
    """

    lookahead: int
    tokens_per_second: float = 0.0
    gain: float = 0.0
    drafter_seconds: float = 0.0
    target_seconds: float = 0.0
    acceptance: tuple[float, ...] = ()


class Controller(ABC):
    """Decides how far to draft, step by step, and is told what came of it.

    One step is `plan`, then drafting (with `continue_drafting` between drafter steps, where the
    drafter can stop early), `trim`, and the target's step. The observations may come in any order
    before the next `plan`, or behind it unless it `learns_first`; what is never observed is never
    learnt, and nothing breaks. The base class learns nothing; without a `policy` it never stops
    early and verifies everything.

    Attributes:
        regime: A word or two for what it does at present; a change is worth a line in the log.
        off: The target works alone at present, but for probes.
        branches: To be told of trees; None where that is of no interest.
        policy: What tokens are worth in the present step; None where that is not asked.
    """

    regime = "drafting"
    off = False
    branches: BranchStatistics | None = None
    policy: StepPolicy | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the next few steps, of a batch like this, need not be looked at: off for now."""
        return self.off

    @property
    def learns_first(self) -> bool:
        """Whether the next plan hangs on what the last step has shown."""
        return False

    @abstractmethod
    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
        buckets: Sequence[int] = (),
    ) -> LookaheadPlan:
        """How far to draft.

        Args:
            batch: Requests in the target's next step.
            limits: Most target tokens worth drafting for each request; 0 to leave it alone.
            pending: Context tokens that the drafter has yet to read for each; None for none.
            random: Which requests are random, not greedy; None where none is.
            buckets: Where drafts are filled up, the lengths that they may have, rising from 0: the
                target computes as many rows of every request. None where each is as long as it is.
        """

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Which requests draft on, between two drafter steps.

        Args:
            confidences: Of the tokens proposed so far, one list for each request of the plan;
                empty for those that are not drafted for.
        """
        if self.policy is not None:
            return self.policy.continue_drafting(confidences)
        return [True] * len(confidences)

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many of each request's proposed tokens to verify.

        Whether token j of a request is in depends on its confidences up to j, and on those of
        other requests.

        Args:
            confidences: For each request of the plan one number for each proposed target token,
                from 0 to 1, known before that token was drawn.
        """
        if self.policy is not None:
            return self.policy.trim(confidences)
        return [len(request) for request in confidences]

    def row_price(self, rows: int) -> float:
        """Tokens that a row more has to bring in a step of so many."""
        return 0.0 if self.policy is None else self.policy.row_price(rows)

    def side_price(self, context: int) -> float:
        """Tokens that a side sequence of a tree has to bring beside its rows.

        Args:
            context: Tokens of its request, which it reads once more.
        """
        return 0.0 if self.policy is None else self.policy.side_price(context)

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:  # noqa: B027
        """A target step without prefill took so long: wall time, from drafts to next tokens.

        Args:
            batch: Its requests.
            rows: All that it computed.
            seconds: That it took.
            again: KV tokens that side sequences of trees have read again.
        """

    def observe_draft(  # noqa: B027
        self,
        batch: float,
        steps: float,
        seconds: float,
        *,
        overhead: float = 0.0,
        fed: int = 0,
        longest: int = 0,
        exposed: float | None = None,
        wide: bool = False,
    ) -> None:
        """The drafting of one step took so long.

        Args:
            batch: Requests that drafted, the mean over its steps.
            steps: Drafter forwards, the one that catches up included.
            seconds: Of the forwards.
            overhead: Seconds of the rest: translation, copies, picking.
            fed: Context tokens fed in the catch-up, over all requests.
            longest: Target tokens of the longest draft.
            exposed: Those of the forwards that the target waited for; all where None.
            wide: The forwards looked at more than the next token, for trees.
        """

    def observe_acceptance(  # noqa: B027
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float] = (),
        wanted: int = 0,
        random: bool = False,
    ) -> None:
        """One request's draft was verified.

        Args:
            verified: Tokens of it that the target verified.
            accepted: Leading tokens that it accepted.
            confidences: Of all tokens proposed, those that were trimmed included.
            wanted: Tokens that were asked for; left out where `continue_drafting` ended the draft.
            random: The request is random, not greedy.
        """

    def emitted(self, tokens: int, seconds: float) -> None:  # noqa: B027
        """The step as a whole, drafting included, gave so many tokens over all requests."""

    def refresh_forecast(self) -> None:  # noqa: B027
        """There is time: what the next plan needs may be worked out."""

    @abstractmethod
    def gauges(self) -> Gauges:
        """The present, for metrics."""


class Fixed(Controller):
    """The same lookahead always.

    Args:
        lookahead: In target tokens; 0 is the target alone.
        width: Paths that the drafter follows for a tree; 0 where drafts are chains.
    """

    def __init__(self, lookahead: int, width: int = DEFAULT_TREE_WIDTH) -> None:
        self._lookahead, self._trees = lookahead, Trees(width)
        self.off = not lookahead

    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
        buckets: Sequence[int] = (),
    ) -> LookaheadPlan:
        """The fixed lookahead, within the limits; see `Controller`."""
        lookahead = tuple(min(limit, self._lookahead) for limit in limits)
        return LookaheadPlan(lookahead, trees=self._trees)

    def gauges(self) -> Gauges:
        """The lookahead; nothing is estimated."""
        return Gauges(self._lookahead)


class ConfidenceStop(Fixed):
    """Drafts until the first token of low confidence, which is kept.

    The rule of Hugging Face's `assistant_confidence_threshold`. Because the token itself is kept,
    the confidence may even be the probability of the token drawn.

    Args:
        threshold: Lowest confidence behind which drafting goes on, from 0 to 1.
        lookahead: Longest draft, in target tokens.
        width: See `Fixed`.
    """

    def __init__(self, threshold: float, lookahead: int, width: int = DEFAULT_TREE_WIDTH) -> None:
        super().__init__(lookahead, width)
        self._threshold = threshold

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Requests without a low confidence so far; see `Controller`."""
        return [all(not c < self._threshold for c in request) for request in confidences]

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """Up to the first low confidence; see `Controller`."""
        return [
            next((j + 1 for j, c in enumerate(request) if c < self._threshold), len(request))
            for request in confidences
        ]
