# SPDX-License-Identifier: Apache-2.0
"""The batched rules have the distribution of their reference form, in any batch."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import reference as ref
import torch
from chance import Chance, law
from goodness import MISSED, follows, missed
from hypothesis import given
from hypothesis import strategies as st

from vllm_hetero_spec.verify import noise
from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch
from vllm_hetero_spec.verify.fuzzy import diverge, fuzzy_rule
from vllm_hetero_spec.verify.noise import (
    ACCEPT,
    CORRECT,
    RACE,
    choose,
    keys_of,
    random_bits,
    uniform,
)
from vllm_hetero_spec.verify.race import race
from vllm_hetero_spec.verify.rules import block_rule, greedy_rule, race_rule, token_rule

CPU = torch.device("cpu")
COPIES = 30_000
RULES = {"token": (token_rule, ref.token_rule), "block": (block_rule, ref.block_rule)}
BATCHED = {name: batched for name, (batched, _) in RULES.items()}
BATCHED["fuzzy"] = lambda *given: fuzzy_rule(*given, "js", 0.1).verdict
# Three draft tokens: the second is certain, and the row of the third sums to less than 1.
P = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.3, 0.1], [0.25] * 4])
ROWS = np.array([[0.2, 0.5, 0.1, 0.2], [0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.1, 0.4]])
TOLD = np.array([*ROWS[:2], [0.2, 0.2, 0.1, 0.3]])


def drawn_batch(copies: int, seed: int = 3, places: Sequence[int] | None = None) -> DraftBatch:
    """Drafts sampled from ROWS, one per copy, all at place 0 unless `places` are given."""
    generator = np.random.default_rng(seed)
    tokens = np.stack(
        [generator.choice(5, size=copies, p=[*row, 1 - row.sum()]) for row in ROWS], axis=1
    )
    tokens[tokens == 4] = -1
    rows = torch.tensor(ROWS[[0, 2]], dtype=torch.float32)
    return DraftBatch.of(
        tokens=torch.from_numpy(tokens.reshape(-1)),
        lengths=[3] * copies,
        seeds=range(copies),
        places=[0] * copies if places is None else places,
        draft_probs=[rows],
        row_of=[0, -1, 1] * copies,
    )


def target_rows(copies: int) -> torch.Tensor:
    """Return the target's rows for the draft tokens of as many drafts."""
    return torch.tensor(P[:3], dtype=torch.float32).repeat(copies, 1)


def drawn(rows: np.ndarray, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).choice(4, size=COPIES, p=rows))


def exact_law(readable: Callable, told: np.ndarray) -> dict[tuple[int, ...], float]:
    """Return the exact output of a rule for drafts sampled from ROWS but verified with `told`."""

    def one(chance: Chance) -> tuple[int, ...]:
        def stream() -> ref.Stream:
            for row, other in zip(ROWS, told, strict=True):
                token = chance.draw([*row, 1 - row.sum()])
                yield ref.Proposal(None if token == 4 else token, other)

        return readable(lambda c: P[len(c)], (), stream(), chance)

    return law(one)


