# SPDX-License-Identifier: Apache-2.0
"""Texts written with a real drafter and timed targets, by three schedules.

A target is a wait that answers from a continuation known before: it verifies any number of tokens
in one length of time.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _parallel_chains import MOMENT, SETTLED, Chains

from vllm_hetero_spec.engine.drafter.request_state import RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.engine.source.deployment import Deployment
from vllm_hetero_spec.engine.source.process import ProcessSource


@dataclass(frozen=True)
class Text:
    """A prompt and what the target writes behind it, in target ids."""

    prompt: list[int]
    ids: list[int]


@dataclass
class Written:
    """What writing some texts took.

    Attributes:
        seconds: In all.
        steps: Of the targets whose answers counted.
        void: Those that a rejection voided.
        drafts: Steps that verified drafted tokens.
        hits, looks: Look-ups that found a draft, and all: after steps without a draft, and with.
    """

    seconds: float = 0.0
    steps: int = 0
    void: int = 0
    drafts: int = 0
    hits: tuple[int, int] = (0, 0)
    looks: tuple[int, int] = (0, 0)

    @property
    def shares(self) -> tuple[float, float]:
        """Of look-ups, those that found a draft: after steps with a draft, and without."""
        anew, behind = (
            hit / max(1, all_of) for hit, all_of in zip(self.hits, self.looks, strict=True)
        )
        return behind, anew

    def looked(self, *, drafted: bool, hit: bool) -> None:
        """Count a look-up."""
        self.looks = self.looks[0] + (not drafted), self.looks[1] + drafted
        self.hits = self.hits[0] + (hit and not drafted), self.hits[1] + (hit and drafted)


def agreed(drafted: Sequence[int], true: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    pairs = enumerate(zip(drafted, true, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(drafted), len(true)))


def by_turns(chains: Chains, lookahead: int, target: float, text: Text, of: Written) -> list[int]:
    """Draft, verify, draft; what was written."""
    state = chains.open(text.prompt)
    chains.read(state)
    began, written = time.perf_counter(), list[int]()
    while len(written) < len(text.ids):
        wanted = min(lookahead, len(text.ids) - len(written) - 1)
        draft: Sequence[int] = ()
        if wanted:
            chains.ask(state, wanted)
            while len(draft) < wanted:
                time.sleep(MOMENT)
                found = chains.drafted(state, wanted)
                draft = found.proposal
                if chains.done(found):
                    break
            chains.ask(state, 0)  # it rests while the target verifies
        true = text.ids[len(written) :]
        time.sleep(target)
        right = agreed(draft, true)
        new = [*draft[:right], true[right]]
        written += new
        of.steps, of.drafts = of.steps + 1, of.drafts + bool(draft)
        chains.extend(state, new)
    of.seconds += time.perf_counter() - began
    chains.close(state)
    return written


def by_many(
    chains: Chains, lookahead: int, servers: int, target: float, text: Text, of: Written
) -> list[int]:
    """Distributed speculative inference; what was written."""
    state = chains.open(text.prompt)
    chains.read(state)
    began, written = time.perf_counter(), list[int]()
    while len(written) < len(text.ids):
        true = text.ids[len(written) :]
        left, draft, over, sent = len(true) - 1, list[int](), False, 0
        chains.ask(state, left + 1)
        first_answer = time.perf_counter() + target, list[int]()
        flying, right, kept = deque([first_answer]), -1, list[int]()  # -1: nothing is verified
        while right < left:
            if flying and flying[0][0] <= time.perf_counter():
                _, stretch = flying.popleft()
                of.steps, of.drafts = of.steps + 1, of.drafts + bool(stretch)
                kept += stretch[: agreed(stretch, true[len(kept) :])]
                rejects = len(kept) < max(right, 0) + len(stretch)
                right = len(kept)
                if rejects:
                    break
            if 0 <= right < len(draft) and draft[right] != true[right]:
                break  # the token behind what was verified is known as well
            if over and right >= 0 and not flying and sent >= len(draft):
                break  # all that there will be is verified
            found = chains.drafted(state, left + 1)
            over = chains.done(found)
            # What is drafted behind the last token may still join it.
            draft = [*found.proposal] if over else [*found.proposal[:-1]]
            while len(flying) < servers and sent < left:
                end = min(sent + lookahead, left)
                end = min(end, len(draft)) if over else end
                if not sent < end <= len(draft):
                    break
                flying.append((time.perf_counter() + target, draft[sent:end]))
                sent = end
            time.sleep(MOMENT)
        of.void += len(flying)
        new = [*kept, true[right]]
        written += new
        chains.extend(state, new)
    of.seconds += time.perf_counter() - began
    chains.close(state)
    return written


class Unhurried:
    """In the place of a controller: as many guesses as there may be, and all waits or none."""

    can_stop_early = False

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits

    def drafted(self, *_: Any) -> None:
        """It learns nothing."""

    looked_up = drafted

    def wait(self, missing: Any, *_: Any) -> tuple[int, float]:
        """See `AheadControl`."""
        return (max(missing.values()), 10.0) if self._waits else (0, 0.0)

    def guesses(self, drafting: int, longest: int, each: float, most: int) -> int:
        """See `AheadControl`."""
        return most


class Ahead:
    """Drafts behind guesses, while one target verifies: those of this package.

    Args:
        deployment: What the drafter's process runs, which is started.
        pair: The tokenizers.
        length: Most drafter tokens of a text.
    """

    def __init__(self, deployment: Deployment, pair: Pair, length: int) -> None:
        self._stats, self._bridge = DraftStats(), pair.bridge
        self._source = ProcessSource(deployment, pair, self._stats, length, None)

    def write(
        self, lookahead: int, target: float, text: Text, of: Written, *, waits: bool
    ) -> list[int]:
        """One text; `waits` for drafts that were not foreseen, all or none."""
        control = Unhurried(waits=waits)
        state = RequestState("text", self._bridge.open())
        self._draft(state, text.prompt, 0, control)
        time.sleep(SETTLED)
        began, written, tokens = time.perf_counter(), list[int](), list[int]()
        while True:
            time.sleep(target)
            of.steps, of.drafts = of.steps + 1, of.drafts + bool(tokens)
            true = text.ids[len(written) :]
            new = true[: agreed(tokens, true) + 1]
            written += new
            left = len(true) - len(new) - 1
            if left < 0:
                break
            hits, drafted = self._stats.drafts_ahead, bool(tokens)
            tokens = self._draft(state, new, min(lookahead, left), control)
            if left:
                of.looked(drafted=drafted, hit=self._stats.drafts_ahead > hits)
        of.seconds += time.perf_counter() - began
        state.close(self._source.pool)
        return written

    def _draft(
        self, state: RequestState, new: Sequence[int], wanted: int, control: Any
    ) -> list[int]:
        unchanged = self._bridge.extend([state.context], [new])
        state.align(self._source.pool, unchanged[0])
        self._source.begin([DraftTask(state, wanted)], iter(()), control)
        return next((list(draft.tokens) for draft in self._source.finish()), [])
