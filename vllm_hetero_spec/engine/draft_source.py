# SPDX-License-Identifier: Apache-2.0
"""What a rank that drafts asks of whoever makes its drafts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.requests import Pool, RequestState
from vllm_hetero_spec.engine.drafter.tasks import Control, DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats


class DraftSource(Protocol):
    """Makes the drafts of one rank.

    Attributes:
        pool: Where the drafter's KV of each request is accounted for.
        max_length: Most drafter tokens of a text.
        most_steps: Most drafter tokens of a round.
        draws: Whether drafts of requests that sample are drawn; all are greedy otherwise.
        early: Whether a round is begun before the step's own tokens leave: it waits for nothing.
    """

    max_length: int
    most_steps: int
    draws: bool

    @property
    def pool(self) -> Pool:
        """See above."""

    @property
    def early(self) -> bool:
        """See above."""

    def begin(
        self, tasks: Sequence[DraftTask], outside: Iterator[RequestState], control: Control
    ) -> None:
        """Begin a round; `finish` has to follow.

        Args:
            tasks: Requests whose text has been read and whose KV is aligned.
            outside: Requests outside the batch, whose KV may be taken.
            control: Told what the round took; asked how far to go on where it wants to be.
        """

    def finish(self) -> list[Draft]:
        """A draft for each request of the round that is drafted for, in target tokens."""

    def record(self) -> int:
        """Record the drafter's CUDA graphs, if there are to be any; the bytes that they take."""

    def step(self, batch: int) -> None:
        """What a step of drafting for so many requests makes the target wait for, to be timed."""

    def read(self, tokens: int) -> None:
        """The same of reading so many context tokens."""

    def reset(self) -> None:
        """Forget every request; their states are void already."""

    def sleep(self, level: int) -> None:
        """The worker falls asleep, and all requests are forgotten.

        Args:
            level: 2 where no memory is to be held on devices.
        """

    def wake(self) -> None:
        """It is awake again."""

    def close(self) -> None:
        """The engine ends; whoever else works for it ends, too."""

    def export_to(self, stats: DraftStats) -> None:
        """Bring the counters that are kept elsewhere up to date."""


class WaitPolicy(Control, Protocol):
    """Who is asked, and told, where drafts are made ahead."""

    def wait(
        self, missing: Mapping[str, int], each: float, unread: int, wrong: Collection[str] = ()
    ) -> tuple[int, float]:
        """How far to wait for drafts that were not foreseen.

        Args:
            missing: Target tokens that each of them is to have, at least one.
            each: Drafter tokens for each of these.
            unread: Context tokens that the drafter reads before.
            wrong: Those of them for which something else had been drafted.

        Returns:
            Target tokens to wait for, 0 for none, and seconds at most.
        """

    def looked_up(self, rank: int | None, guesses: int) -> None:
        """A draft was there, or what was drafted ahead was all wrong.

        Args:
            rank: Of the line that it is of, the chain's is 0; None for none.
            guesses: Lines that were followed beside the chain.
        """

    def guesses(self, drafting: int, longest: int, each: float, most: int) -> int:
        """How many lines the drafter is to follow beside each chain.

        Args:
            drafting: Chains.
            longest: Target tokens of a draft.
            each: Drafter tokens for each of them.
            most: Lines at most.
        """
