# SPDX-License-Identifier: Apache-2.0
"""Interface between a rank that drafts and the source of its drafts."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.requests import Pool, RequestState
from vllm_hetero_spec.engine.drafter.tasks import Control, DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats


class DraftSource(Protocol):
    """Makes the drafts of one rank.

    Attributes:
        pool: Accounts for the drafter's KV of each request. Its tables have a type of its own.
        max_length: Maximum drafter tokens of a request's context.
        most_steps: Maximum drafter tokens of a round.
        draws: True if drafts of sampled requests are sampled. Otherwise all drafts are greedy.
        early: True if a round can begin before the step's own tokens are sent, because `begin` does
            not wait for the device.
    """

    max_length: int
    most_steps: int
    draws: bool

    @property
    def pool(self) -> Pool[Any]: ...

    @property
    def early(self) -> bool: ...

    def begin(
        self, tasks: Sequence[DraftTask], outside: Iterator[RequestState[Any]], control: Control
    ) -> None:
        """Begin a round, which `finish` ends.

        Args:
            tasks: Requests whose new tokens have been read and whose KV is aligned.
            outside: Requests outside the batch, whose KV may be taken.
            control: Receives the cost of the round, and may stop it early.
        """

    def finish(self) -> list[Draft]:
        """Return a draft in target tokens for each request that is drafted for."""

    def record(self) -> int:
        """Record the drafter's CUDA graphs, if any. Return their size in bytes."""

    def step(self, batch: int) -> None:
        """Run what a drafter step of this batch size makes the target wait for, to time it."""

    def read(self, tokens: int) -> None:
        """Run what a prefill of so many tokens makes the target wait for, to time it."""

    def reset(self) -> None:
        """Forget all requests. Their states are void already."""

    def sleep(self, level: int) -> None:
        """Prepare for sleep. All requests are forgotten.

        Args:
            level: vLLM's sleep level; at 2, no device memory may be held.
        """

    def wake(self) -> None:
        """Resume after sleep."""

    def close(self) -> None:
        """End the source, and any process that works for it."""

    def export_to(self, stats: DraftStats) -> None:
        """Update the counters that are kept elsewhere."""
