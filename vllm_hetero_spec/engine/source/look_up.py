# SPDX-License-Identifier: Apache-2.0
"""What was drafted ahead of a request's text, found in the table and translated."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from vllm_hetero_spec.draft.continuations import find_remainder
from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.engine.source.kept_process import KeptProcess
from vllm_hetero_spec.engine.source.sent_texts import SentText


class Found(NamedTuple):
    """What was drafted ahead for a request.

    Attributes:
        task: The request.
        ids: Drafter tokens, see `Remainder`.
        known: Leading bytes of them that its text has.
        peaks: The drafter's largest probability in the place of each.
        rank: Of the line that they are of, the chain's is 0.
        missing: Why there are none, though there should be.
        proposal: The draft in target tokens.
        ends: Leading ones of `ids` that each of them needs.
    """

    task: DraftTask
    ids: Sequence[int] = ()
    known: int = 0
    peaks: Sequence[float] = ()
    rank: int = 0
    missing: str = ""
    proposal: Sequence[int] = ()
    ends: Sequence[int] = ()

    @property
    def text(self) -> SentText:
        """What the process was told of it."""
        return text_of(self.task)

    @property
    def draft(self) -> Draft:
        """The draft, with the drafter's confidence in each token: in all ids that only it needs."""
        confidences, start = [], 0
        for end in self.ends:
            confidences.append(math.prod(self.peaks[start:end]))
            start = max(start, end)
        return Draft.chain(self.task.req_id, list(self.proposal), confidences)


class _Line(NamedTuple):
    """Drafter tokens behind a text, and the drafter's largest probability in the place of each."""

    ids: list[int]
    peaks: list[float]


class LookUp:
    """Looks drafts up.

    Args:
        process: Who makes them.
        pair: The two tokenizers.
        stats: Counters to add to.
    """

    def __init__(self, process: KeptProcess, pair: Pair, stats: DraftStats) -> None:
        self._process, self._bridge, self._stats = process, pair.bridge, stats
        self._bytes = bytes_of_tokens(pair)

    def behind(self, task: DraftTask) -> Found:
        """What stands behind a request's text in the table."""
        text, context = text_of(task), task.state.context
        told = self._spelled(text.gone)
        now = self._spelled(context.ids[task.state.num_kv_valid :])
        if not now.startswith(told):
            return Found(task, missing="not_guessed" if task.lookahead else "")
        seen: list[_Line] = []
        lines = (line.ids for line in self._lines(text, seen))
        outcome, spelled = now[len(told) :], self._bytes.__getitem__
        fits = partial(self._bridge.may_follow, context)
        remainder = find_remainder(lines, outcome, context.held, spelled, fits)
        if remainder is None or not remainder.ids:
            missing = "not_guessed" if remainder is None else "not_ready"
            return Found(task, missing=missing if task.lookahead else "")
        ids, peaks = seen[remainder.rank]
        first = len(ids) - len(remainder.ids)
        return Found(task, remainder.ids, remainder.known, peaks[first:], rank=remainder.rank)

    def done(self, found: Found, enough: int) -> bool:
        """Whether so many tokens are there, or no more will be, or no first token fits."""
        ids = found.ids
        if found.missing == "not_guessed":  # guesses come with the chain's first token
            chain = self._process.table.read(found.text.slot)
            stale = chain is None or chain.serial != found.text.serial
            ids, enough = () if chain is None or stale else chain.ids, 2
        return len(ids) >= enough or bool(ids and ids[-1] in self._bridge.drafter_eos)

    def translated(self, found: Sequence[Found]) -> list[Found]:
        """With the target's tokens."""
        began = time.perf_counter()
        proposals = self._bridge.to_target(
            [of.task.state.context for of in found],
            [of.ids for of in found],
            [of.task.lookahead for of in found],
            [of.known for of in found],
        )
        self._stats.translate_seconds += time.perf_counter() - began
        return [
            of._replace(proposal=proposal, ends=self._bridge.ids_covering(of.ids, proposal))
            for of, proposal in zip(found, proposals, strict=True)
        ]

    def _lines(self, text: SentText, seen: "list[_Line]") -> Iterator["_Line"]:
        """What was drafted behind a text as it was told, the chain first; kept in `seen`."""
        table = self._process.table
        chain = _Line(text.drafted, text.peaks)
        for rank in range(1 + table.sides):
            of = table.read(text.slot, rank)
            line = chain if not rank else None
            if of is not None and of.serial == text.serial and of.place <= len(chain.ids):
                line = _Line(chain.ids[: of.place] + of.ids, chain.peaks[: of.place] + of.peaks)
            if line is not None:
                chain = chain if rank else line
                seen.append(line)
                yield line

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids))


class _TokenBytes(dict[int, bytes]):
    """Bytes of drafter ids; of those that are no text, bytes that no text has."""

    def __missing__(self, token: int) -> bytes:
        return b"\xff" + token.to_bytes(5, "little", signed=True)


def bytes_of_tokens(pair: Pair) -> dict[int, bytes]:
    """By drafter id: what it spells; something of its own for a control token, or any other id."""
    control = pair.bridge.special.drafter_control
    table = pair.drafter.token_bytes
    return _TokenBytes({i: data for i, data in enumerate(table) if data and i not in control})


def text_of(task: DraftTask) -> SentText:
    """What the process was told of a request."""
    assert task.state.sequence is not None
    table = task.state.sequence.table
    assert isinstance(table, SentText)
    return table
