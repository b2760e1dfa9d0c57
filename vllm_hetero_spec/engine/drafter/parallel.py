# SPDX-License-Identifier: Apache-2.0
"""Parallel drafters: a whole draft from one forward (PARD, arXiv 2504.18583).

Such a drafter reads mask tokens behind the text. The logits of the last token of the text and of
S - 1 masks predict the next S tokens. The tokens are independent of each other, given the text.

Masks write KV behind the text. The next round overwrites it, because it reads accepted draft tokens
like any other text. So `DraftSequence.kv_ids` never contains a draft, and a block with masks is
never published.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.recorded_steps import GraphPlan
from vllm_hetero_spec.engine.drafter.round_plan import BatchFeed, RoundPlan
from vllm_hetero_spec.engine.drafter.steps import CaughtUp, Steps, ragged_batch
from vllm_hetero_spec.engine.drafter.token_picking import PickConfig


def without_mask(rules: PickConfig, mask: int) -> PickConfig:
    """Return rules that never pick the mask token. It may be one of the tokenizer's ids."""
    if mask >= rules.vocab_size:
        return rules
    return replace(rules, banned=torch.cat([rules.banned, rules.banned.new_tensor([mask])]))


def make_parallel(drafter: Drafter, mask: int, places: int) -> None:
    """Let a drafter predict all tokens of a round in one forward.

    Args:
        mask: Id of its mask token.
        places: Tokens of an ordinary round. Graphs are recorded for so many.
    """
    from vllm_hetero_spec.engine.drafter.recorded_parallel import RecordedParallel

    def wrap(steps: Steps, recorded: GraphPlan | None) -> Steps:
        if recorded is None:
            return ParallelSteps(steps, drafter, mask, places)
        return RecordedParallel(steps, drafter, mask, places, recorded)

    drafter.wrap_steps(wrap)


class ParallelSteps(Steps):
    """Runs a round by one forward. Rounds of one step run by `inner`."""

    def __init__(self, inner: Steps, drafter: Drafter, mask: int, places: int) -> None:
        super().__init__(drafter.model, drafter.rules, drafter.send_plan, inner.picked)
        self._inner, self._mask, self.places = inner, mask, places
        self._logits: Sequence[torch.Tensor] = ()

    @property
    def replays(self) -> int:
        return self._inner.replays + self._replays

    def widths(self, count: int) -> Sequence[int]:
        return self._inner.widths(count)

    def begin(self, plan: RoundPlan) -> CaughtUp:
        if plan.steps == 1 and not plan.uniform:
            return self._inner.begin(plan)
        counts = [plan.count, *plan.active[1:]]
        feed, rows, lengths = with_masks(plan, self._mask)
        sent = self._send(*feed.arrays, lengths, plan.table[: plan.count], rows)
        logits = self._rules.only_real(self._model.forward(ragged_batch(sent, feed, lengths)))
        self._logits = logits[: sum(counts)].split(counts)
        for number, each in enumerate(self._logits):
            self.picked.best(each, number)
        return CaughtUp(self._logits[0], logits[sum(counts) :] if feed.back else None)

    def step(self, number: int) -> torch.Tensor:
        return self._logits[number]

    def moved(self) -> None:
        """Do nothing: predictions do not depend on the token in front of them."""


def with_masks(plan: RoundPlan, mask: int) -> tuple[BatchFeed, np.ndarray, np.ndarray]:
    """Append the masks of a round to its pending ids: one less than each request has steps.

    Returns:
        The feed; int64 [R] indices of the tokens whose logits are needed; int32 [n] lengths of the
            sequences after the forward. The indices are those of the last pending id of each
            request, then of the masks, step after step, each for the `active` rows of `plan`; then,
            if the feed is `back`, those of the tokens before the last ones.
    """
    feed, active = plan.feed, np.array(plan.active[1:], np.int64)
    starts = feed.starts[: plan.count + 1]  # without idle rows
    feed = feed._replace(tokens=feed.tokens[:, : starts[-1]], starts=starts)
    requests = np.arange(plan.count)
    masks = (active[:, None] > requests).sum(0)  # of each request
    own = requests.repeat(masks)
    steps = 1 + np.concatenate([np.arange(count) for count in masks]).astype(np.int64)
    places = plan.places[steps, :, own].T
    ids = np.full((1, len(own)), mask)
    tokens = np.insert(feed.tokens, feed.starts[1:][own], np.concatenate([ids, places]), axis=1)
    starts = feed.starts + np.array([0, *masks.cumsum()], np.int32)
    last = starts[1:].astype(np.int64) - masks - 1
    rows = [last, *(last[:count] + step for step, count in enumerate(active, 1))]
    if feed.back:
        rows.append(np.maximum(last - 1, starts[:-1]))
    lengths = plan.lengths[masks, requests]
    most = int(np.diff(starts).max())
    return feed._replace(tokens=tokens, starts=starts, most=most), np.concatenate(rows), lengths
