# SPDX-License-Identifier: Apache-2.0
"""What was drafted ahead of a request's text, found in the table and translated."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_hetero_spec.draft.draft import Draft, DraftProbs, confidences_of
from vllm_hetero_spec.engine.ahead.continuations import find_drawn, find_remainder
from vllm_hetero_spec.engine.ahead.remote_requests import RemoteRequest
from vllm_hetero_spec.engine.ahead.sampled_records import SampledRecordDecoder
from vllm_hetero_spec.engine.ahead.supervisor import SupervisedProcess
from vllm_hetero_spec.engine.ahead.table import DraftRecord
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair


@dataclass(slots=True)
class LookupResult:
    """What was drafted ahead for a request.

    Attributes:
        task: The request.
        ids: Drafter tokens, see `MatchedContinuation`.
        known: Leading bytes of them that its text has.
        peaks: The drafter's largest probability in the place of each.
        rank: Of the line that they are of; the chain's is 0.
        missing: Why there are none, though there should be.
        proposal: The draft in target tokens.
        ends: Leading ones of `ids` that each of them needs.
        first: Tokens of its line that are before them.
        rows: What each was drawn from, see `DraftRecord`; nothing where it is certain.
        draft_probs: What the proposal was drawn from.
    """

    task: DraftTask
    ids: Sequence[int] = ()
    known: int = 0
    peaks: Sequence[float] = ()
    rank: int = 0
    missing: str = ""
    proposal: Sequence[int] = ()
    ends: Sequence[int] = ()
    first: int = 0
    rows: Sequence[bytes] = ()
    draft_probs: DraftProbs | None = None

    @property
    def text(self) -> RemoteRequest:
        """What the process was told of it."""
        return text_of(self.task)

    @property
    def draft(self) -> Draft:
        """The draft, with the drafter's confidence in each token."""
        confidences = confidences_of(self.peaks, self.ends)
        return Draft.chain(self.task.req_id, list(self.proposal), confidences, self.draft_probs)


