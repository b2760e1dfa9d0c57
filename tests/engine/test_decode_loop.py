# SPDX-License-Identifier: Apache-2.0
"""Rounds of drafting on a toy model: graphs compared with eager steps, and transfers."""

import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape_graphs import TapeGraphs
from torch.overrides import TorchFunctionMode
from toy_drafter import BLOCKS, SIZE, VOCAB, ToyDrafterModel, drafter_of, transfers

from vllm_hetero_spec.draft.penalties import Penalty
from vllm_hetero_spec.draft.sampling import DraftSampling, SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter import draft_batch, token_healing
from vllm_hetero_spec.engine.drafter.draft_batch import DraftBatchRunner
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.parallel import make_parallel
from vllm_hetero_spec.engine.drafter.recording import idle_prefill, idle_step
from vllm_hetero_spec.engine.drafter.requests import RequestState
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.engine.drafter.token_healing import TokenHealing
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.text.bridge import IdentityBridge
from vllm_hetero_spec.text.context import IdentityContext
from vllm_hetero_spec.text.drafts import FirstToken

LOOKAHEAD, REQUESTS = 3, 8
MASK, PLACES = 0, 5  # of a parallel drafter; the mask is never drafted
CONTROL: Any = SimpleNamespace(can_stop_early=False, drafted=lambda *_: None)


class World:
    """A drafter, and the requests for which it drafts."""

    def __init__(
        self, *, sampled: bool = False, token_healing: bool = False, parallel: bool = False
    ) -> None:
        first = torch.arange(VOCAB)
        method = SampledMethod(TokenMap(first, VOCAB), torch.ones(VOCAB).long(), lambda d: (d,))
        self.model = ToyDrafterModel()
        self.drafter = drafter_of(
            self.model,
            LOOKAHEAD,
            REQUESTS,
            sampling=method if sampled else None,
            confidences=True,
            back=token_healing,
        )
        if parallel:
            make_parallel(self.drafter, MASK, PLACES)
        bridge: Any = SimpleNamespace(identity=True)  # `row` admits the requests
        self.healing = TokenHealing(self.drafter, bridge)
        self.drafter.extensions.append(self.healing)
        self.pool = KVPool(BLOCKS, SIZE)
        self.states: dict[str, RequestState] = {}

    def row(self, name: str, text: Sequence[int], steps: int, choose: Any = None) -> DraftRow:
        """Return the row that an engine builds for a request with the current text `text`."""
        context = IdentityContext()
        context.ids = list(text)
        old = self.states.get(name)
        state = self.states[name] = RequestState(name, context, num_prompt=2)
        if old is not None:
            state.sequence, state.num_kv_valid = old.sequence, old.num_kv_valid
            state.counts = old.counts
        state.align(self.pool, 0)
        assert state.sequence is not None
        pending = list(text[state.num_kv_valid :])
        assert self.pool.grow(state.sequence.table, len(text) + steps)
        state.num_kv_valid = len(text)
        if choose is not None:
            self.healing.choosers[name] = choose
        return DraftRow(DraftTask(state, LOOKAHEAD), state.sequence, pending, steps)

    def close(self, name: str) -> None:
        self.states.pop(name).close(self.pool)


def record(
    world: World, *, in_graph: bool, sizes: Sequence[int] = (1, 2, 4), widest: int = 8
) -> TapeGraphs:
    graphs = TapeGraphs()
    shapes = [(size, width) for size in sizes for width in (1, 4, widest)]
    world.drafter.record(graphs.capture, shapes, GraphSupport(in_graph, several_tokens=True))
    return graphs


def choice(chance: random.Random) -> Any:
    """Return a function that chooses a random first token, also in place of the text's last one."""
    place, back = chance.randrange(8), chance.random() < 0.5

    def choose(ids: Sequence[int], last: Sequence[int]) -> FirstToken:
        return FirstToken(last[place], 1, [place, 7]) if back else FirstToken(ids[place])

    return choose


