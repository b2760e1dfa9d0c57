# SPDX-License-Identifier: Apache-2.0
"""Replace first tokens of drafts that do not continue their context.

A first token may not follow the target's last token, or a longer token may replace that last token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.round import Round, RoundExtension
from vllm_hetero_spec.engine.drafter.steps import CaughtUp
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow
from vllm_hetero_spec.engine.drafter.token_picking import RowPickers
from vllm_hetero_spec.staging import Fetched, Receiver
from vllm_hetero_spec.text.bridge import Bridge
from vllm_hetero_spec.text.drafts import FirstToken

# ids; candidates for the next token, and for the position of the last token. The second number is
# larger because most ids do not begin with the last token.
_NEXT, _LAST = 8, 32
# bytes per request: next ids, ids at the position of the last token, and logits of the latter.
_CANDIDATE_BYTES = 4 * (_NEXT + 2 * _LAST)
# Estimated share of requests whose first token is replaced. It starts as 5 % of 20 requests, and
# averages about the last 200 requests.
_SHARE, _SEEN_FIRST, _SEEN_MOST = 0.05, 20, 200
# probability of a replaced token in a round; above this, the check runs before the steps.
_OFTEN = 0.3
# requests; a larger round does not repeat its steps for a replaced first token, because they cost
# more than the rest of one draft gains (estimated).
_FEW = 2
# Below this share, only one round in 16 is checked: a lost draft per hundred requests costs less
# than the copy of all candidates to the host (estimated).
_SELDOM, _ROUNDS = 0.01, 16


# Chooses the first token of a draft from the likeliest next ids, and from the likeliest ids at the
# position of the last token. The latter are empty if unknown.
Choose = Callable[[Sequence[int], Sequence[int]], FirstToken]


class HealedStart(NamedTuple):
    """A first token that replaces the drafter's likeliest one; `known` as in `FirstToken`.

    If it replaces the last token, `confidence` is its probability among all candidates that fit.
    """

    id: int
    known: int
    confidence: float


class TokenHealing(RoundExtension):
    """Checks and replaces the first tokens of drafts; the check runs on the host.

    On a CPU it precedes the steps. On a device the steps are queued first. If a first token was
    replaced, a small round repeats them, and a large round shortens the draft to that token. The
    check precedes the steps if tokens are often replaced, and if the round samples or has
    penalties, because its steps cannot be repeated. If sampled drafts may replace the last token,
    it precedes sampling.

    Attributes:
        shortened_drafts: Drafts that were shortened to a replaced first token.
        choosers: By request id, of the present round. A round that continues drafts has none.
    """

    def __init__(self, drafter: Drafter, bridge: Bridge) -> None:
        self._drafter, self._bridge = drafter, bridge
        requests = drafter.steps.picked.packet.shape[2]
        self._receiver = Receiver(drafter.model.device, requests * _CANDIDATE_BYTES)
        self._num_next = min(_NEXT, drafter.rules.vocab_size)
        self._share, self._seen = _SHARE, _SEEN_FIRST
        self._skipped = 0  # consecutive rounds without a check
        self.shortened_drafts = 0
        # Of the present round.
        self.choosers: dict[str, Choose] = {}
        self._candidates: Fetched | None = None  # see `fetch`
        self._early: dict[int, HealedStart] | None = None  # chosen before sampling
        self._known: dict[int, int] = {}  # leading bytes by row, for tokens that replaced another
        self._cut: dict[int, HealedStart] = {}  # drafts of this token only

    def admit(self, rows: Sequence[DraftRow]) -> None:
        bridge, back = self._bridge, self._drafter.rules.back
        self.choosers = {
            row.task.req_id: partial(bridge.first_choice, row.task.state.context)
            for row in rows
            if not bridge.identity and row.steps and (row.task.draw is None or back)
        }

    def back(self, rows: Sequence[DraftRow]) -> bool:
        self._candidates, self._early, self._known, self._cut = None, None, {}, {}
        if self.choosers and self._drafter.waits and not self.due():
            self.choosers = {}
        return bool(self.choosers)

    def before_picking(self, current: Round, behind: CaughtUp) -> None:
        """Choose first tokens before sampling, if sampled drafts may replace the last token.

        A draft that does so becomes greedy, because the first bytes of its first token are given.
        """
        if behind.last is None or current.own.draws is None or current.plan.forks.size:
            return
        rows, active = current.rows, current.plan.active[0]
        self._early = self.choose(rows, self.fetch(behind, active), drawn=True)
        given = [index for index, other in self._early.items() if other.known]
        sampled = any(rows[index].task.draw is not None for index in given)
        for index in given:
            rows[index] = rows[index].greedy()
        if sampled:
            drafter = self._drafter
            current.own = RowPickers(rows[:active], drafter.rules, drafter.send, current.plan)

    def after_prefill(self, current: Round, behind: CaughtUp) -> bool:
        drafter, active = self._drafter, current.plan.active[0]
        if not self.choosers or not active:
            return False
        others = self._early
        if others is None:
            self._candidates = self.fetch(behind, active)
            often = 1 - (1 - self._share) ** active > _OFTEN
            if drafter.waits and not current.own and not (often and drafter.may_wait):
                return often  # `restarts` checks them
            others = self._others(current)
        self._replace(current, others)
        return False

    def restarts(self, current: Round) -> bool:
        if self._candidates is None:
            return False
        others = self._others(current)
        if not current.taken:
            self._replace(current, others)
            return True
        few = current.plan.active[0] <= _FEW or self._drafter.parallel
        if others and few:
            self._replace(current, others)
            self._drafter.steps.again()
            return True
        self._cut = current.shortened = others
        self.shortened_drafts += len(others)
        return False

    def collect(self, current: Round, drafted: list[DrafterTokens]) -> None:
        for index, known in self._known.items():
            drafted[index] = drafted[index]._replace(known=known)
        for index, other in self._cut.items():
            tokens, peaks = drafted[index], drafted[index].confidences
            if other.known:
                current.rows[index].sequence.kv_ids.pop()
                peaks = [other.confidence] * len(peaks)
            ids = [other.id] * len(tokens.tokens)  # none if the logits were not finite
            drafted[index] = tokens._replace(tokens=ids, confidences=peaks, known=other.known)
        self.choosers = {}  # contexts of requests that may end now

    def due(self) -> bool:
        """Count a round. Return True if its first tokens are to be checked."""
        seldom = self._share < _SELDOM and self._skipped < _ROUNDS - 1
        self._skipped = self._skipped + 1 if seldom else 0
        return not seldom

    def fetch(self, behind: CaughtUp, requests: int) -> Fetched:
        """Start the copy of the first `requests` rows' candidates to the host, as int [n, c].

        First the next ids, best first. With `CaughtUp.last`, then the 32 best ids at the position
        of the last token, and the bits of their float32 logits; all of them int32.
        """
        ids = behind.logits[:requests].topk(self._num_next, -1).indices
        if behind.last is None:
            return self._receiver.fetch(ids)
        last = behind.last[:requests]
        best = last.topk(min(_LAST, last.shape[1]), -1)
        bits = best.values.float().view(torch.int32)
        return self._receiver.fetch(torch.cat([ids.int(), best.indices.int(), bits], 1))

    def choose(
        self, rows: Sequence[DraftRow], candidates: Fetched, *, drawn: bool = False
    ) -> dict[int, HealedStart]:
        """Return the replaced first tokens by row. Waits for the copy of the candidates.

        If `drawn`, sampled drafts may replace the last token as well.
        """
        fetched, start = candidates.wait(), self._num_next
        values = (fetched.shape[1] + start) // 2  # start of the logits
        found, judged = {}, 0
        for index, (row, ids) in enumerate(zip(rows, fetched[:, :values].tolist(), strict=False)):
            task, own = row.task, ids[:start]
            draws = task.draw is not None
            choose = self.choosers.get(task.req_id)
            if choose is None or (draws and not drawn):
                continue
            judged += 1
            looked_back = not task.paths and len(row.sequence.kv_ids) > 1
            first = choose(own, ids[start:] if looked_back else ())
            if first.known:
                among = fetched[index, values:].view(np.float32)[first.among].tolist()
                share = 1 / sum([math.exp(value - among[0]) for value in among])
                found[index] = HealedStart(first.id, first.known, share)
            elif first.id != own[0] and not draws:
                found[index] = HealedStart(first.id, 0, 0.0)
        if judged:
            self._seen = min(self._seen + judged, _SEEN_MOST)
            self._share += (len(found) / judged - self._share) * min(1, judged / self._seen)
        return found

    def _others(self, current: Round) -> dict[int, HealedStart]:
        """Return the replaced first tokens by row. Waits for the copy of the candidates."""
        assert self._candidates is not None
        candidates, self._candidates = self._candidates, None
        return self.choose(current.rows, candidates)

    def _replace(self, current: Round, others: Mapping[int, HealedStart]) -> None:
        """Overwrite picked first tokens on the device; changes the plan and the KV of the rows.

        If a token replaces the last one of its request, the later steps move back by one position.
        """
        if not others:
            return
        drafter, steps, plan = self._drafter, self._drafter.steps, current.plan
        forced = {index: other.id for index, other in others.items()}
        for index, id in list(forced.items()):  # forks that still follow the chain
            forced |= {at: id for at, step in plan.forks_of(index) if step}
        self._known = {index: other.known for index, other in others.items() if other.known}
        moved = list(self._known)
        peaks = np.array([others[index].confidence for index in moved], np.float32)
        chosen = np.array(list(forced.values()), np.int32)
        at, back = (np.array(list(of), np.int64) for of in (forced, moved))
        rows, ids, lines, confidences = drafter.send(at, chosen, back, peaks)
        steps.picked.put(0, rows, ids)
        if not moved:
            return
        steps.picked.trust(0, lines, confidences)
        for index in moved:
            current.rows[index].sequence.kv_ids.pop()
        if plan.steps > 1:
            drafter.planner.step_back(plan, moved)
            steps.moved()