@pytest.mark.parametrize("rule", RULES)
def test_law_of_a_batch(rule: str) -> None:
    """A large batch of equal requests emits tokens with the exact distribution."""
    batched, readable = RULES[rule]
    drafts = drawn_batch(COPIES)
    p = target_rows(COPIES)

    def emitted(drafts: DraftBatch) -> Counter:
        verdict = batched(drafts, p, drawn(P[3], 1))
        lines = [tuple(t for t in line if t != FILLER) for line in verdict.tokens.tolist()]
        assert [len(line) - 1 for line in lines] == verdict.accepted.tolist()
        return Counter(lines)

    expected, found = exact_law(readable, ROWS), emitted(drafts)
    assert follows(found, expected)
    assert found.keys() <= {key for key, probability in expected.items() if probability > 0}
    # With a row that is wrong by 0.1 of probability, the rule must fail this test.
    assert missed(expected, exact_law(readable, TOLD), COPIES) < MISSED
    told = torch.tensor(TOLD[[0, 2]], dtype=torch.float32)
    assert not follows(emitted(dataclasses.replace(drafts, draft_probs=[told])), expected)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_of_probability_zero_are_rejected(rule: str) -> None:
    """Rounding may leave a row without any mass. The target's own distribution is emitted."""
    drafts = DraftBatch.of(
        torch.full((COPIES,), 3), [1] * COPIES, range(COPIES), [0] * COPIES,
        [torch.zeros(1, 4)], [0] * COPIES,
    )  # fmt: skip
    target = torch.tensor(P[:1], dtype=torch.float32).expand(COPIES, -1)
    verdict = RULES[rule][0](drafts, target, drawn(P[3], 5))
    assert not verdict.accepted.any()
    assert follows(Counter(verdict.tokens[:, 0].tolist()), dict(enumerate(P[0])))


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_the_target_itself_are_all_accepted(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(400, 30, generator=generator).softmax(-1)
    tokens = torch.multinomial(p, 1, generator=generator)[:, 0]
    drafts = DraftBatch.of(tokens, [4] * 100, range(100), [0] * 100, [p.clone()], range(400))
    bonus = torch.full((100,), 7)
    verdict = RULES[rule][0](drafts, p, bonus)
    assert verdict.accepted.tolist() == [4] * 100
    assert torch.equal(verdict.tokens[:, :4].reshape(-1), tokens)
    assert verdict.tokens[:, 4].tolist() == [7] * 100


@pytest.mark.parametrize("rule", RULES)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 30),
    one_hot=st.booleans(),
)
def test_any_lengths(rule: str, lengths: list[int], seed: int, one_hot: bool) -> None:
    """No token of probability 0 is emitted, and the arguments are not changed."""
    generator = np.random.default_rng(seed)
    count = sum(lengths)
    p = torch.tensor(generator.dirichlet(np.full(6, 0.2), count) if count else np.zeros((0, 6)))
    p = torch.where(p < 0.01, 0.0, p).float()
    tokens = torch.from_numpy(generator.integers(-1, 6, count))
    rows = torch.tensor(generator.dirichlet(np.ones(6), max(1, count))).float()
    row_of = generator.integers(-1, max(1, count), count)
    own = range(len(lengths)), [0] * len(lengths)
    drafts = DraftBatch.of(tokens, lengths, *own, *(() if one_hot else ([rows], row_of)))
    before = p.clone(), rows.clone(), tokens.clone()
    bonus = torch.arange(len(lengths)) + 100
    verdict = RULES[rule][0](drafts, p, bonus)
    assert verdict.tokens.shape == (len(lengths), max(lengths) + 1)
    assert all(map(torch.equal, before, (p, rows, tokens)))
    start = 0
    for line, accepted, length in zip(
        verdict.tokens.tolist(), verdict.accepted.tolist(), lengths, strict=True
    ):
        assert line[:accepted] == tokens[start : start + accepted].tolist()
        assert line[accepted + 1 :] == [FILLER] * (max(lengths) - accepted)
        assert (line[accepted] >= 100) == (accepted == length)
        for place, token in enumerate(line[: min(accepted + 1, length)]):
            assert p[start + place, token] > 0
        start += length


