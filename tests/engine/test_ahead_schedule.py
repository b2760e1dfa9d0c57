# SPDX-License-Identifier: Apache-2.0
"""Precomputed drafts, tick by tick: forwards, hits and waits equal those of a simulation.

A drafter forward takes one tick, and a target step takes several. The simulation has the drafter's
distributions. It has no messages, no table, no KV, and keeps nothing between updates.
"""

import heapq
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from toy_drafter import BLOCKS, SIZE, VOCAB, ToyDrafterModel, drafter_of

from vllm_hetero_spec.engine.ahead import client
from vllm_hetero_spec.engine.ahead import lookup as lookup_module
from vllm_hetero_spec.engine.ahead.messages import Ready, UpdateBatch, encode, update_batch_of
from vllm_hetero_spec.engine.ahead.server import RIVALS, DraftingServer
from vllm_hetero_spec.engine.ahead.table import DraftTable, make_file
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.model import ForwardBatch
from vllm_hetero_spec.engine.drafter.requests import RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.text.bridge import IdentityBridge

PROMPT, LENGTH = [3, 1, 4, 1, 5, 9, 2, 6], 60
SLOTS, LONGEST, ROWS, BUDGET = 2, 16, 16, 512


class Step(NamedTuple):
    """Counters after a target step and the look-up of the next draft."""

    drafted: int
    forwards: int
    hits: int
    beside: int
    waited: int
    ticks: int


class Setting(NamedTuple):
    lookahead: int
    target: int  # ticks of a target step
    branches: int
    waits: bool


oracle = cache(ToyDrafterModel)