def alike(
    first: Sequence[DrafterTokens], second: Sequence[DrafterTokens], *, cut: Sequence[int] = ()
) -> None:
    """Assert that the drafts are equal. In `second`, the drafts in `cut` have only one token."""
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        count = 1 if place in cut else len(one.tokens)
        assert one.tokens[:count] == other.tokens
        assert one.finite == other.finite
        assert one.known == other.known
        assert one.confidences[:count] == pytest.approx(other.confidences)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize(
    ("optimistic", "often", "few"),
    [(True, 2.0, 9), (True, 2.0, 2), (True, 0.3, 9), (False, 0.3, 9)],
)
def test_graphs_draft_as_without(
    in_graph: bool, optimistic: bool, often: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random rounds, graphs and eager steps must give the same drafts.

    If first tokens are often replaced, or on a CPU, the check precedes the steps, and no round is
    repeated. Otherwise a round with a replaced first token is repeated if it has at most `few`
    requests. A larger round shortens that draft to one token.
    """
    monkeypatch.setattr(token_healing, "_OFTEN", often)
    monkeypatch.setattr(token_healing, "_FEW", few)
    chance = random.Random(2)
    eager, recorded = World(token_healing=True), World(token_healing=True)
    graphs = record(recorded, in_graph=in_graph)
    recorded.drafter.waits = optimistic
    moved = 0
    texts: dict[str, list[int]] = {}
    addresses: dict[str, int] = {}
    for number in range(60):
        while len(texts) < chance.randint(1, 6):
            texts[str(len(texts) + 100 * number)] = chance.choices(range(1, VOCAB), k=3)
        batch = chance.sample(sorted(texts), chance.randint(1, len(texts)))
        steps = [chance.choice((0, 1, 3, 5)) for _ in batch]
        wanted = {name: choice(chance) for name in batch if chance.random() < 0.3}
        drafted = []
        for world in (eager, recorded):
            rows = [
                world.row(name, texts[name], count, wanted.get(name) if count else None)
                for name, count in zip(batch, steps, strict=True)
            ]
            drafted.append(world.drafter.run(rows))
        one_of = [len(two.tokens) == 1 < len(one.tokens) for one, two in zip(*drafted, strict=True)]
        cut = [place for place, is_one in enumerate(one_of) if is_one]
        assert not cut or (few < sum(map(bool, steps)) and {batch[at] for at in cut} <= set(wanted))
        alike(*drafted, cut=cut)
        for place, (name, count) in enumerate(zip(batch, steps, strict=True)):
            first, second = (of.states[name].sequence.kv_ids for of in (eager, recorded))
            assert first[: len(second)] == second
            assert len(first) - len(second) == (count - 1 if place in cut else 0)
            tokens, known = next(
                (d.tokens, d.known) for d, n in zip(drafted[0], batch, strict=True) if n == name
            )
            assert len(tokens) == count
            if known:  # the first draft token replaced the last token of the text
                moved += 1
                eager.states[name].num_kv_valid -= 1
                recorded.states[name].num_kv_valid -= 1
                tokens = tokens[1:]
            texts[name] += tokens[: chance.randint(0, len(tokens))]
            texts[name] += chance.choices(range(1, VOCAB), k=chance.choice((1, 1, 2, 11)))
            if len(texts[name]) > 100 or chance.random() < 0.1:
                del texts[name]
                eager.close(name)
                recorded.close(name)
        tensors = {
            name: of.data_ptr()
            for name, of in vars(recorded.drafter.steps._on).items()
            if isinstance(of, torch.Tensor)
        }
        addresses = addresses or tensors
        assert tensors == addresses
    assert graphs.captured == 3 * 4
    assert graphs.replays > 100
    assert moved > 10
    vain, short = recorded.drafter.restarted_rounds, recorded.healing.shortened_drafts
    assert (vain > 3) if often > 1 else (0 < vain < 10) if optimistic else vain == 0
    assert (short > 10) if few == 2 else short == 0
    assert (eager.drafter.restarted_rounds, eager.healing.shortened_drafts) == (0, 0)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("often", [2.0, 0.3])
def test_a_parallel_draft_is_one_replay(
    in_graph: bool, often: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts equal those of an eager parallel drafter. A replaced first token shortens none."""
    monkeypatch.setattr(token_healing, "_OFTEN", often)
    chance = random.Random(3)
    eager, recorded = (World(token_healing=True, parallel=True) for _ in range(2))
    graphs = record(recorded, in_graph=in_graph, sizes=(1, 2, 4))
    recorded.drafter.waits = True
    texts: dict[str, list[int]] = {}
    replayed = moved = 0
    for number in range(60):
        while len(texts) < chance.randint(1, 4):
            texts[str(len(texts) + 100 * number)] = chance.choices(range(1, VOCAB), k=20)
        batch = chance.sample(sorted(texts), chance.randint(1, len(texts)))
        steps = [chance.choice((1, 3, PLACES)) for _ in batch]
        wanted = {name: choice(chance) for name in batch if chance.random() < 0.3}
        drafted, before = [], graphs.replays
        known = [eager.states[name].num_kv_valid if name in eager.states else 0 for name in batch]
        most = max(len(texts[name]) - count for name, count in zip(batch, known, strict=True))
        for world in (eager, recorded):
            rows = [
                world.row(name, texts[name], count, wanted.get(name))
                for name, count in zip(batch, steps, strict=True)
            ]
            drafted.append(world.drafter.run(rows))
        alike(*drafted)
        if most <= 8:
            assert graphs.replays == before + 1
            replayed += 1
        for name, tokens in zip(batch, drafted[0], strict=True):
            if tokens.known:
                moved += 1
                for world in (eager, recorded):
                    world.states[name].num_kv_valid -= 1
            assert eager.states[name].sequence.kv_ids == recorded.states[name].sequence.kv_ids
            texts[name] += tokens.tokens[bool(tokens.known) : chance.randint(1, len(tokens.tokens))]
            texts[name] += chance.choices(range(1, VOCAB), k=1)
            if len(texts[name]) > 100 or chance.random() < 0.05:
                del texts[name]
                eager.close(name)
                recorded.close(name)
    assert min(replayed, moved) > 10
    assert recorded.drafter.forwards == 60
    assert recorded.drafter.restarted_rounds == recorded.healing.shortened_drafts == 0
    idle_step(recorded.drafter, 2)
    assert graphs.replays == recorded.drafter.steps.replays


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_parallel_drafter_reads_a_long_text_by_replays(in_graph: bool) -> None:
    """Two forwards read 32 tokens each. No parallel round is as wide."""
    eager, recorded = (World(parallel=True) for _ in range(2))
    graphs = record(recorded, in_graph=in_graph, sizes=(1,), widest=32)
    recorded.drafter.waits = True
    text, before = random.Random(5).choices(range(1, VOCAB), k=70), graphs.replays
    drafted = [world.drafter.run([world.row("a", text, 3)]) for world in (eager, recorded)]
    alike(*drafted)
    assert graphs.replays == before + 3
    assert eager.states["a"].sequence.kv_ids == recorded.states["a"].sequence.kv_ids


@pytest.mark.full
def test_where_first_tokens_are_seldom_others_one_round_in_some_is_judged() -> None:
    """One round in 16 is checked, but after more replacements and on a CPU every round."""
    for waits in (True, False):
        world = World()
        record(world, in_graph=True)
        world.drafter.waits, judged, other = waits, [0], 0

        def choose(ids: Sequence[int], _: Sequence[int], judged: list[int] = judged) -> FirstToken:
            judged[0] += 1
            return FirstToken(ids[other])  # noqa: B023

        def judged_of(rounds: int, judged: list[int] = judged) -> int:
            before = judged[0]
            for _ in range(rounds):
                world.drafter.run([world.row("a", [5, 6, 7, 8], 3, choose)])  # noqa: B023
                world.close("a")  # noqa: B023
            return judged[0] - before

        assert judged_of(60) == 60
        judged_of(60)
        assert judged_of(64) == (4 if waits else 64)
        other = 1
        judged_of(32)
        assert judged_of(10) == 10


@pytest.mark.parametrize("may_wait", [True, False])
def test_where_first_tokens_are_often_others_steps_wait_for_the_judge(
    may_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `begin` may wait, the steps run in `begin`, so that the device has work until `finish`."""
    monkeypatch.setattr(token_healing, "_OFTEN", -1.0)
    eager, recorded = World(token_healing=True), World(token_healing=True)
    graphs = record(recorded, in_graph=True)
    recorded.drafter.waits, recorded.drafter.may_wait = True, may_wait
    second = lambda ids, _: FirstToken(ids[1])  # noqa: E731
    rows = [world.row("a", [5, 6, 7, 8], 3, second) for world in (eager, recorded)]
    eager.drafter.begin([rows[0]])
    recorded.drafter.begin([rows[1]])
    assert graphs.replays == (3 if may_wait else 1)
    alike(eager.drafter.finish(), recorded.drafter.finish())
    assert (graphs.replays, recorded.drafter.restarted_rounds) == (3, 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_done_between_the_halves_is_a_cost_where_steps_would_hide_it(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by ten seconds between `begin` and `finish`, and not within them."""
    world, told, clock = World(), [], SimpleNamespace(now=0.0)
    task = world.row("a", [5, 6, 7], 0).task
    task.state.close(world.pool)
    task.state.align(world.pool, 0)
    world.drafter.may_wait = ahead
    special: Any = SimpleNamespace(banned=frozenset(), proposed={}, drafter_eos=frozenset())
    rounds = DraftBatchRunner(IdentityBridge(special), world.drafter, world.pool, DraftStats(), 99)
    control: Any = SimpleNamespace(
        can_stop_early=False, drafted=lambda timing, drafts: told.append(timing.overhead)
    )
    monkeypatch.setattr(draft_batch, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    rounds.begin([task], iter(()), control)
    clock.now = 10.0
    rounds.finish()
    assert told == pytest.approx([10.0 if ahead else 0.0], abs=1.0)


def test_long_texts_are_read_by_graphs() -> None:
    """A long text is read in parts that fit into a graph, without an eager forward."""
    eager, recorded = World(), World()
    graphs = record(recorded, in_graph=True)
    fed = recorded.drafter.model.fed
    for lengths in ([21], [30, 13], [31, 30, 17]):
        drafted = []
        for world in (eager, recorded):
            rows = [
                world.row(f"{len(lengths)} {number}", list(range(1, 1 + length)), 3)
                for number, length in enumerate(lengths)
            ]
            drafted.append(world.drafter.run(rows))
            for row, length in zip(rows, lengths, strict=True):
                assert row.sequence.kv_ids[:length] == list(range(1, 1 + length))
        alike(*drafted)
    assert recorded.drafter.model.fed == fed
    assert graphs.replays == (2 + 3) + (3 + 3) + (3 + 3)  # parts; then catch-up and draft steps


def test_what_reading_costs_is_timed_as_rounds_read() -> None:
    """The timed prefill reads long texts in parts and short ones at once, with graphs if any."""
    world = World()
    idle_prefill(world.drafter, 21)
    assert world.drafter.model.fed == 21
    graphs = record(world, in_graph=True)
    for tokens, replays in ((8, 1), (21, 3), (90, 0)):  # 90 tokens are too many for parts
        before, fed = graphs.replays, world.drafter.model.fed
        idle_prefill(world.drafter, tokens)
        assert graphs.replays == before + replays
        assert (world.drafter.model.fed == fed) == (replays > 0)
    assert world.drafter.steps.replays == graphs.replays
    assert world.drafter.stopwatch.seconds == 0.0  # it contains only forwards for requests


def behind(text: Sequence[int]) -> torch.Tensor:
    """Return the drafter's logits [V_D] after a text."""
    world = World()
    row = world.row("alone", text, 1)
    plan = world.drafter.planner.plan([row.sequence], [row.pending], [1])
    return world.drafter.steps.begin(plan).logits[0]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_draft_in_the_place_of_the_last_token_is_that_of_the_other_text(
    waits: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the draft follows the changed text. Other requests are unaffected."""
    monkeypatch.setattr(token_healing, "_FEW", 9)
    texts = {"a": [5, 6, 7], "b": [9], "c": [3] * 17, "d": [8, 4], "e": [2, 6, 2, 6]}
    places = {"a": 3, "c": 0, "d": 6}
    world = World(token_healing=True)
    if graphs:
        record(world, in_graph=True, sizes=(1, 8))
    world.drafter.waits = waits
    world.drafter.run([world.row(name, texts[name][:-1], 0) for name in "cde"])
    seen: dict[str, Any] = {}

    def choose(name: str, ids: Sequence[int], last: Sequence[int]) -> FirstToken:
        assert bool(last) == (len(texts[name]) > 1)  # the first token has no context
        seen[name] = list(last)
        place = places.get(name)
        return FirstToken(ids[0]) if place is None else FirstToken(last[place], 2, [place, 7])

    rows = [world.row(name, text, LOOKAHEAD, partial(choose, name)) for name, text in texts.items()]
    drafted = dict(zip(texts, world.drafter.run(rows), strict=True))
    for name, text in texts.items():
        alone = World()
        expected = alone.drafter.run([alone.row(name, text, LOOKAHEAD)])[0]
        if name in places:
            begun = behind(text[:-1]).topk(8)
            assert seen[name][:8] == begun.indices.tolist()
            first = seen[name][places[name]]
            other = World()
            rest = other.drafter.run([other.row(name, [*text[:-1], first], LOOKAHEAD - 1)])[0]
            share = begun.values[[places[name], 7]].softmax(0)[0]
            confidences = [float(share), *rest.confidences]
            expected = DrafterTokens([first, *rest.tokens], True, confidences, known=2)
        alike([drafted[name]], [expected])
        kept = [*text[: len(text) - (name in places)], *drafted[name].tokens[:-1]]
        assert world.states[name].sequence.kv_ids == kept


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_what_was_to_be_drawn_is_greedy_in_the_place_of_the_last_token(
    waits: bool, graphs: bool
) -> None:
    """Other drafts do not change. Sampled drafts ignore other choices of a first token."""
    drafted = []
    for places in ((), (1, 4)):
        world = World(sampled=True, token_healing=True)
        if graphs:
            record(world, in_graph=True, sizes=(1, 8))
        world.drafter.waits = waits

        def choose(
            place: int, ids: Sequence[int], last: Sequence[int], places: Sequence[int] = places
        ) -> FirstToken:
            return FirstToken(last[5], 2, [5]) if place in places else FirstToken(ids[2])

        rows = []
        for place, draw in enumerate(
            (None, DraftSampling(1.3, seed=3), DraftSampling(0.8, seed=4), None, DraftSampling(2.0))
        ):
            row = world.row(str(place), [3 + place, 4, 5], LOOKAHEAD, partial(choose, place))
            task = row.task._replace(draw=draw, penalty=Penalty(3.0) if place == 2 else None)
            rows.append(row._replace(task=task))
        drafted.append(world.drafter.run(rows))
        assert all(row.task.draw for row in rows if row.task.state.req_id in "124")
    before, after = drafted
    assert [of.known for of in after] == [0, 2, 0, 0, 2]
    assert [of.proposal is None for of in after] == [True, True, False, True, True]
    alike(after[:1] + after[3:4], before[:1] + before[3:4])
    assert after[2].tokens == before[2].tokens
    rows = [of[2].proposal.draft_probs.rows[of[2].proposal.draft_probs.row_of] for of in drafted]
    torch.testing.assert_close(*rows)
    for place in (1, 4):
        text, other = [3 + place, 4], World()
        text.append(int(behind(text).topk(6).indices[5]))
        rest = other.drafter.run([other.row("other", text, LOOKAHEAD - 1)])[0]
        confidences = [1.0, *rest.confidences]
        alike([after[place]], [DrafterTokens([text[-1], *rest.tokens], True, confidences, known=2)])


def test_reading_again_what_is_known_writes_nothing() -> None:
    """Catch-up is padded on the left with known tokens. Their KV must not change by a bit."""
    world = World()
    record(world, in_graph=True, sizes=(4,))
    rows = [world.row(str(i), [1 + i] * (9 + i), 1) for i in range(3)]
    world.drafter.run(rows)
    before = world.model.cache.clone()
    rows = [world.row(str(i), [1 + i] * (9 + i) + [7, 9][: 1 + i % 2], 0) for i in range(3)]
    fresh = [
        block * SIZE + place % SIZE
        for row in rows
        for place in range(len(row.sequence.kv_ids), len(row.task.state.context.ids))
        for block in [row.sequence.table.blocks[place // SIZE]]
    ]
    world.drafter.run(rows)
    changed = (world.model.cache != before).any(-1).any(0).any(0)[:-1]
    assert changed.nonzero()[:, 0].tolist() == sorted(fresh)


def test_drawn_and_penalised_requests_beside_greedy_ones() -> None:
    """Their picks read the logits of a graph, and their tokens are the input of the next one."""
    drafted = []
    for graphs in (False, True):
        world = World(sampled=True)
        if graphs:
            record(world, in_graph=True)
        rows = [world.row(str(i), [3 + i, 4, 5 + i], LOOKAHEAD) for i in range(4)]
        changed = [
            rows[0],
            rows[1]._replace(task=rows[1].task._replace(draw=DraftSampling(1.3))),
            rows[2]._replace(task=rows[2].task._replace(penalty=Penalty(5.0, 5.0, 2.0))),
            rows[3]._replace(
                task=rows[3].task._replace(draw=DraftSampling(0.8, top_k=5), penalty=Penalty(3.0))
            ),
        ]
        drafted.append(world.drafter.run(changed))
    alike(*drafted)
    for one, other in zip(*drafted, strict=True):
        assert (one.proposal is None) == (other.proposal is None)
        if one.proposal is not None:
            assert one.proposal.tokens == other.proposal.tokens
            rows = [of.proposal.draft_probs.rows for of in (one, other)]
            torch.testing.assert_close(*rows)
            assert one.proposal.draft_probs.row_of == other.proposal.draft_probs.row_of
    assert len(set(drafted[0][2].tokens)) == LOOKAHEAD  # the penalty prevents repetitions


@pytest.mark.parametrize("graphs", [True, False])
def test_what_was_drawn_in_front_of_broken_logits_stays(graphs: bool) -> None:
    """The broken logits depend on the last token. Its removal would make it less frequent."""
    drafted = []
    for broken in (False, True):
        world = World(sampled=True)
        whole = world.model.logits

        def logits(batch: Any, whole: Any = whole, broken: bool = broken) -> torch.Tensor:
            found = whole(batch)
            odd = (batch.ids.view(len(found), -1)[:, -1:] % 2 == 1) & (batch.max_query == 1)
            return torch.where(odd & broken, torch.nan, found)

        world.model.logits = logits  # type: ignore[method-assign]
        if graphs:
            record(world, in_graph=True, sizes=(1, 8))
        rows = [world.row(str(i), [3 + i, 4, 6], LOOKAHEAD) for i in range(8)]
        drawn = [
            row._replace(task=row.task._replace(draw=DraftSampling(1.3, seed=place)))
            for place, row in enumerate(rows)
        ]
        drafted.append(world.drafter.run(drawn))
    cut = 0
    for found, whole_draft in zip(drafted[1], drafted[0], strict=True):
        assert found.proposal is not None
        assert whole_draft.proposal is not None
        ids = whole_draft.proposal.tokens
        sound = next((n for n, token in enumerate(ids[:-1], 1) if token % 2), len(ids))
        assert found.proposal.tokens == ids[:sound]
        assert found.finite is (sound == len(ids))
        cut += not found.finite
    assert 0 < cut < 8


def test_nothing_is_drafted_on_behind_an_end() -> None:
    """A draft ends with the first end-of-sequence token, although the round has more tokens."""
    drafts, forwards = [], []
    for ends in ([], [1]):
        world = World()
        task = world.row("a", [3, 4, 5], 0).task
        task.state.close(world.pool)
        task.state.align(world.pool, 0)
        special: Any = SimpleNamespace(banned=frozenset(), proposed={})
        special.drafter_eos = frozenset(drafts[0][place] for place in ends)
        bridge = IdentityBridge(special)
        rounds = DraftBatchRunner(bridge, world.drafter, world.pool, DraftStats(), 99)
        rounds.begin([task], iter(()), CONTROL)
        (draft,) = rounds.finish()
        drafts.append(draft.tokens)
        forwards.append(world.drafter.forwards)
    assert len(drafts[0]) == LOOKAHEAD
    assert drafts[1] == drafts[0][:2]
    assert forwards[0] == forwards[1]


def test_kv_of_a_text_that_ends_before_its_first_draft_is_not_trusted() -> None:
    """Its logits were not checked for values that are not finite. A draft's logits are checked."""
    world = World()
    bridge = IdentityBridge(SimpleNamespace(banned=frozenset(), proposed={}, drafter_eos=()))  # type: ignore[arg-type]
    rounds = DraftBatchRunner(bridge, world.drafter, world.pool, DraftStats(), 4)
    task = world.row("a", [3, 4, 5, 6, 7, 8], 0).task
    task.state.close(world.pool)
    for sound in (False, True):
        task.state.align(world.pool, 0)
        rounds.begin([task], iter(()), CONTROL)
        assert bool(rounds.finish()) is sound
        assert task.state.sequence is not None
        assert task.state.sequence.table.sound is sound


class Crossings(TorchFunctionMode):
    """Records the calls that copy data to a device or back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "to"):
            self.seen.append(name)
        if name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
            self.seen.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("judged", [False, True])
def test_a_greedy_round_crosses_once_each_way(judged: bool, monkeypatch: Any) -> None:
    sent, fetched = transfers(monkeypatch)
    for graphs in (False, True):
        world = World()
        if graphs:
            record(world, in_graph=True)
        world.drafter.waits = True
        choose = (lambda ids, last: FirstToken(ids[0])) if judged else None
        rows = [world.row(str(i), [2, 3, 4, 5 + i], LOOKAHEAD, choose) for i in range(3)]
        sent.clear()
        fetched.clear()
        with Crossings() as crossings:
            world.drafter.begin(rows)
            world.drafter.finish()
        assert len(sent) == 1
        assert len(fetched) == 1 + judged  # the check of first tokens fetches its candidates
        assert crossings.seen == []


def test_what_cannot_be_captured_is_refused() -> None:
    """The tape refuses operations that a CUDA graph cannot capture, so the tests above can fail."""
    static, index = torch.zeros(4), torch.tensor([1])
    for work in (
        lambda: static.add_(float(static.sum())),
        lambda: static[static > 0],
        lambda: static.nonzero(),
    ):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            TapeGraphs().capture(work)
    kept = [torch.ones(4)]
    replay = TapeGraphs().capture(lambda: static.add_(kept[0]))
    kept[0] = torch.ones(4)
    with pytest.raises(RuntimeError, match="nobody keeps"):
        replay()
    count = [0]

    def baked() -> None:
        count[0] += 1
        static.index_fill_(0, index, count[0])

    replay = TapeGraphs().capture(baked)
    replay()
    replay()
    assert static[1] == 2 == count[0]
