# SPDX-License-Identifier: Apache-2.0
"""Requests of the drafter process, each with a chain and its branches."""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.ahead.messages import RequestUpdate
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable, KVPool
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow
from vllm_hetero_spec.text.context import IdentityContext


class BranchPoint(NamedTuple):
    """A guess: a token that may replace the chain's token at one position.

    Attributes:
        place: Number of chain tokens before it.
        token: Drafter id; differs from the chain's token there.
        probability: Probability that the target follows the chain up to here, then emits `token`.
    """

    place: int
    token: int
    probability: float


class Alternative(NamedTuple):
    """The drafter's most likely tokens at one position of its chain.

    Attributes:
        chosen: The chain's token there.
        tokens: The most likely tokens.
        shares: Their probabilities.
    """

    chosen: int
    tokens: Sequence[int]
    shares: Sequence[float]

    @property
    def share(self) -> float:
        """Probability of the chain's token; 0 if it is not among the most likely."""
        return dict(zip(self.tokens, self.shares, strict=True)).get(self.chosen, 0.0)


@dataclass
class Continuation:
    """A chain or a branch.

    Attributes:
        state: The ids of the request's text and of the continuation, with their KV.
        rank: 0 for the chain, then the number of the branch.
        place: Ids after the text that are not its own: the update's `drafted`, or the chain's.
        wanted: Number of own ids to draft.
        ids: Own ids, including the guess.
        peaks: For each own id, the drafter's largest probability at its position.
        rows: Rows that the last ids were sampled from, see `DraftRecord`.
        rivals: The most likely tokens, by position in the state's ids.
    """

    state: RequestState
    rank: int = 0
    place: int = 0
    wanted: int = 0
    ids: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    rivals: dict[int, Alternative] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """True if more is to be drafted."""
        return len(self.ids) < self.wanted

    @property
    def has_work(self) -> bool:
        """True if it needs a forward.

        The last own id has no KV until another one is drafted. Those of a parallel drafter have
        none.
        """
        if self.state.sequence is None:  # its KV blocks were given back
            return False
        return self.drafts or self.state.num_uncached > max(1, len(self.ids))

    def behind(self, ids: list[int], most: int) -> tuple[list[int], list[float]]:
        """Return the ids drafted after `ids`, with their peaks; empty if `ids` differ.

        So tokens of a forward that ran while an update was on its way are kept.
        """
        whole = self.state.context.ids
        first = len(self.ids) - len(whole) + len(ids)
        if most <= 0 or first < 0 or whole[: len(ids)] != ids:
            return [], []
        return self.ids[first : first + most], self.peaks[first : first + most]

    def book(
        self, row: DraftRow, tokens: DrafterTokens, ends: Collection[int], rows: Sequence[bytes]
    ) -> None:
        """Add the result of a forward. `rows` are those of sampled tokens, see `DraftRecord`."""
        state = self.state
        state.num_kv_valid += len(row.pending)
        if not row.steps:
            return
        count = next((at for at, of in enumerate(tokens.tokens, 1) if of in ends), 0)
        ids = tokens.tokens[: count or None]
        if row.task.draw is not None:
            # A token that proposes nothing has no row, and the tokens after it wait.
            ids = ids[: max(1, len(rows))]
        if tokens.beside is not None:
            best, shares = tokens.beside.tokens.tolist(), tokens.beside.shares.tolist()
            known = map(Alternative, ids, best, shares)
            self.rivals |= dict(enumerate(known, len(state.context.ids)))
        state.context.ids += ids
        self.ids += ids
        self.peaks += tokens.confidences[: len(ids)]
        self.rows += rows[: len(ids)]
        if not tokens.finite or count:
            self.wanted = 0