@pytest.mark.parametrize("rule", BATCHED)
def test_tables_and_parts_change_nothing(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are processed at a time, or each drafting round has its own table of rows."""
    drafts, p, bonus = drawn_batch(700), target_rows(700), drawn(P[3], 1)[:700]
    whole = BATCHED[rule](drafts, p, bonus).tokens
    (rows,) = drafts.draft_probs
    rounds = dataclasses.replace(drafts, draft_probs=[rows[:1], rows[1:]])
    assert torch.equal(BATCHED[rule](rounds, p, bonus).tokens, whole)
    for cells in (1, 30, 1000):
        monkeypatch.setattr(noise, "_CELLS_ON_CPU", cells)
        assert torch.equal(BATCHED[rule](drafts, p, bonus).tokens, whole)


@pytest.mark.parametrize("width", [1000, 50_000, 150_000, 300_000])
def test_parts_are_bounded(width: int) -> None:
    """Off the CPU, a part takes at most 1 GiB at 32 bytes per cell."""
    for device in (torch.device("cuda"), None):
        parts = list(noise.slices(3000, width, device))
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(3000))
        assert max(part.stop - part.start for part in parts) * width * 32 <= 1 << 30
        assert len(list(noise.slices(64, width, device))) == 1


def test_greedy_rule() -> None:
    drafts = DraftBatch.of(torch.tensor([1, 2, 3, 4, 5]), [3, 0, 2], [0] * 3, [0] * 3)
    verdict = greedy_rule(drafts, torch.tensor([1, 2, 9, 4, 5]), torch.tensor([7, 8, 6]))
    assert verdict.tokens.tolist() == [[1, 2, 9, -1], [8, -1, -1, -1], [4, 5, 6, -1]]


def test_numbers_depend_on_seed_place_purpose_and_index_alone() -> None:
    seeds, places, index = (
        x.flatten() for x in torch.meshgrid(*[torch.arange(-1, 12)] * 3, indexing="ij")
    )
    found = [uniform(keys_of(seeds, purpose), places, index) for purpose in (RACE, ACCEPT, CORRECT)]
    assert len(torch.cat(found).unique()) == 3 * len(seeds)
    for at in (0, 77, 500):
        part = slice(at, at + 1)
        assert found[1][at] == uniform(keys_of(seeds[part], ACCEPT), places[part], index[part])
    keys = keys_of(seeds, RACE)
    table = random_bits(keys[:9], places[:9], torch.arange(4)[None])
    assert table[3, 2] == random_bits(keys[3:4], places[3:4], torch.tensor([2]))


def test_numbers_are_uniform_along_seeds_places_and_indices() -> None:
    many, nought = torch.arange(COPIES), torch.zeros(COPIES, dtype=torch.int64)
    asked = [(many, nought, nought), (nought, many, nought), (nought, nought, many)]
    law = dict.fromkeys(range(16), 1 / 16)
    for seeds, places, index in [*asked, (many, many, nought), (many * 2**40, nought, nought)]:
        numbers = uniform(keys_of(seeds, ACCEPT), places, index)
        assert follows(Counter((numbers * 16).long().tolist()), law)
        pairs = (numbers[1:] * 4).long() * 4 + (numbers[:-1] * 4).long()
        assert follows(Counter(pairs.tolist()), law)
    pairs = [uniform(keys_of(many, purpose), nought, nought) * 4 for purpose in (ACCEPT, CORRECT)]
    assert follows(Counter((pairs[0].long() * 4 + pairs[1].long()).tolist()), law)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_seed_and_place_give_the_same_tokens_in_any_batch(rule: str) -> None:
    drafts, p = drawn_batch(50), target_rows(50)
    together = RULES[rule][0](drafts, p, drawn(P[3], 1)[:50])
    for index in (0, 17, 49):
        part = slice(3 * index, 3 * index + 3)
        alone = DraftBatch.of(
            drafts.tokens[part], [3], [index], [0], drafts.draft_probs, [0, -1, 1]
        )
        found = RULES[rule][0](alone, p[part], drawn(P[3], 1)[index : index + 1])
        assert torch.equal(found.tokens[0], together.tokens[index])


@pytest.mark.parametrize("rule", RULES)
def test_the_law_of_a_second_draft_does_not_depend_on_the_first(rule: str) -> None:
    """A rule may read noise after the accepted tokens; the next step does not use it again."""
    batched, readable = RULES[rule]
    p = target_rows(COPIES)
    first = batched(drawn_batch(COPIES), p, drawn(P[3], 1))
    second = batched(drawn_batch(COPIES, 4, (first.accepted + 1).tolist()), p, drawn(P[3], 2))
    expected = exact_law(readable, ROWS)
    for accepted in range(4):
        lines = second.tokens[first.accepted == accepted].tolist()
        assert len(lines) > 300
        found = Counter(tuple(t for t in line if t != FILLER) for line in lines)
        assert follows(found, expected)


@given(weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 0.5, 1.0]), min_size=1, max_size=9))
def test_choose_never_takes_a_weight_of_zero(weights: list[float]) -> None:
    if not any(weights):
        return
    uniform = torch.tensor([0.0, 0.3, 0.999999, 1 - 2**-53], dtype=torch.float64)
    chosen = choose(torch.tensor([weights]).repeat(4, 1), uniform)
    assert all(weights[index] > 0 for index in chosen.tolist())


@pytest.mark.parametrize(
    ("width", "size"),  # with the number of weights in a block; the last one pads a prime width
    [(4096, 4096), (4097, 4097), (12_000, 4000), (16_411, 4096)],
)
def test_choose_in_blocks_of_wide_rows(width: int, size: int) -> None:
    """The result is that of a running sum, also at block ends; weight 0 is never chosen."""
    generator = np.random.default_rng(width)
    weights = generator.dirichlet(np.full(width, 0.5)) * (generator.random(width) < 0.8)
    weights[size : 2 * size - 90] = 0.0
    weights[2 * size : 3 * size] = 0.0
    weights[[0, size - 1, -1]] = 1 / width
    row = torch.tensor(weights, dtype=torch.float32)
    sums = row.to(torch.float64).cumsum(0)
    uniform = torch.from_numpy(generator.random(5000))
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    edges = sums[torch.arange(size - 1, width, size)] / sums[-1]
    uniform[2 : 2 + len(edges)] = edges.clamp_max(1 - 2**-53)
    chosen = choose(row.expand(5000, -1), uniform)
    assert (row[chosen] > 0).all()
    assert chosen[0] == 0
    assert chosen[1] == width - 1
    below = torch.where(chosen > 0, sums[chosen - 1], 0.0)
    aim = uniform * sums[-1]
    assert (aim > below - 1e-6).all()
    assert (aim < sums[chosen] + 1e-6).all()


@pytest.mark.parametrize("width", [12_000, 16_411])
def test_choose_never_takes_a_block_of_zeros(width: int) -> None:
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    for place in (0, 4095, 4096, 8000, width - 1):
        row = torch.zeros(3, width)
        row[:, place] = 1e-30
        assert choose(row, uniform).tolist() == [place] * 3


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    """The choice is bit-exact: in flat rows, rounding alone could choose another token."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(9, 50_000, generator=generator)
    uniform = torch.rand(9, dtype=torch.float64, generator=generator)
    together = choose(rows, uniform)
    alone = [choose(rows[i : i + 1], uniform[i : i + 1]) for i in range(9)]
    assert torch.equal(together, torch.cat(alone))


# ------------------------------------------------------------------------------------- races


def test_the_law_of_a_race() -> None:
    p = torch.tensor(P[0], dtype=torch.float32).repeat(COPIES, 1)
    expected = dict(enumerate(P[0]))
    assert missed(expected, dict(enumerate(ROWS[0])), COPIES) < MISSED
    for seeds, places in (
        (torch.arange(COPIES), torch.zeros(COPIES, dtype=torch.int64)),
        (torch.full((COPIES,), 42), torch.arange(COPIES)),
    ):
        assert follows(Counter(race(p, seeds, places).tolist()), expected)


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6), seed=st.integers(0, 1 << 30))
def test_race_rule(lengths: list[int], seed: int) -> None:
    """It is the greedy rule applied to the winners of the races."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    count = sum(lengths)
    p = torch.tensor(generator.dirichlet(np.full(5, 0.5), max(1, count))).float()[:count]
    seeds = generator.integers(1 << 40, size=len(lengths))
    places = generator.integers(50, size=len(lengths))
    tokens = torch.full((count,), -1)
    bonus = torch.arange(len(lengths)) + 100
    drafts = DraftBatch.of(tokens, lengths, seeds, places)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    at = [place for start, n in zip(places, lengths, strict=True) for place in start + np.arange(n)]
    best = race(p, torch.from_numpy(seeds[owners]), torch.tensor(at, dtype=torch.int64))
    tokens.copy_(torch.where(torch.rand(count) < 0.7, best, torch.randint(-1, 5, (count,))))
    expected, found = greedy_rule(drafts, best, bonus), race_rule(drafts, p, bonus)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.accepted, expected.accepted)


@pytest.mark.full
def test_races_of_large_vocabularies_follow_the_law() -> None:
    """Arrival times stay distinct near 0, which is where most winners of a flat row arrive."""
    copies, width = 2000, 20_000
    rows = torch.linspace(1.0, 4.0, width)[None].expand(copies, -1)
    winners = race(rows, torch.arange(copies), torch.zeros(copies, dtype=torch.int64))
    share = float(rows[0, width // 2 :].sum() / rows[0].sum())
    expected = {True: share, False: 1 - share}
    assert follows(Counter((winners >= width // 2).tolist()), expected)
    assert missed(expected, {True: 0.5, False: 0.5}, copies) < MISSED  # as if all arrived at once
    assert len(winners.unique()) > copies * 0.9


def test_a_row_of_one_token_is_won_by_it() -> None:
    rows = torch.zeros(3000, 7)
    rows[:, 4] = 1e-30
    assert (race(rows, torch.arange(3000), torch.zeros(3000, dtype=torch.int64)) == 4).all()


def test_agreement_of_races_with_the_same_seeds() -> None:
    p, q = (torch.tensor(row, dtype=torch.float32).repeat(COPIES, 1) for row in (P[0], ROWS[0]))
    seeds, places = torch.arange(COPIES), torch.full((COPIES,), 3)
    laws = [
        {True: share, False: 1 - share}
        for share in (ref.race_acceptance(P[0], ROWS[0]), float((P[0] * ROWS[0]).sum()))
    ]
    for expected, other, wrong in zip(laws, (places, places + 1), laws[::-1], strict=True):
        same = race(p, seeds, places) == race(q, seeds, other)
        assert follows(Counter(same.tolist()), expected)
        assert missed(expected, wrong, COPIES) < MISSED


def test_a_race_depends_on_seed_place_and_row_alone() -> None:
    rows = torch.rand(40, 1000, generator=torch.Generator().manual_seed(1))
    seeds, places = torch.arange(40) * 7 - 3, torch.arange(40) % 5
    together = race(rows, seeds, places)
    for index in range(40):
        part = slice(index, index + 1)
        assert race(rows[part], seeds[part], places[part]) == together[index]
    assert torch.equal(race(rows * 3.0, seeds, places), together)
    rows[:, ::2] = 0
    assert (race(rows, seeds, places) % 2 == 1).all()


# ------------------------------------------------------------------------------------- fuzzy


@pytest.mark.parametrize("divergence", ["js", "tv", "kl"])
def test_fuzzy_at_zero_is_the_token_rule(divergence: str) -> None:
    drafts = drawn_batch(500)
    p = target_rows(500)
    strict = token_rule(drafts, p, drawn(P[3], 1)[:500])
    found = fuzzy_rule(drafts, p, drawn(P[3], 1)[:500], divergence, 0.0)
    assert torch.equal(found.verdict.tokens, strict.tokens)
    assert not found.only_fuzzy.any()
    assert not found.variation.any()


def test_fuzzy_reports_what_it_gave_up() -> None:
    drafts = drawn_batch(2000)
    p = target_rows(2000)
    bonus = drawn(P[3], 1)[:2000]
    found = fuzzy_rule(drafts, p, bonus, "js", 10.0)
    tokens = drafts.padded(drafts.tokens, FILLER)
    assert (found.verdict.accepted[tokens[:, 0] >= 0] >= 1).all()  # every sampled token passes
    strict = token_rule(drafts, p, bonus)
    assert found.verdict.accepted.sum() > strict.accepted.sum()
    assert 0 < found.only_fuzzy.sum() < found.verdict.accepted.sum()
    first = 0.5 * np.abs(P[0] - ROWS[0]).sum()
    alone = found.variation[found.verdict.accepted == 1]
    assert alone.tolist() == pytest.approx([first] * len(alone), abs=1e-5)


def test_divergences() -> None:
    p, q = (
        torch.tensor(x, dtype=torch.float32)
        for x in (P[[0, 0, 0]], np.array([ROWS[0], P[0], [0, 0, 0, 1]]))
    )
    assert diverge(p, q, "tv").tolist() == pytest.approx([0.4, 0.0, 0.9])
    nats = [ref.jensen_shannon(*pair) for pair in zip(p.numpy(), q.numpy(), strict=True)]
    assert diverge(p, q, "js").tolist() == pytest.approx(nats, abs=1e-6)
    smoothed = diverge(p, q, "kl")
    assert smoothed.isfinite().all()
    assert float(smoothed[0]) == pytest.approx(float((p * (p / q).log())[0].sum()), abs=0.01)
