# SPDX-License-Identifier: Apache-2.0
"""Precomputed drafts (`draft_ahead`) are accepted as often as drafts made in the step itself."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import engine, metrics_of, patient, process, proposer_of, slem
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.ahead import lookup
from vllm_hetero_spec.engine.ahead.continuations import MatchedContinuation
from vllm_hetero_spec.engine.ahead.table import DraftRecord, DraftTable
from vllm_hetero_spec.lookahead.controllers import Fixed, LookaheadPlan
from vllm_hetero_spec.text.bridge import TextBridge

pytestmark = [pytest.mark.full, pytest.mark.engine]


class Counts(NamedTuple):
    """Counters of one run of a load."""

    drafts: int
    accepted: int
    hits: int
    waited: int

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts


class Load:
    """Runs the same texts repeatedly on one engine."""

    def __init__(self, llm: Any, texts: list[str]) -> None:
        self.llm, self.texts = llm, texts

    def run(self) -> tuple[Outputs, Counts]:
        before = self._counts()
        outputs = generate(self.llm, self.texts, greedy(max_tokens=40))
        return outputs, Counts(*(a - b for a, b in zip(self._counts(), before, strict=True)))

    def _counts(self) -> Counts:
        metrics, stats = metrics_of(self.llm), read_stats(self.llm)
        drafts, accepted = metrics["num_drafts"], metrics["num_accepted_tokens"]
        return Counts(drafts, accepted, stats["drafts_ahead"], stats["drafts_waited"])


class Compared(NamedTuple):
    """A load with a drafter process, and the results of the same load without one (`inline`)."""

    name: str
    load: Load
    outputs: Outputs
    inline: Counts


@pytest.fixture(scope="module", params=["demo", "code"])
def pair(request: pytest.FixtureRequest, code_prompts: list[str]) -> Iterator[Compared]:
    if request.param == "demo":
        folder = request.getfixturevalue("demo_pair")
        target, drafter = folder / "target", folder / "drafter"
    else:
        folder = request.getfixturevalue("shared") / "models"
        target, drafter = folder / "code-target-13M", folder / "code-draft-1.7M"
    texts = [text[:400] for text in code_prompts[:8]]
    with engine(target, slem(drafter)) as llm:
        outputs, inline = Load(llm, texts).run()
    del llm
    gc.collect()
    with engine(target, process(drafter)) as llm:
        yield Compared(request.param, Load(llm, texts), outputs, inline)


@pytest.fixture
def slow_target(pair: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    patient(pair.load.llm, monkeypatch)


@pytest.fixture
def waits(pair: Compared, slow_target: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for every missing draft, whatever it costs."""
    observer = proposer_of(pair.load.llm).drafting.observer
    monkeypatch.setattr(observer, "wait", lambda missing, *_: (max(missing.values()), 10.0))


def test_accepted_as_far_as_drafts_made_on_the_spot(pair: Compared, waits: None) -> None:
    """More tokens may be accepted; how many depends on the texts."""
    outputs, counts = pair.load.run()
    assert outputs == pair.outputs
    assert counts.drafts <= 1.05 * pair.inline.drafts
    few = 0.01 * counts.drafts
    assert counts.accepted >= 0.95 * pair.inline.accepted - few
    assert counts.hits > 0.25 * counts.drafts
    assert counts.waited > 0
    assert counts.hits + counts.waited >= counts.drafts


def test_without_waiting_what_is_there_is_no_worse(pair: Compared, slow_target: None) -> None:
    outputs, counts = pair.load.run()
    assert outputs == pair.outputs
    assert counts.waited == 0
    assert 0 < counts.drafts <= counts.hits
    assert counts.acceptance_length > 0.9 * pair.inline.acceptance_length


