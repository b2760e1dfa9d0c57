# SPDX-License-Identifier: Apache-2.0
"""Policy of copies: drafts from the earlier text of their own request.

A copy takes no drafter step, but rows of the target like any draft. In a step, either all drafts
are copies and the drafter rests, or copies replace the drafts that are expected to gain less.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.copies.earlier_text import SEARCHED, CopyRates, EarlierText
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl, PlanPolicy, StepPlan
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.lookahead.controllers import Controller, LookaheadPlan
from vllm_hetero_spec.lookahead.estimates import Estimates

_KEEP = 0.99  # weight of an emitted token relative to the next one
_OFTEN = 0.1  # share of predicted tokens from which on every step is read
_UNPAID = 8  # steps without a copy that pays, after which not every step is read


class Copy(NamedTuple):
    """A draft from the earlier text.

    Attributes:
        survival: For each token, P[it and all before it are accepted].
    """

    tokens: list[int]
    survival: list[float]

    def first(self, count: int) -> "Copy":
        return Copy(self.tokens[:count], self.survival[:count])

    def worth(self, price: float) -> "Copy":
        """Return the leading tokens that are worth `price`, in tokens, each."""
        return self.first(sum(alive >= price for alive in self.survival))


class Drafts(NamedTuple):
    """The copies and the draft lengths of a step.

    Attributes:
        copies: By index in the batch.
        lookahead: Draft length of the drafter for each request.
    """

    copies: Mapping[int, Copy]
    lookahead: list[int]


class Copies(PlanPolicy):
    """The copies of one engine.

    Args:
        known: Estimates for the pair.
        controller: Prices a second in tokens.
        num_ids: Number of columns of the target's logits. A prompt may contain further ids.
    """

    def __init__(
        self, known: Estimates, controller: Controller, stats: DraftStats, num_ids: int
    ) -> None:
        self._known, self._controller, self._stats = known, controller, stats
        self._num_ids = num_ids
        self._rates = CopyRates()
        self._step: StepView
        self._texts: dict[str, EarlierText] = {}
        self._chosen: dict[str, Copy] = {}  # of the present step
        self._verifying: set[str] = set()
        self._share = 0.0  # of recent tokens that were predicted
        self._unpaid = 0  # steps without a copy that paid

    @property
    def is_idle(self) -> bool:
        return self._share < _OFTEN or self._unpaid > _UNPAID

    def observe(self, step: StepView) -> int:
        self._step, self._chosen = step, {}
        # With asynchronous scheduling, `started` may name requests whose text is known already.
        begun = {each.req_id for each in step.requests if each.begins} & step.started.keys()
        for req_id in (self._texts.keys() - step.live) | (self._texts.keys() & begun):
            del self._texts[req_id]
        self._verifying.intersection_update(step.live)
        searched = 0  # prompt tokens of new texts in this step; later steps read the others
        for request in step.requests:
            if request.req_id in self._verifying:
                self._verifying.discard(request.req_id)
                self._stats.copied_tokens_accepted += request.num_accepted
            may_copy = request.has_text and not request.media and request.params.lookahead is None
            if request.new_tokens and may_copy and searched < SEARCHED:
                searched += self._read(request)
        return 0

    def plan(self, plan: StepPlan, chosen: LookaheadPlan) -> StepPlan:
        copies = self._predicted()
        if not copies or chosen.probe or not self._controller.tokens_per_second:
            return plan
        step, rows = self._step, 0
        if step.buckets:
            # Their rows are computed in any case, up to this step's draft length.
            rows = self._requested(copies)
            copies = {i: copy.first(step.lookahead) for i, copy in copies.items()}
        else:
            price = self._price_of_row(len(step.requests), copies)
            copies = {i: copy.worth(price) for i, copy in copies.items()}
        copies = {i: copy for i, copy in copies.items() if copy.tokens}
        best = self._best(copies, plan.lookahead)
        self._chosen = {step.requests[i].req_id: copy for i, copy in best.copies.items()}
        if step.buckets:  # the drafter's next drafts need their length, too
            rows = max(rows, *chosen.lookahead)
        self._unpaid = 0 if best.copies or rows else self._unpaid + 1
        return plan._replace(lookahead=best.lookahead, copied=best.copies.keys(), rows=rows)

    def trim(self, drafts: Sequence[Draft], control: LookaheadControl) -> list[Draft]:
        """Also add the copies."""
        chosen, self._chosen = self._chosen, {}
        self._verifying |= chosen.keys()
        self._stats.copies += len(chosen)
        own = control.trim_chains([draft for draft in drafts if draft.req_id not in chosen])
        return own + [Draft.chain(req_id, copy.tokens) for req_id, copy in chosen.items()]

    def _read(self, request: RequestView) -> int:
        """Append the new tokens of a request. Return the prompt tokens of a new text."""
        text, ids, prompt = self._texts.get(request.req_id), request.token_ids, 0
        if text is None or len(text) > len(ids) or text.last != ids[len(text) - 1]:
            prompt = request.num_prompt_tokens
            text = self._texts[request.req_id] = EarlierText(ids[:prompt])
        new = request.since(len(text))
        hits = text.append(new, self._rates, request.params.random)
        keep = _KEEP ** len(new)
        self._share = keep * self._share + (1.0 - keep) * hits / max(len(new), 1)
        return prompt

    def _predicted(self) -> dict[int, Copy]:
        """Return the copies of all requests that may have one, by index in the batch."""
        step, found = self._step, dict[int, Copy]()
        longest = max(step.buckets, default=step.lookahead)
        for index, (request, goes_on) in enumerate(zip(step.requests, step.going_on, strict=True)):
            params, text = request.params, self._texts.get(request.req_id)
            if not goes_on or text is None or not text.predicts or params.lookahead is not None:
                continue
            count = min(longest, step.room[index])
            if params.min_tokens and step.early_bonus:
                count = min(count, params.before_stops(request.num_output_tokens))
            copy = self._until_end(text.predicted(count), params.end_ids)
            survival = self._rates.survival(text.matched, params.random, len(copy))
            found[index] = Copy(copy, survival)
        return found

    def _until_end(self, tokens: list[int], end_ids: Collection[int]) -> list[int]:
        """Cut tokens after one that ends the request, and before one that has no logit."""
        for place, token in enumerate(tokens):
            if token >= self._num_ids:
                return tokens[:place]
            if token in end_ids:
                return tokens[: place + 1]
        return tokens

    def _price_of_row(self, batch: int, copies: Mapping[int, Copy]) -> float:
        """Return the mean price in tokens of a row of these copies."""
        most = sum(len(copy.tokens) for copy in copies.values())
        seconds = self._known.costs.row(batch + most / 2, batch, batch + most)
        return self._controller.tokens_per_second * seconds

    def _requested(self, copies: Mapping[int, Copy]) -> int:
        """Return the draft length of later steps that is best for copies; 0 if none pays."""
        batch, costs = len(self._step.requests), self._known.costs
        gains = {0: 0.0}
        for length in self._step.buckets:
            seconds = costs.target(batch, batch * (1 + length)) - costs.target(batch, batch)
            seconds += costs.drafting(len(copies), 0.0) if length else 0.0  # the device waits
            tokens = sum(sum(copy.survival[:length]) for copy in copies.values())
            gains[length] = tokens - self._controller.tokens_per_second * seconds
        return max(gains, key=lambda length: gains[length])

    def _best(self, copies: Mapping[int, Copy], planned: list[int]) -> Drafts:
        """Return the drafts that gain most: as planned, some of them replaced, or copies only.

        Requests with a draft length of their own keep their drafts.
        """
        requests = self._step.requests
        kinds = [request.params.random for request in requests]
        expected = {random: self._expected(random) for random in set(kinds)}
        drafts = [sum(expected[kind][:n]) for kind, n in zip(kinds, planned, strict=True)]
        better = {i: copy for i, copy in copies.items() if sum(copy.survival) >= drafts[i]}
        beside = [0 if i in better else length for i, length in enumerate(planned)]
        ways = [Drafts({}, planned), Drafts(better, beside)]
        if not any(request.params.lookahead for request in requests):
            ways.append(Drafts(copies, [0] * len(planned)))
        return max(ways, key=lambda way: self._gain(way, drafts, reads=any(planned)))

    def _expected(self, random: bool) -> list[float]:
        """Return the mean P[a drafted token is accepted] by position."""
        survival, _ = self._known.acceptance.replayed([random])
        mean: list[float] = survival.mean((0, 1)).tolist()
        return mean

    def _gain(self, way: Drafts, drafts: Sequence[float], *, reads: bool) -> float:
        """Return the net gain of a step's drafts in tokens.

        Args:
            drafts: Expected number of accepted tokens of each request's draft by the drafter.
            reads: True if the drafter will read what is copied.
        """
        costs, batch = self._known.costs, len(way.lookahead)
        tokens = sum(sum(copy.survival) for copy in way.copies.values())
        seconds = tokens * costs.read_seconds if reads else 0.0
        tokens += sum(gain for gain, length in zip(drafts, way.lookahead, strict=True) if length)
        if drafted := sum(map(bool, way.lookahead)):
            steps = self._known.steps.expected(max(way.lookahead))
            seconds += costs.drafting(drafted, steps)
        if not self._step.buckets:
            rows = sum(way.lookahead) + sum(len(copy.tokens) for copy in way.copies.values())
            seconds += costs.target(batch, batch + rows)
        return tokens - self._controller.tokens_per_second * seconds
