# SPDX-License-Identifier: Apache-2.0
"""How many drafter tokens a draft of so many target tokens takes.

That depends on the text. On a CPU a round may go on where a draft falls short, so each request is
planned by its own text, with one step more. A device drafts a round without the host, and the round
is as long as its longest draft: there all requests are planned by their mean.
"""

import math
from collections.abc import Sequence

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.text.bridge import Bridge

# Drafter tokens of a text at which its own ratio counts as much as the pair's. Over n tokens the
# ratio of a text is known to about 0.6 / sqrt(n); texts differ from one another by about 0.1.
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

        The ratio of each text is weighed by the text's length against the ratio of the pair.
        """
        texts = [task.state.context for task in tasks if task.lookahead and task.draw is None]
        pair = self._bridge.tokens_ratio
        if not texts:
            return pair
        known = ((text.ratio - pair) * len(text.ids) / (len(text.ids) + _EVEN) for text in texts)
        return pair + sum(known) / len(texts)

    def steps(self, task: DraftTask, room: int, mean_ratio: float) -> int:
        """Drafter steps of a round that are to cover a request's lookahead; at most `room`.

        Args:
            task: The request.
            room: Most steps.
            mean_ratio: Of the round.
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
        """Drafter steps that a greedy draft may take in all, over all its rounds."""
        room = self._drafter.max_length - len(task.state.context.ids)
        return min(room, math.ceil(2 * task.lookahead * max(1.0, task.state.context.ratio)) + 1)
