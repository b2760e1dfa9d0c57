# SPDX-License-Identifier: Apache-2.0
"""Controllers of the draft length: the base class, and two simple controllers.

Every decision is lossless, because it is a stopping time. Whether a token is in a draft depends on
the tokens before it and on confidences known before the token was drawn, never on the token itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from vllm_hetero_spec.lookahead.step_policy import StepPolicy
from vllm_hetero_spec.options import DEFAULT_TREE_WIDTH


class Trees(NamedTuple):
    """The kind of drafts of a step.

    Attributes:
        paths: Number of paths that the drafter follows for a tree; 0 if drafts are chains.
        looks: True for a probe: trees are found and valued, but only chains are verified.
    """

    paths: int = 0
    looks: bool = False


class LookaheadPlan(NamedTuple):
    """Draft lengths of a step.

    Attributes:
        lookahead: Draft length of each request, in target tokens. With 0 the drafter need not even
            read the emitted tokens.
        probe: True if the step only measures: by its drafts whether drafting would pay, or without
            drafts what the target alone costs.
        trees: Kind of the drafts, if drafts may be trees.
    """

    lookahead: tuple[int, ...]
    probe: bool = False
    trees: Trees = Trees()


def lookahead_of(chosen: Sequence[int], length: int, limits: Sequence[int]) -> tuple[int, ...]:
    """Return draft lengths: `length` for the chosen requests, within their limits; 0 for others."""
    lookahead = [0] * len(limits)
    for i in chosen:
        lookahead[i] = min(length, limits[i])
    return tuple(lookahead)


class Gauges(NamedTuple):
    """A controller's view of the present, for metrics. Seconds and rates are estimates.

    Attributes:
        lookahead: Target tokens it drafts for requests without a limit; 0 while off.
        tokens_per_second: Lambda, what a second is worth.
        gain: Rate of the best lookahead over the rate of the target alone; 0 if unknown.
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
    """Decides the draft length of each step, and learns from its results.

    The order of a step is `plan`, drafting (with `continue_drafting` between drafter steps if the
    drafter can stop early), `trim`, and the target's step. Observations may come in any order
    before the next `plan`, or after it unless `learns_first`. They are optional.
    `refresh_forecast` must be called once per step, after them. The base class learns nothing;
    without a `policy` it never stops early and verifies everything.

    Attributes:
        regime: Short description of the present behavior; changes are logged.
        off: True if speculation is disabled at present, except for probes.
        policy: Prices of the present step; None if the controller has none.
        tokens_per_second: Price of a second in tokens; 0 if the controller has none.
    """

    regime = "drafting"
    off = False
    policy: StepPolicy | None = None
    tokens_per_second = 0.0

    @property
    def is_idle(self) -> bool:
        """True if the next few steps with a similar batch need no `plan`."""
        return self.off

    @property
    def learns_first(self) -> bool:
        """True if the next `plan` needs the observations of the last step."""
        return False

    @abstractmethod
    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
        buckets: Sequence[int] = (),
        lengths: Sequence[float] | None = None,
    ) -> LookaheadPlan:
        """Choose the draft length of each request.

        Args:
            batch: Number of requests in the target's next step.
            limits: Largest draft length of each request, in target tokens; 0 for no draft.
            pending: Context tokens that the drafter has not read, per request; None for none.
            random: True for each sampled request; None if all are greedy.
            buckets: If drafts are padded, their possible lengths, increasing from 0: the target
                computes as many rows for every request. Empty if drafts are not padded.
            lengths: Expected length of each request's output in tokens; None if unknown.
        """

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Return for each request whether to continue its draft, between two drafter steps.

        Args:
            confidences: One list per request of the plan, for the tokens proposed so far; empty for
                requests without a draft.
        """
        if self.policy is not None:
            return self.policy.continue_drafting(confidences)
        return [True] * len(confidences)

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """Return the number of each request's proposed tokens to verify.

        The decision on token j uses only confidences of tokens 0 to j, of this and of other
        requests.

        Args:
            confidences: One list per request of the plan, with a number from 0 to 1 for each
                proposed target token, known before that token was drawn.
        """
        if self.policy is not None:
            return self.policy.trim(confidences)
        return [len(request) for request in confidences]

    def row_price(self, rows: int) -> float:
        """Return the price in tokens of one more row in a step of `rows` rows."""
        return 0.0 if self.policy is None else self.policy.row_price(rows)

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:  # noqa: B027
        """Observe a target step without prefill.

        Args:
            batch: Number of requests.
            rows: Number of computed rows.
            seconds: Wall time from drafts to next tokens.
            again: Context tokens whose KV branches of trees have read.
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
        """Observe the drafting round of a step.

        Args:
            batch: Mean number of drafted requests over the drafter steps.
            steps: Number of drafter forwards, including the catch-up.
            seconds: Time of the forwards.
            overhead: Time of the rest in seconds: translation, copies, token choice.
            fed: Context tokens fed in the catch-up, over all requests.
            longest: Target tokens of the longest draft.
            exposed: Number of forwards that the target waited for; None for all.
            wide: True if the forwards also collected candidates for trees.
        """

    def observe_acceptance(  # noqa: B027
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float] = (),
        wanted: int = 0,
        random: bool = False,
    ) -> None:
        """Observe the verification of one request's draft.

        Args:
            verified: Number of verified draft tokens.
            accepted: Number of accepted draft tokens.
            confidences: One per proposed token, including those removed by `trim`.
            wanted: Planned draft length; omitted if `continue_drafting` ended the draft.
            random: True if the request is sampled.
        """

    def emitted(self, tokens: int, seconds: float | None) -> None:  # noqa: B027
        """Observe the emitted tokens of a step over all requests, and its seconds with drafting.

        `seconds` is None if the step also read prompts.
        """

    def refresh_forecast(self) -> None:  # noqa: B027
        """Prepare the next `plan` while the host is idle."""

    @abstractmethod
    def gauges(self) -> Gauges:
        """Return the present state for metrics."""


class Fixed(Controller):
    """The same lookahead always.

    Args:
        lookahead: In target tokens; 0 is the target alone.
        width: Paths that the drafter follows for a tree; 0 if drafts are chains.
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
        lengths: Sequence[float] | None = None,
    ) -> LookaheadPlan:
        lookahead = tuple(min(limit, self._lookahead) for limit in limits)
        return LookaheadPlan(lookahead, trees=self._trees)

    def gauges(self) -> Gauges:
        return Gauges(self._lookahead)


class ConfidenceStop(Fixed):
    """Drafts until the first token of low confidence, which is kept.

    The rule of Hugging Face's `assistant_confidence_threshold`. Because the token itself is kept,
    the confidence may even be the probability of the token drawn.

    Args:
        threshold: Lowest confidence behind which drafting goes on, from 0 to 1.
        lookahead: Longest draft, in target tokens.
        width: As in `Fixed`.
    """

    def __init__(self, threshold: float, lookahead: int, width: int = DEFAULT_TREE_WIDTH) -> None:
        super().__init__(lookahead, width)
        self._threshold = threshold

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        return [all(not c < self._threshold for c in request) for request in confidences]

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [
            next((j + 1 for j, c in enumerate(request) if c < self._threshold), len(request))
            for request in confidences
        ]
