# SPDX-License-Identifier: Apache-2.0
"""Replace first tokens of drafts that do not continue their context.

A first token may not follow the target's last token, or a longer token may replace that last token.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_hetero_spec.engine.drafter.round import Candidates, HealedStart, Round
from vllm_hetero_spec.engine.drafter.round_plan import Planner
from vllm_hetero_spec.engine.drafter.steps import CaughtUp, Steps
from vllm_hetero_spec.engine.drafter.tasks import DraftRow
from vllm_hetero_spec.staging import Receiver, Send

# ids; candidates for the next token, and for the position of the last token. The second number is
# larger because most ids do not begin with the last token.
_NEXT, _LAST = 8, 32
# bytes per request: next ids, ids at the position of the last token, and logits of the latter.
CANDIDATE_BYTES = 4 * (_NEXT + 2 * _LAST)
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


class TokenHealing:
    """Checks and replaces the first tokens of drafts; the check runs on the host.

    On a CPU it precedes the steps. On a device the steps are queued first. If a first token was
    replaced, a small round repeats them, and a large round shortens the draft to that token. The
    check precedes the steps if tokens are often replaced. It also does if the round samples or has
    penalties, because its steps cannot be repeated. If sampled drafts may replace the last token,
    it precedes sampling.
    """

    def __init__(self, receiver: Receiver, planner: Planner, send: Send) -> None:
        self._receiver, self._planner, self._send = receiver, planner, send
        self._share, self._seen = _SHARE, _SEEN_FIRST
        self._skipped = 0  # consecutive rounds without a check

    def due(self) -> bool:
        """Count a round. Return True if its first tokens are to be checked."""
        seldom = self._share < _SELDOM and self._skipped < _ROUNDS - 1
        self._skipped = self._skipped + 1 if seldom else 0
        return not seldom

    def heals_often(self, requests: int) -> bool:
        """Return True if a round of this many requests often has a replaced first token."""
        return 1 - (1 - self._share) ** requests > _OFTEN

    def fetch(self, behind: CaughtUp, requests: int) -> Candidates:
        """Start the copy of the first `requests` rows' candidates to the host."""
        size = behind.logits.shape[1]
        count = min(_NEXT, size)
        parts = [behind.logits[:requests].topk(count, -1).indices.int()]
        if behind.last is not None:
            best = behind.last[:requests].topk(min(_LAST, size), -1)
            parts += [best.indices.int(), best.values.float().view(torch.int32)]
        return Candidates(self._receiver.fetch(torch.cat(parts, 1)), count)

    def choose(
        self, rows: Sequence[DraftRow], candidates: Candidates, *, drawn: bool = False
    ) -> dict[int, HealedStart]:
        """Return the replaced first tokens by row. Waits for the copy of the candidates.

        If `drawn`, sampled drafts may replace the last token as well.
        """
        fetched = candidates.fetched.wait()
        start = candidates.num_next
        values = (fetched.shape[1] + start) // 2  # start of the logits
        found, judged = {}, 0
        for index, (row, ids) in enumerate(zip(rows, fetched[:, :values].tolist(), strict=False)):
            task, own = row.task, ids[:start]
            draws = task.draw is not None
            if row.choose is None or (draws and not drawn):
                continue
            judged += 1
            looked_back = not task.paths and len(row.sequence.kv_ids) > 1
            first = row.choose(own, ids[start:] if looked_back else ())
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

    def before_sampling(self, current: Round, behind: CaughtUp) -> bool:
        """Choose first tokens before sampling. Return True if a sampled draft became greedy.

        A draft that replaces the last token of its request becomes greedy, because the first bytes
        of its first token are given.
        """
        rows, candidates = current.rows, self.fetch(behind, current.plan.active[0])
        current.others = self.choose(rows, candidates, drawn=True)
        given = [index for index, other in current.others.items() if other.known]
        sampled = any(rows[index].task.draw is not None for index in given)
        for index in given:
            rows[index] = rows[index].greedy()
        return sampled

    def heal(self, current: Round, steps: Steps) -> None:
        """Replace first tokens before the later steps run."""
        if current.candidates is not None:
            current.others = self._others(current)
        if current.others:
            self._replace(current, current.others, steps)

    def repeats(self, current: Round, steps: Steps) -> bool:
        """Check first tokens after the steps. Return True if the steps have to be repeated."""
        others = {} if current.candidates is None else self._others(current)
        if others and current.plan.active[0] <= _FEW:
            self._replace(current, others, steps)
            steps.again()
            return True
        current.cut = others
        return False

    def _others(self, current: Round) -> dict[int, HealedStart]:
        """Return the replaced first tokens by row. Waits for the copy of the candidates."""
        assert current.candidates is not None
        candidates, current.candidates = current.candidates, None
        return self.choose(current.rows, candidates)

    def _replace(self, current: Round, others: Mapping[int, HealedStart], steps: Steps) -> None:
        """Overwrite picked first tokens on the device; changes the plan and the KV of the rows.

        If a token replaces the last one of its request, the later steps move back by one position.
        """
        picked, plan = steps.picked, current.plan
        forced = {index: other.id for index, other in others.items()}
        for index, chosen in list(forced.items()):  # forks that still follow the chain
            forced |= {at: chosen for at, step in plan.forks_of(index) if step}
        current.known = {index: other.known for index, other in others.items() if other.known}
        moved = list(current.known)
        peaks = np.array([others[index].confidence for index in moved], np.float32)
        lists = [np.array(list(of), np.int64) for of in (forced, forced.values(), moved)]
        rows, ids, lines, confidences = self._send(*lists, peaks)
        picked.put(0, rows, ids)
        if not moved:
            return
        picked.trust(0, lines, confidences)
        for index in moved:
            current.rows[index].sequence.kv_ids.pop()
        if plan.steps > 1:
            self._planner.step_back(plan, moved)
            steps.moved()