class ServerRequest:
    """One request.

    Attributes:
        lines: The chain, then its branches, the most probable first.
        serial: Number of the last update that contained it.
        num_text: Number of ids of the request's text.
        at_stake: Number of ids after them under verification.
        guesses: Maximum number of branches.
        guessed: True if no branches are to be started until the next update.
        draw: Sampling parameters of its tokens, without draw numbers; None if they are greedy.
    """

    def __init__(self, slot: int, salt: str | None) -> None:
        self.slot = slot
        self.lines = [Continuation(RequestState(str(slot), IdentityContext(), salt))]
        self.serial = self.num_text = self.at_stake = self.guesses = 0
        self.guessed = True
        self.draw: DraftSampling | None = None
        self._beside = 0

    @property
    def chain(self) -> Continuation:
        """The drafter's most likely tokens, or those that it has sampled."""
        return self.lines[0]

    def renew(self, row: RequestUpdate, serial: int, pool: KVPool, *, parallel: bool) -> None:
        """Apply an update. Keep the continuation that agrees longest with the new text.

        A `parallel` drafter drafts all tokens anew, because those nearer to the text are better.
        """
        keep = max(0, min(row.keep, self.num_text, len(self.chain.state.context.ids)))
        ids = [*self.chain.state.context.ids[:keep], *row.ids, *row.drafted]
        agreed = [_same(line.state.context.ids, ids, keep) for line in self.lines]
        best = agreed.index(max(agreed))
        kept, chain = self.lines[best], self.chain
        if best and kept.state.sequence is not None and chain.state.sequence is not None:
            pool.adopt(chain.state.sequence.table, kept.state.sequence.table)
            chain.state.sequence.kv_ids = kept.state.sequence.kv_ids
            chain.state.num_kv_valid = min(keep, len(chain.state.sequence.kv_ids))
            fork = self.num_text + kept.place
            before = {at: of for at, of in chain.rivals.items() if at < fork}
            chain.rivals = before | kept.rivals
            agreed[0] = agreed[best]
        else:
            kept = chain
        chain.place, chain.wanted = len(row.drafted), row.wanted - len(row.drafted)
        keeps = self.draw is None and row.draw is None and not parallel  # not if they are sampled
        ahead, peaks = kept.behind(ids, chain.wanted) if keeps else ([], [])
        for line in self.lines[1:]:
            line.state.close(pool)
        del self.lines[1:]
        known = agreed[0] + max(len(ahead) - 1, 0)
        chain.rivals = {at: of for at, of in chain.rivals.items() if at <= known}
        chain.state.context.ids[:] = ids + ahead
        chain.ids, chain.peaks, chain.rows = ahead, peaks, []
        self.serial, self.num_text = serial, keep + len(row.ids)
        self.at_stake, self._beside, self.guesses = row.at_stake, row.beside, row.guesses
        self.guessed = not row.beside or not row.guesses
        self.draw = row.draw
        chain.state.align(pool, keep)

    def rivals(self) -> Sequence[Alternative] | None:
        """The most likely tokens at the positions under verification and at the next one.

        None before the last of them is known, or if branches were started already.
        """
        last = self.num_text + self.at_stake
        ids, known = self.chain.state.context.ids, self.chain.rivals
        if self.guessed or last not in known or last >= len(ids):
            return None
        return [
            known[at]._replace(chosen=ids[at])
            if at in known
            else Alternative(ids[at], [ids[at]], [1.0])
            for at in range(self.num_text, last + 1)
        ]

    def draw_of(self, line: Continuation, longest: int) -> DraftSampling | None:
        """Sampling parameters of the next token of a continuation, with a draw number of its own.

        `longest` is the maximum number of ids in a text with its continuation.
        """
        if self.draw is None:
            return None
        place = len(line.state.context.ids) - self.num_text
        return replace(self.draw, first=line.rank * longest + place)

    def begin_beside(self, guess: BranchPoint, table: BlockTable, known: int) -> Continuation:
        """Start a branch at a guess. `table` is a fork of the chain's after `known` ids."""
        chain, at = self.chain.state, self.num_text + guess.place
        context = IdentityContext()
        context.ids = [*chain.context.ids[:at], guess.token]
        sequence = DraftSequence(table, context.ids[:known])
        state = RequestState(
            chain.req_id, context, chain.salt, sequence=sequence, num_kv_valid=known
        )
        own = [guess.token], [guess.probability]
        line = Continuation(state, len(self.lines), guess.place, self._beside, *own)
        self.lines.append(line)
        return line


def choose_guesses(
    rivals: Sequence[Alternative], follows: Sequence[float], budget: int
) -> list[BranchPoint]:
    """Return the most probable guesses. As they exclude each other, this maximizes the hit rate.

    Args:
        rivals: For each position of the chain, from the first that is not verified.
        follows: For each position, the probability that the target follows the chain there, given
            that it has followed it before.
        budget: Maximum number of guesses.

    Returns:
        The most probable first; of equal ones, the earlier position first.
    """
    survival = accumulate(follows, mul, initial=1.0)
    guesses = (
        BranchPoint(place, token, reached * share)
        for place, (reached, (chosen, tokens, shares)) in enumerate(
            zip(survival, rivals, strict=False)
        )
        for token, share in zip(tokens, shares, strict=True)
        if token != chosen
    )
    return heapq.nlargest(budget, guesses, key=lambda guess: guess.probability)


def _same(first: Sequence[int], second: Sequence[int], start: int) -> int:
    """Length of the common prefix, of which `start` ids are known to be equal."""
    at = start
    while at < min(len(first), len(second)) and first[at] == second[at]:
        at += 1
    return at
