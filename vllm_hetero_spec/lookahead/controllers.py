# SPDX-License-Identifier: Apache-2.0
"""Who decides how far to draft: one interface, and its two simple implementations.

Whatever is decided keeps the target's law, because every decision is a stopping time: whether a
token is in a draft depends on the tokens before it and on confidences that were known before the
token itself was drawn, never on which token it became.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Plan:
    """What to draft in this step.

    Attributes:
        lookahead: Target tokens to draft for each request; 0 leaves a request alone: the drafter
            need not even read what was emitted.
        probe: These drafts only look whether drafting would pay.
    """

    lookahead: tuple[int, ...]
    probe: bool = False


@dataclass(frozen=True)
class Gauges:
    """A controller's view of the present, for metrics. Seconds and rates are estimates.

    Attributes:
        lookahead: Target tokens it drafts for requests without a limit; 0 while off.
        off: The target works alone, but for probes.
        tokens_per_second: Lambda, what a second is worth.
        gain: Rate of the best lookahead over the rate of the target alone; 0 where unknown.
        drafter_seconds: One drafter step of the present batch.
        target_seconds: A plain step of the target.
        verify_seconds: A step of the target that verifies the drafts of `lookahead`.
        acceptance: Conditional acceptance by position.
        probes: Rounds of drafting that were probes.
        switches: Times it went on or off.
    """

    lookahead: int
    off: bool = False
    tokens_per_second: float = 0.0
    gain: float = 0.0
    drafter_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    acceptance: tuple[float, ...] = ()
    probes: int = 0
    switches: int = 0


class Controller(Protocol):
    """Decides, step by step; told what came of it.

    One step is `plan`, then drafting (with `proceed` between drafter steps, where the drafter can
    stop a round early), `trim`, and the target's step. The observations may come in any order
    before the next `plan`; what is never observed is never learnt, and nothing breaks.
    """

    @property
    def regime(self) -> str:
        """A word or two for what it does at present; a change is worth a line in the log."""

    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
    ) -> Plan:
        """How far to draft.

        Args:
            batch: Requests in the target's next step.
            limits: Most target tokens worth drafting for each request; 0 for one that is not to
                be drafted for.
            pending: Context tokens that the drafter has yet to read for each request; None where
                there are none.
            random: Which requests are random, not greedy; None where none is.
        """

    def proceed(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Which requests draft on, between two drafter steps of a round.

        Args:
            confidences: Of the tokens proposed so far, one list for each request of the plan;
                empty for those not in the round.
        """

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many of each request's proposed tokens to verify.

        Args:
            confidences: For each request of the plan one number for each proposed target token,
                from 0 to 1, known before that token was drawn.

        Whether token j of a request is in depends on its confidences up to j, and on those of
        other requests.
        """

    def observe_step(self, batch: int, rows: int, seconds: float) -> None:
        """A target step without prefill took so long: wall time, from drafts to next tokens."""

    def observe_draft(
        self,
        batch: float,
        steps: float,
        seconds: float,
        *,
        overhead: float = 0.0,
        fed: int = 0,
        longest: int = 0,
    ) -> None:
        """A round of drafting took so long.

        Args:
            batch: Requests that drafted, the mean over its steps.
            steps: Drafter forwards, the one that catches up included.
            seconds: Of the forwards.
            overhead: Seconds of the rest: translation, copies, picking.
            fed: Context tokens fed in the catch-up, over all requests.
            longest: Target tokens of its longest draft.
        """

    def observe_acceptance(
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
            wanted: Tokens that were asked for; leave it out where `proceed` ended the draft.
            random: The request is random, not greedy.
        """

    def emitted(self, tokens: int, seconds: float) -> None:
        """The step as a whole, drafting included, gave so many tokens over all requests."""

    def gauges(self) -> Gauges:
        """The present, for metrics."""


class _Unlearning:
    """The part of a controller that learns nothing."""

    regime = "drafting"

    def observe_step(self, batch: int, rows: int, seconds: float) -> None:
        pass

    def observe_draft(
        self,
        batch: float,
        steps: float,
        seconds: float,
        *,
        overhead: float = 0.0,
        fed: int = 0,
        longest: int = 0,
    ) -> None:
        pass

    def observe_acceptance(
        self,
        verified: int,
        accepted: int,
        confidences: Sequence[float] = (),
        wanted: int = 0,
        random: bool = False,
    ) -> None:
        pass

    def emitted(self, tokens: int, seconds: float) -> None:
        pass


class Fixed(_Unlearning):
    """The same lookahead always.

    Args:
        lookahead: In target tokens.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead

    def plan(
        self,
        batch: int,
        limits: Sequence[int],
        pending: Sequence[int] | None = None,
        random: Sequence[bool] | None = None,
    ) -> Plan:
        return Plan(tuple(min(limit, self._lookahead) for limit in limits))

    def proceed(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        return [True] * len(confidences)

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [len(request) for request in confidences]

    def gauges(self) -> Gauges:
        return Gauges(self._lookahead)


class ConfidenceStop(Fixed):
    """Drafts until the first token of low confidence, which is kept.

    The rule of Hugging Face's `assistant_confidence_threshold`. Because the token itself is kept,
    the confidence may even be the probability of the token drawn.

    Args:
        threshold: Lowest confidence behind which drafting goes on, from 0 to 1.
        lookahead: Longest draft, in target tokens.
    """

    def __init__(self, threshold: float, lookahead: int) -> None:
        super().__init__(lookahead)
        self._threshold = threshold

    def proceed(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        return [all(not c < self._threshold for c in request) for request in confidences]

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [
            next((j + 1 for j, c in enumerate(request) if c < self._threshold), len(request))
            for request in confidences
        ]