class Lookup:
    """Looks drafts up.

    Args:
        process: Who makes them.
        pair: The two tokenizers.
        stats: Counters to add to.
        drawn: Makes drafts of what was drawn; None where all are greedy.
    """

    def __init__(
        self,
        process: SupervisedProcess,
        pair: TokenizerPair,
        stats: DraftStats,
        drawn: SampledRecordDecoder | None = None,
    ) -> None:
        self._process, self._bridge, self._stats = process, pair.bridge, stats
        self._drawn = drawn
        self._bytes = bytes_of_tokens(pair)

    def behind(self, task: DraftTask) -> LookupResult:
        """What stands behind a request's text in the table."""
        text, context = text_of(task), task.state.context
        told = self._spelled(text.gone)
        now = self._spelled(context.ids[task.state.num_kv_valid :])
        if not now.startswith(told):
            return LookupResult(task, missing="not_guessed" if task.lookahead else "")
        seen: list[tuple[int, DraftRecord]] = []
        outcome, spelled = now[len(told) :], self._bytes.__getitem__
        lines = self._lines(text, outcome + context.held, seen)
        if task.draw is not None:
            remainder = find_drawn(lines, outcome, spelled)
        else:
            fits = partial(self._bridge.may_follow, context)
            remainder = find_remainder(
                (ids for _, ids in lines), outcome, context.held, spelled, fits
            )
        if remainder is None or not remainder.ids:
            missing = "not_guessed" if remainder is None else "not_ready"
            return LookupResult(task, missing=missing if task.lookahead else "")
        ids, (rank, line) = remainder.ids, seen[remainder.rank]
        through = (seen[0][1], line) if rank else (line,)
        peaks = text.peaks
        for of in through:
            peaks = peaks[: of.place] + of.peaks
        first, rows = len(peaks) - len(ids), [b""] * len(ids)
        if task.draw is not None:
            drawn = text.rows
            for of in through:
                drawn = _rows_of(drawn, of)
            # What was chosen by what it is, is certain from then on.
            certain = max(0, text.seen - first)
            rows = rows[:certain] + drawn[first + certain :]
        return LookupResult(task, ids, remainder.known, peaks[first:], rank, first=first, rows=rows)

    def done(self, found: LookupResult, enough: int) -> bool:
        """Whether so many tokens are there, or no more will be, or no first token fits."""
        ids = found.ids
        if found.missing == "not_guessed":  # guesses come with the chain's first token
            chain = self._process.table.read(found.text.slot)
            stale = chain is None or chain.serial != found.text.serial
            ids, enough = () if chain is None or stale else chain.ids, 2
        return len(ids) >= enough or bool(ids and ids[-1] in self._bridge.drafter_eos)

    def translate(self, found: Sequence[LookupResult]) -> None:
        """Add the target's tokens."""
        began = time.perf_counter()
        proposals = self._bridge.to_target(
            [of.task.state.context for of in found],
            [of.ids if of.task.draw is None else () for of in found],
            [of.task.lookahead for of in found],
            [of.known for of in found],
        )
        self._stats.translate_seconds += time.perf_counter() - began
        for of, proposal in zip(found, proposals, strict=True):
            of.proposal, of.ends = proposal, self._bridge.ids_covering(of.ids, proposal, of.known)
        if self._drawn is not None:
            self._spell(found, self._drawn)

    def _spell(self, found: Sequence[LookupResult], drawn: SampledRecordDecoder) -> None:
        """With the target's tokens, where they were drawn."""
        own = [of for of in found if of.task.draw is not None and of.ids]
        if not own:
            return
        drafts = drawn.drafts(
            [of.task for of in own], [of.ids for of in own], [of.rows for of in own]
        )
        for of, draft in zip(own, drafts, strict=True):
            of.proposal, of.draft_probs = draft.tokens, draft.draft_probs
            of.ends = drawn.ends(of.ids)[: len(draft.tokens)]
            of.text.seen = of.first + len(of.ids)

    def _lines(
        self, text: RemoteRequest, written: bytes, seen: list[tuple[int, DraftRecord]]
    ) -> Iterator[tuple[int, list[int]]]:
        """What was drafted behind a text as it was told: the chain, and what may agree beside it.

        Args:
            text: What was told.
            written: What the target has added to it.
            seen: The records are added to this, with their ranks.

        Returns:
            Of each how many leading tokens are a guess of what the target writes, and its tokens.
        """
        table, serial = self._process.table, text.serial
        chain, of = text.drafted, table.read(text.slot)
        if of is None or of.serial != serial or of.place > len(chain):
            of = DraftRecord(serial, len(chain), [], [])
        chain = chain[: of.place] + of.ids
        seen.append((0, of))
        yield 0, chain
        left = self._left(chain, written)
        for rank, (place, guess) in enumerate(table.beginnings(text.slot), 1):
            if place >= len(left):
                continue
            data, rest = self._bytes[guess], left[place]
            if not rest.startswith(data) and not data.startswith(rest):
                continue
            of = table.read(text.slot, rank)
            if of is not None and of.serial == serial and of.place <= len(chain):
                seen.append((rank, of))
                yield of.place + 1, chain[: of.place] + of.ids

    def _left(self, ids: Sequence[int], written: bytes) -> list[bytes]:
        """What was written, without each number of leading tokens that agree with it."""
        left = [written]
        for data in map(self._bytes.__getitem__, ids):
            rest = left[-1]
            if not rest.startswith(data) and not data.startswith(rest):
                break
            left.append(rest[len(data) :])
        return left

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids))


def _rows_of(rows: list[bytes], line: DraftRecord) -> list[bytes]:
    """Of all tokens of a line, what each was drawn from; nothing where it is certain.

    Args:
        rows: Of the tokens that it may begin with: those told, or the chain's.
        line: What it has of its own.
    """
    certain = [b""] * (len(line.ids) - len(line.rows))
    return [*rows[: line.place], *certain, *line.rows]


def ids_for_each(task: DraftTask) -> float:
    """Drafter tokens for each target token of a request's draft: a drawn one is one, or more."""
    return task.state.context.ratio if task.draw is None else 1.0


class _TokenBytes(dict[int, bytes]):
    """Bytes of drafter ids; of those that are no text, bytes that no text has."""

    def __missing__(self, token: int) -> bytes:
        return b"\xff" + token.to_bytes(5, "little", signed=True)


def bytes_of_tokens(pair: TokenizerPair) -> dict[int, bytes]:
    """By drafter id: what it spells; something of its own for a control token, or any other id."""
    control = pair.bridge.special.drafter_control
    table = pair.drafter.token_bytes
    return _TokenBytes({i: data for i, data in enumerate(table) if data and i not in control})


def text_of(task: DraftTask) -> RemoteRequest:
    """What the process was told of a request."""
    assert task.state.sequence is not None
    table = task.state.sequence.table
    assert isinstance(table, RemoteRequest)
    return table
