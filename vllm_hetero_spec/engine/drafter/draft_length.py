# SPDX-License-Identifier: Apache-2.0
"""Plan the number of drafter tokens that cover a draft's target tokens.

The number depends on the text. On a CPU a round continues if a draft is too short. The plan of a
request therefore uses the ratio of its own context, and adds one step. On a device a round runs
without the host, and is as long as its longest draft. All plans therefore use the mean ratio of the
round.
"""

import math
from collections.abc import Sequence

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.text.bridge import Bridge

# tokens; with a context of this length, the context and the pair have equal weight in the ratio.
# Measured ratio of variances (per token within a text / between texts) for seven pairs of
# tokenizers: 6 to 74, median 34.
_EVEN = 32


class DraftLength:
    """Plans the number of drafter steps of drafts."""

    def __init__(self, bridge: Bridge, drafter: Drafter) -> None:
        self._bridge, self._drafter = bridge, drafter

    def mean_ratio(self, tasks: Sequence[DraftTask]) -> float:
        """Return drafter tokens per target token, as the mean over the round's greedy drafts.

        The weight of a request's own ratio against the pair's grows with the length of its context.
        """
        texts = [task.state.context for task in tasks if task.lookahead and task.draw is None]
        pair = self._bridge.tokens_ratio
        if not texts:
            return pair
        known = ((text.ratio - pair) * len(text.ids) / (len(text.ids) + _EVEN) for text in texts)
        return pair + sum(known) / len(texts)

    def steps(self, task: DraftTask, room: int, mean_ratio: float) -> int:
        """Return the number of drafter steps that cover a request's lookahead in one round.

        The result is at most `room`. A CPU does not use `mean_ratio`.
        """
        if not task.lookahead:
            return 0
        if task.draw is not None:  # one step per sampled target token
            steps = task.lookahead
            for extension in self._drafter.extensions:
                steps = extension.steps(task, steps)
            return min(room, steps)
        if self._drafter.waits:
            return min(room, max(1, round(task.lookahead * mean_ratio)))
        # One more step completes the last target token. It costs less than another round.
        return min(room, max(1, math.ceil(task.lookahead * task.state.context.ratio)) + 1)

    def most_steps(self, task: DraftTask) -> int:
        """Return the upper bound of a greedy draft's drafter steps, over all its rounds."""
        room = self._drafter.max_length - len(task.state.context.ids)
        return min(room, math.ceil(2 * task.lookahead * max(1.0, task.state.context.ratio)) + 1)
