# SPDX-License-Identifier: Apache-2.0
"""Plan the number of drafter tokens that cover a draft's target tokens.

The number depends on the text. On a CPU a round continues if a draft falls short, so the plan of a
request follows its own text and adds one step. On a device a round runs without the host and is as
long as its longest draft, so the plan of all requests follows their mean.
"""

import math
from collections.abc import Sequence

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.text.bridge import Bridge

# tokens; a text of this length and the pair have equal weight in the ratio. The variance per token
# within a text, over that between texts, is 6 to 74 for seven pairs of tokenizers; median 34.
_EVEN = 32


class DraftLength:
    """Plans the drafter steps of drafts.

    Args:
        bridge: Between the two tokenizers.
        drafter: The decode loop.
    """

    def __init__(self, bridge: Bridge, drafter: Drafter) -> None:
        self._bridge, self._drafter = bridge, drafter

    def mean_ratio(self, tasks: Sequence[DraftTask]) -> float:
        """Drafter tokens for each target token, the mean over the greedy drafts of a round.

        The weight of a text's own ratio against the pair's grows with the length of the text.
        """
        texts = [task.state.context for task in tasks if task.lookahead and task.draw is None]
        pair = self._bridge.tokens_ratio
        if not texts:
            return pair
        known = ((text.ratio - pair) * len(text.ids) / (len(text.ids) + _EVEN) for text in texts)
        return pair + sum(known) / len(texts)

    def steps(self, task: DraftTask, room: int, mean_ratio: float) -> int:
        """The number of drafter steps that cover a request's lookahead in one round.

        Args:
            task: The request.
            room: Upper bound of the result.
            mean_ratio: The round's `mean_ratio`; unused on a CPU.
        """
        if not task.lookahead:
            return 0
        if task.draw is not None:  # a drawn target token takes a step, or half of its span
            span = max(2, self._drafter.span(task).tokens)
            return min(room, task.lookahead * span // 2)
        if self._drafter.waits:
            return min(room, max(1, round(task.lookahead * mean_ratio)))
        # One step more completes the last target token: it costs less than a round that goes on.
        return min(room, max(1, math.ceil(task.lookahead * task.state.context.ratio)) + 1)

    def most_steps(self, task: DraftTask) -> int:
        """The upper bound of a greedy draft's drafter steps, over all its rounds."""
        room = self._drafter.max_length - len(task.state.context.ids)
        return min(room, math.ceil(2 * task.lookahead * max(1.0, task.state.context.ratio)) + 1)
