# SPDX-License-Identifier: Apache-2.0
"""Look-up of precomputed drafts in the shared table, and their translation."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_hetero_spec.draft.draft import Draft, confidences_of
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
    """Result of looking up a precomputed draft for one request.

    Attributes:
        ids: Drafter tokens of the draft; see `MatchedContinuation`.
        known: Leading bytes of `ids` that the request's text already has.
        peaks: For each id, the drafter's largest probability at its position.
        rank: Index of the continuation; the chain is 0.
        missing: Reason if a draft is missing, see `REASONS`; otherwise "".
        first: Tokens of the continuation before `ids`.
        rows: For each id, the row it was sampled from, see `DraftRecord`; empty if it is certain,
            as a greedy token is.
        draft: The draft in target tokens; `Lookup.translate` sets it.
        ends: For each of its tokens, how many leading `ids` it needs.
    """

    task: DraftTask
    ids: Sequence[int] = ()
    known: int = 0
    peaks: Sequence[float] = ()
    rank: int = 0
    missing: str = ""
    first: int = 0
    rows: Sequence[bytes] = ()
    draft: Draft = field(init=False, compare=False, repr=False)
    ends: Sequence[int] = ()

    @property
    def text(self) -> RemoteRequest:
        """The request's state as last sent to the drafter process."""
        return text_of(self.task)


class Lookup:
    """Looks up precomputed drafts in the table of a process."""

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
        """Look up the draft that continues a request's text."""
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
        peaks, drawn = text.peaks, text.rows
        for of in (seen[0][1], line) if rank else (line,):
            peaks, drawn = peaks[: of.place] + of.peaks, _rows_of(drawn, of)
        first = len(peaks) - len(ids)
        # Greedy tokens are certain, and those that a verification has received.
        certain = len(ids) if task.draw is None else min(max(0, text.seen - first), len(ids))
        rows = [b""] * certain + drawn[first + certain :]
        return LookupResult(task, ids, remainder.known, peaks[first:], rank, first=first, rows=rows)

    def done(self, found: LookupResult, enough: int) -> bool:
        """Return True if `enough` drafter tokens are there, or waiting cannot help.

        Waiting cannot help if the draft has ended, or if no continuation matches the text.
        """
        ids = found.ids
        if found.missing == "not_guessed":  # branches begin with the chain's first token
            chain = self._process.table.read(found.text.slot)
            stale = chain is None or chain.serial != found.text.serial
            ids, enough = () if chain is None or stale else chain.ids, 2
        return len(ids) >= enough or bool(ids and ids[-1] in self._bridge.drafter_eos)

    def translate(self, found: Sequence[LookupResult]) -> None:
        """Add the drafts to the results."""
        began = time.perf_counter()
        proposals = self._bridge.to_target(
            [of.task.state.context for of in found],
            [of.ids if of.task.draw is None else () for of in found],
            [of.task.lookahead for of in found],
            [of.known for of in found],
        )
        self._stats.translate_seconds += time.perf_counter() - began
        for of, proposal in zip(found, proposals, strict=True):
            known = of.known + len(of.task.state.context.held)
            of.ends = self._bridge.ids_covering(of.ids, proposal, known)
            confidences = confidences_of(of.peaks, of.ends)
            of.draft = Draft.chain(of.task.req_id, [*proposal], confidences)
        # Sampled requests get drafts with `draft_probs` instead.
        own = [of for of in found if of.task.draw is not None and of.ids]
        if self._drawn is None or not own:
            return
        drafts = self._drawn.drafts(
            [of.task for of in own], [of.ids for of in own], [of.rows for of in own]
        )
        for of, draft in zip(own, drafts, strict=True):
            of.ends = self._drawn.ends(of.ids)[: len(draft.tokens)]
            of.draft = draft._replace(confidences=confidences_of(of.peaks, of.ends))
            of.text.seen = of.first + len(of.ids)

    def _lines(
        self, text: RemoteRequest, written: bytes, seen: list[tuple[int, DraftRecord]]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the chain, and the branches that may agree with the target's output.

        Args:
            written: The bytes that the target has added since the last update.
            seen: Receives the rank and the record of each.

        Returns:
            For each, how many leading tokens have to agree with the output, and all its tokens. For
            a branch, these are the chain's tokens before it and its guess.
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
        """For each number of leading `ids` that agree with `written`, the bytes that remain."""
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
    """Rows of a whole continuation, given those of its beginning; empty for certain tokens."""
    certain = [b""] * (len(line.ids) - len(line.rows))
    return [*rows[: line.place], *certain, *line.rows]


def ids_for_each(task: DraftTask) -> float:
    """Drafter tokens per target token; 1 if sampled, as each proposes one or more."""
    return task.state.context.ratio if task.draw is None else 1.0


class _TokenBytes(dict[int, bytes]):
    """Bytes by drafter id. An id that is no text has bytes that occur in no text."""

    def __missing__(self, token: int) -> bytes:
        return b"\xff" + token.to_bytes(5, "little", signed=True)


def bytes_of_tokens(pair: TokenizerPair) -> dict[int, bytes]:
    """Map drafter ids to bytes. Control tokens and other ids get bytes of their own."""
    control = pair.bridge.special.drafter_control
    table = pair.drafter.token_bytes
    return _TokenBytes({i: data for i, data in enumerate(table) if data and i not in control})


def text_of(task: DraftTask) -> RemoteRequest:
    """Return a request's state as last sent to the drafter process."""
    assert task.state.sequence is not None
    text: RemoteRequest = task.state.sequence.table
    return text