class Probing(Fixed):
    """Controller that only drafts probes, in every third step."""

    def __init__(self) -> None:
        super().__init__(0)
        self.steps = self.verified = self.not_guessed = 0

    def plan(self, batch: int, limits: Any, *_: Any, **__: Any) -> LookaheadPlan:
        self.steps += 1
        wanted = 4 if self.steps % 3 == 0 else 0  # steps without drafts may be read later
        return LookaheadPlan(tuple(min(limit, wanted) for limit in limits), probe=wanted > 0)

    def observe_acceptance(self, verified: int, *_: Any) -> None:
        self.verified += verified > 0
        self.not_guessed += verified == 0


def test_probes_show_what_drafts_bring_and_wait_for_none(
    pair: Compared, slow_target: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = proposer_of(pair.load.llm)
    monkeypatch.setattr(proposer.drafting.control, "controller", controller := Probing())
    outputs, counts = pair.load.run()
    assert outputs == pair.outputs
    assert counts.waited == 0
    assert 0 < controller.verified == counts.drafts
    assert controller.not_guessed > 0
    assert counts.acceptance_length > 0.7 * pair.inline.acceptance_length


def test_what_the_target_would_have_joined_is_hardly_accepted(
    pair: Compared, waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check `may_follow`, fewer tokens are accepted, so the first test covers it."""
    if pair.name == "demo":
        pytest.skip("its texts have hardly any place for it")
    _, checked = pair.load.run()
    monkeypatch.setattr(TextBridge, "may_follow", lambda *_: True)
    outputs, counts = pair.load.run()
    assert outputs == pair.outputs
    assert counts.acceptance_length < 0.98 * checked.acceptance_length


def test_wrong_guesses_are_never_hit(
    pair: Compared, waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = proposer_of(pair.load.llm).drafting.source._look
    context = look._bridge.open()
    context.append([token for ids in pair.outputs.values() for token in ids])
    written = look._spelled(context.ids)
    wrong = next(i for i, data in look._bytes.items() if data.isalnum() and data not in written)
    read, ends = DraftTable.read, look._bridge.drafter_eos

    def misread(table: DraftTable, slot: int, rank: int = 0) -> DraftRecord | None:
        found = read(table, slot, rank)
        if found is None:
            return None
        end = [token for token in found.ids if token in ends]  # without it the engine would wait
        return found._replace(ids=[wrong] * len(found.ids) + end)

    monkeypatch.setattr(DraftTable, "read", misread)
    outputs, counts = pair.load.run()
    assert outputs == pair.outputs
    assert counts.hits == counts.accepted == 0
    assert counts.drafts > 0


def test_remainders_of_other_texts_are_not_accepted(
    pair: Compared, slow_target: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the match by bytes the output does not change, but fewer tokens are accepted."""

    def unmatched(lines: Any, *_: Any) -> MatchedContinuation | None:
        chain = next(iter(lines), None)
        return None if chain is None else MatchedContinuation(0, list(chain))

    monkeypatch.setattr(lookup, "find_remainder", unmatched)
    outputs, counts = pair.load.run()
    assert outputs == pair.outputs
    assert counts.drafts > 0
    assert counts.acceptance_length < 0.75 * pair.inline.acceptance_length


def test_goodput_knows_what_the_process_costs(
    demo_pair: Path, code_prompts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cost is known after start-up. Later it includes how long the target has waited."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = process(demo_pair / "drafter", controller="goodput")
    with engine(demo_pair / "target-wide", spec) as llm:
        controller = proposer_of(llm).drafting.control.controller
        costs = controller.known.costs
        assert costs.knows_drafter
        steps = controller.known.steps.expected(4)
        assert steps == 0  # at first no draft counts as waiting time
        for text in code_prompts[:8]:  # on a busy machine some requests get no drafts
            generate(llm, [text[:400]], greedy(max_tokens=64))
            stats = read_stats(llm)
            if stats["drafts_ahead"] and controller.known.steps.expected(4) != steps:
                break
        assert stats["drafts_ahead"] > 0
        assert stats["forward_seconds"] > stats["wait_seconds"]
        assert controller.known.steps.expected(4) != steps  # the direction depends on the machine
        assert 0 < stats["hit_rate"] <= 1