@cache
def opinion(ids: tuple[int, ...]) -> list[tuple[float, int]]:
    """Return the drafter's next tokens after a text with their probabilities, most likely first."""
    length = len(ids)
    places = torch.arange(length)
    ends = torch.tensor([0, length], dtype=torch.int32)
    blocks = torch.arange(1, 2 + length // SIZE, dtype=torch.int32)[None]
    batch = ForwardBatch(
        torch.tensor(ids), places, places + SIZE, ends, ends, ends[1:], ends[1:], blocks,
        length, length, torch.tensor([length - 1]),
    )  # fmt: skip
    logits = oracle().forward(batch)[0]
    logits[0] = -torch.inf
    shares, tokens = logits.softmax(-1).float().topk(RIVALS)
    return list(zip(shares.tolist(), tokens.tolist(), strict=True))


def continuation(seed: int) -> list[int]:
    """Return a target output; 95 % of its tokens are among the drafter's four most likely."""
    chance, ids = random.Random(seed), [*PROMPT]
    while len(ids) < len(PROMPT) + LENGTH:
        tokens = [token for _, token in opinion(tuple(ids))]
        ids.append(chance.choices([*tokens[:4], chance.randrange(1, VOCAB)], (75, 10, 6, 4, 5))[0])
    return ids[len(PROMPT) :]


def agreed(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


class Ticks:
    """Clock in place of `time`. Each tick, also while the target verifies, runs one forward."""

    def __init__(self, server: DraftingServer) -> None:
        self.now, self._server = 0, server

    def sleep(self, _: float = 0.0) -> None:
        self.now += 1
        if self._server.busy:
            self._server.advance()

    def perf_counter(self) -> float:
        return float(self.now)


class Process:
    """Stands in for `SupervisedProcess`; its server applies each update at once."""

    up, life, restarts = True, 1, 0

    def __init__(self, deployment: Any) -> None:
        shape = deployment.slots, LONGEST, deployment.branches, LONGEST
        file = make_file(*shape)
        self.table = DraftTable(file, *shape)
        os.close(file)
        model: Any = ToyDrafterModel()
        drafter = drafter_of(model, 4, ROWS, confidences=True, beside=RIVALS)
        pool = KVPool(BLOCKS, SIZE)
        self.server = DraftingServer(drafter, pool, self.table, (), BUDGET, ROWS)

    @property
    def counts(self) -> Any:
        return self.table.counts

    def start(self) -> Ready:
        return Ready(BLOCKS, SIZE)

    def send(self, commit: UpdateBatch) -> bool:
        self.server.take(update_batch_of(encode(commit)))
        return True


class Control:
    """Controller that allows all branches, and waits for every missing draft or for none."""

    can_stop_early = False

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits

    def drafted(self, *_: Any) -> None:
        pass

    looked_up = drafted

    def wait(self, missing: Any, *_: Any) -> tuple[int, float]:
        return (max(missing.values()), 100.0) if self._waits else (0, 0.0)

    def guesses(self, drafting: int, longest: int, each: float, most: int) -> int:
        return most


def source_of(
    monkeypatch: pytest.MonkeyPatch, stats: DraftStats, branches: int = 0, slots: int = SLOTS
) -> tuple[client.ProcessSource, IdentityBridge]:
    """Return a source of precomputed drafts, and the bridge for its contexts."""
    monkeypatch.setattr(client, "SupervisedProcess", Process)
    nothing = frozenset[int]()
    special: Any = SimpleNamespace(drafter_eos=nothing, banned={0}, drafter_control=nothing)
    spelled = [bytes([65 + token]) for token in range(VOCAB)]
    bridge = IdentityBridge(special)
    pair: Any = SimpleNamespace(bridge=bridge, drafter=SimpleNamespace(token_bytes=spelled))
    deployment: Any = SimpleNamespace(
        slots=slots, longest=LONGEST, most_rows=ROWS, branches=branches
    )
    return client.ProcessSource(deployment, pair, stats, 128, None), bridge


def measured(
    text: list[int], setting: Setting, monkeypatch: pytest.MonkeyPatch, commits: int = 0
) -> list[Step]:
    """Return the steps of the package. `commits` is the number of updates sent before."""
    stats = DraftStats()
    source, bridge = source_of(monkeypatch, stats, setting.branches)
    source._serial = commits
    server: DraftingServer = source._process.server  # type: ignore[attr-defined]
    ticks = Ticks(server)
    for module in (client, lookup_module):
        monkeypatch.setattr(module, "time", ticks)
    state, control = RequestState("text", bridge.open()), Control(waits=setting.waits)

    def draft(new: Sequence[int], wanted: int) -> list[int]:
        unchanged = bridge.extend([state.context], [new])
        state.align(source.pool, unchanged[0])
        source.begin([DraftTask(state, wanted)], iter(()), control)
        return next((draft.tokens for draft in source.finish()), [])

    steps, written = list[Step](), 0
    tokens = draft(PROMPT, min(setting.lookahead, LENGTH - 1))
    while True:
        for _ in range(setting.target):
            ticks.sleep()
        right = agreed(tokens, text[written:])
        new = text[written : written + right + 1]
        written += len(new)
        if written == LENGTH:
            return steps
        tokens = draft(new, min(setting.lookahead, LENGTH - written - 1))
        counted = stats.drafts_ahead, stats.drafts_guessed, stats.drafts_waited
        steps.append(Step(len(tokens), source._process.counts.forwards, *counted, ticks.now))


@dataclass
class Line:
    """A continuation of the target's output; its first tokens are given."""

    ids: list[int]
    wanted: int
    thought_of: list[int] = field(default_factory=list)  # text lengths with a drafter distribution


class Drafting:
    """The chain and the branches that are drafted after one text."""

    def __init__(self, branches: int) -> None:
        self._branches = branches
        self.text, self.lines = list[int](), [Line([], 0)]
        self._at_stake = self._beside = -1
        self.forwards = 0

    def tell(self, text: list[int], ahead: list[int], rank: int, at_stake: int, k: int) -> None:
        """Update the text. The target now verifies the first tokens of `ahead`.

        Args:
            text: The whole text.
            ahead: Tokens of the line `rank` after the text; empty if no line agreed.
            rank: Index of the line that agreed with the text.
            at_stake: Number of tokens under verification.
            k: Target tokens of a draft; 0 if no draft is needed any more.
        """
        known = self.lines[rank].thought_of
        if rank:
            known = known + [n for n in self.lines[0].thought_of if n < min(known, default=0)]
        same = agreed([*self.text, *self.lines[rank].ids], [*text, *ahead])
        self.lines = [Line([*ahead], 2 * k + 2 if k else 0, [n for n in known if n <= same])]
        self.text, self._at_stake, self._beside = text, at_stake, k + 2 if k else 0
        self._guess()

    def find(self, new: list[int]) -> tuple[int, list[int]]:
        """Return the index of the first line that extends past these tokens, and its remainder."""
        for rank, line in enumerate(self.lines):
            if line.ids[: len(new)] == new and len(line.ids) > len(new):
                return rank, line.ids[len(new) :]
        return 0, []

    def tick(self) -> None:
        """Run one forward if a line needs one."""
        if all(len(line.ids) >= line.wanted for line in self.lines):
            return
        self.forwards += 1
        grown = len(self.lines[0].ids) < self.lines[0].wanted
        for line in self.lines:
            if len(line.ids) < line.wanted:
                whole = *self.text, *line.ids
                line.thought_of.append(len(whole))
                line.ids.append(opinion(whole)[0][1])
        if grown:
            self._guess()

    def _guess(self) -> None:
        chain, first = self.lines[0], len(self.text)
        last = first + self._at_stake
        if not self._beside or len(self.lines) > 1 or last not in chain.thought_of:
            return
        whole, reached, guesses = [*self.text, *chain.ids], 1.0, list[tuple[float, int, int]]()
        for at in range(first, last + 1):
            if at not in chain.thought_of:
                continue
            thinks = opinion(tuple(whole[:at]))
            guesses += [(-reached * p, at, token) for p, token in thinks if token != whole[at]]
            reached *= next(p for p, token in thinks if token == whole[at])
        for _, at, token in heapq.nsmallest(self._branches, guesses):
            self.lines.append(Line([*whole[first:at], token], at - first + self._beside))


def simulated(text: list[int], setting: Setting) -> list[Step]:
    """Return the steps of the simulation."""
    drafting, steps, now = Drafting(setting.branches), list[Step](), 0
    hits = beside = waited = written = 0
    new = PROMPT  # the first update; its draft belongs to no step
    while True:
        k = min(setting.lookahead, LENGTH - written - 1)
        whole = [*PROMPT, *text[:written]]
        rank, ahead = drafting.find(new)
        hits, beside = hits + bool(ahead and k), beside + (rank > 0 and k > 0)
        drafting.tell(whole, ahead, rank, min(k, len(ahead)), k)
        if k and not ahead and setting.waits:
            while len(drafting.lines[0].ids) < k:
                now += 1
                drafting.tick()
            ahead, waited = [*drafting.lines[0].ids], waited + 1
            drafting.tell(whole, ahead, 0, k, k)
        tokens = ahead[:k]
        if written:
            steps.append(Step(len(tokens), drafting.forwards, hits, beside, waited, now))
        for _ in range(setting.target):
            now += 1
            drafting.tick()
        new = text[written : written + agreed(tokens, text[written:]) + 1]
        written += len(new)
        if written == LENGTH:
            return steps


@pytest.mark.parametrize("branches", [0, 2, 6])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("lookahead", "target"), [(4, 8), (3, 2), (2, 12), (4, 3)])
def test_steps_are_those_of_a_simulation(
    lookahead: int, target: int, waits: bool, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, seen = Setting(lookahead, target, branches, waits), list[Step]()
    for seed in range(2):
        text = continuation(seed)
        found = measured(text, setting, monkeypatch)
        assert found == simulated(text, setting)
        seen.append(found[-1])
    assert any(last.hits for last in seen)
    assert any(last.beside for last in seen) == (branches > 0)
    assert any(last.waited for last in seen) == waits


def test_commits_are_counted_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The serial of an update starts again at 1, because the table stores it in four bytes."""
    setting, text = Setting(3, 5, 2, waits=True), continuation(1)
    assert measured(text, setting, monkeypatch, 2**31 - 5) == measured(text, setting, monkeypatch)


def test_texts_that_are_too_many_for_a_commit_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three requests per update, any three consecutive updates contain all eight requests."""
    monkeypatch.setattr(client, "MOST_ROWS", 3)
    source, bridge = source_of(monkeypatch, DraftStats(), slots=8)
    told: list[list[int]] = []
    send = source._process.send

    def sent(commit: UpdateBatch) -> bool:
        told.append([row.slot for row in commit.rows])
        return send(commit)

    monkeypatch.setattr(source._process, "send", sent)
    states = [RequestState(str(number), bridge.open()) for number in range(8)]
    for step in range(16):
        unchanged = bridge.extend([of.context for of in states], [[1 + step % 5]] * 8)
        for state, same in zip(states, unchanged, strict=True):
            state.align(source.pool, same)
        source.begin([DraftTask(state, 1) for state in states], iter(()), Control(waits=False))
        source.finish()
    assert [*map(len, told)] == [3] * 16
    assert all(len({*told[at], *told[at + 1], *told[at + 2]}) == 8 for at in range(14))
