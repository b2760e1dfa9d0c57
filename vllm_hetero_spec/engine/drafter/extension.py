# SPDX-License-Identifier: Apache-2.0
"""Extension point of drafting rounds. Without extensions, each request drafts one chain."""

from collections.abc import Sequence

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.round import Round
from vllm_hetero_spec.engine.drafter.round_plan import Fork
from vllm_hetero_spec.engine.drafter.steps import CaughtUp
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask


class RoundExtension:
    """Optional behavior of drafting rounds; this base class changes nothing.

    `DraftBatchRunner` calls `steps`, `admit` and `complete`, and `Drafter` the other methods. An
    extension keeps its data of a round itself.

    Attributes:
        completed: Number of drafts that `complete` has changed so far.
        seconds: Seconds that `complete` took so far, which are not in `DraftTiming.overhead`.
    """

    completed: int = 0
    seconds: float = 0.0

    def steps(self, task: DraftTask, steps: int) -> int:
        """Return the number of drafter steps for a sampled draft that would have `steps`."""
        return steps

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Prepare the rows of a new round, and reserve KV blocks. `collect` releases them."""

    def drafts(self, rows: Sequence[DraftRow]) -> Sequence[int]:
        """Return the indices of the rows that `after_prefill` drafts. The steps leave them out."""
        return ()

    def forks(self, rows: Sequence[DraftRow]) -> Sequence[Fork]:
        """Return the forks of the rows that draft step by step, sorted by row."""
        return ()

    def back(self, rows: Sequence[DraftRow]) -> bool:
        """Begin a round. Return True to get `CaughtUp.last`, which not all drafters can compute."""
        return False

    def before_picking(self, current: Round, behind: CaughtUp) -> None:
        """Change the round before its sampled and penalized rows pick their first tokens."""

    def after_prefill(self, current: Round, behind: CaughtUp) -> bool:
        """Change the picked first tokens. Return True to take the steps in `finish`."""
        return False

    def after_step(self, current: Round, number: int) -> None:
        """Change the picked tokens of a step in a round with forks; step 0 is catch-up."""

    def restarts(self, current: Round) -> bool:
        """Return True if `finish` has to take the steps, for the first time or once more."""
        return False

    def collect(self, current: Round, drafted: list[DrafterTokens]) -> None:
        """Change the results of a finished round, in the order of its rows, in place."""

    def complete(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts of a batch, in target tokens, changed."""
        return drafts
