# SPDX-License-Identifier: Apache-2.0
"""A text in the drafter process, and the lines that are drafted behind it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.ahead.guesses import Alternative, BranchPoint
from vllm_hetero_spec.engine.ahead.messages import RequestUpdate
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable, KVPool
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow
from vllm_hetero_spec.text.context import IdentityContext


@dataclass
class Continuation:
    """The chain, or a guess with what is behind it.

    Attributes:
        state: The text's ids, with those of the line behind them, and their KV.
        place: Ids behind the text that are not the line's own: told, or the chain's.
        wanted: Ids of its own to have.
        ids: Its own, the guess included.
        peaks: The drafter's largest probability in the place of each.
        rows: What the last ids were drawn from, see `DraftRecord`.
        rivals: By place in the state's ids, what the drafter thought of it.
    """

    state: RequestState
    place: int = 0
    wanted: int = 0
    ids: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    rivals: dict[int, Alternative] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """Whether more is to be drafted."""
        return len(self.ids) < self.wanted

    @property
    def has_work(self) -> bool:
        """Whether it needs a forward: the last id of all has no KV until another is wanted."""
        if self.state.sequence is None:  # its KV was given back
            return False
        return self.drafts or self.state.num_uncached > 1

    def behind(self, ids: list[int], most: int) -> tuple[list[int], list[float]]:
        """What it has drafted behind a text that it agrees with, and the peaks of that.

        A forward may have been on its way when the text was told: what it brought is not lost.
        """
        whole = self.state.context.ids
        first = len(self.ids) - len(whole) + len(ids)
        if most <= 0 or first < 0 or whole[: len(ids)] != ids:
            return [], []
        return self.ids[first : first + most], self.peaks[first : first + most]

    def book(
        self, row: DraftRow, tokens: DrafterTokens, ends: Collection[int], drawn_from: bytes | None
    ) -> None:
        """Take in what a forward has made of a row of this line.

        Args:
            row: What went into the forward.
            tokens: What came of it.
            ends: Ids after which nothing is drafted.
            drawn_from: See `DraftRecord`; None for a token that was not drawn.
        """
        state = self.state
        state.num_kv_valid += len(row.pending)
        if not row.steps:
            return
        if tokens.beside is not None:
            of = tokens.beside
            for token, best, shares in zip(
                tokens.tokens, of.tokens.tolist(), of.shares.tolist(), strict=False
            ):
                self.rivals[len(state.context.ids)] = Alternative(token, best, shares)
        state.context.ids += tokens.tokens
        self.ids += tokens.tokens
        self.peaks += tokens.confidences
        self.rows += [] if drawn_from is None else [drawn_from]
        if not tokens.finite or tokens.tokens[0] in ends:
            self.wanted = 0


class ServerRequest:
    """One text.

    Args:
        slot: Its number.
        salt: Whose KV it may share.

    Attributes:
        lines: The chain, and the guesses beside it, the likeliest first.
        serial: Of the last commit that named it.
        num_text: Ids of it that the target has written.
        at_stake: Ids behind them that the target is verifying.
        guesses: How many of them to make at most.
        guessed: Whether guesses were made since the commit.
        draw: How its lines are drawn, up to the number of each draw; None where they are greedy.
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
        """The drafter's likeliest tokens, or those that it drew."""
        return self.lines[0]

    def renew(self, row: RequestUpdate, serial: int, pool: KVPool) -> None:
        """Take in what the text is now; the line that agrees with it furthest is kept."""
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
        greedy = self.draw is None and row.draw is None  # what is drawn begins anew
        ahead, peaks = kept.behind(ids, chain.wanted) if greedy else ([], [])
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
        """What the drafter thinks of the places that are verified, and of the one behind them.

        None before the last of them is known, or where guesses were made.
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

    def draw_of(self, rank: int, longest: int) -> DraftSampling | None:
        """How the next token of a line is drawn: each has a number of its own behind a text.

        Args:
            rank: Of the line.
            longest: Most ids of a text, with those of the line.
        """
        if self.draw is None:
            return None
        place = len(self.lines[rank].state.context.ids) - self.num_text
        return replace(self.draw, first=rank * longest + place)

    def begin_beside(self, guess: BranchPoint, table: BlockTable) -> Continuation:
        """A line that leaves the chain by a guess.

        Args:
            guess: Where, and with what.
            table: A fork of the chain's there.
        """
        chain, at = self.chain.state, self.num_text + guess.place
        context = IdentityContext()
        context.ids = [*chain.context.ids[:at], guess.token]
        sequence = DraftSequence(table, context.ids[:at])
        state = RequestState(chain.req_id, context, chain.salt, sequence=sequence, num_kv_valid=at)
        line = Continuation(state, guess.place, self._beside, [guess.token], [guess.probability])
        self.lines.append(line)
        return line

    def close(self, pool: KVPool) -> None:
        """Give all KV back."""
        for line in self.lines:
            line.state.close(pool)


def _same(first: Sequence[int], second: Sequence[int], start: int) -> int:
    """Leading ids that are equal in both, of which `start` are known to be."""
    at = start
    while at < min(len(first), len(second)) and first[at] == second[at]:
        at += 1
    return at
