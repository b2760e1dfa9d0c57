# SPDX-License-Identifier: Apache-2.0
"""Every reference algorithm keeps the target's distribution exactly; wrong variants do not."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import reference as ref
from chance import Chance, law
from goodness import MISSED, follows, missed
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from reference import Pair, Proposal, Stream
from toy_worlds import LETTERS, WORDS, FaithfulWorld, World, longest_match, total_variation, worlds

EXACT = 1e-10
WRONG = 0.01  # total variation that a known-wrong rule must exceed
Draft = Callable[[World, tuple[int, ...], int, Chance], Stream]


def slrs(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
    return ref.slrs(w.pair, w.q_after(c), k, first_token_law(w, c, k), chance)


@cache
def first_token_law(w: World, c: tuple[int, ...], k: int) -> np.ndarray:
    return ref.slrs_psi(w.pair, w.q_after(c), k)


def chained(n: int, m: int = 1) -> Draft:
    """SLRS-n along a chain, with m - 1 other first tokens beside it."""
    return lambda w, c, k, chance: ref.slrs_n(w.pair, w.q_after(c), k, n, chance, m)


def likeliest(count: int, *, told: bool = True) -> Draft:
    """push_forward from the `count` likeliest drafter tokens of each row alone.

    Unless `told`, the rule is given the shortened rows unnormalized, which are not true.
    """

    def draft(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
        whole = w.q_after(c)

        def few(path: tuple[int, ...]) -> np.ndarray:
            row = whole(path)
            kept = np.where(row >= np.sort(row)[-count], row, 0.0)
            return kept / kept.sum() if told else kept

        return ref.push_forward(w.pair, few, k, chance)

    return draft


def at_once(w: World, c: tuple[int, ...]) -> ref.Drafter:
    """A parallel drafter: the row of a place depends on the text, not on what is drafted before."""
    whole = w.q_after(c)
    return lambda path: whole((0,) * len(path))


def parallel(method: Callable[..., Stream]) -> Draft:
    """A method with a parallel drafter."""
    return lambda w, c, k, chance: method(w.pair, at_once(w, c), k, chance)


DRAFTS: dict[str, Draft] = {
    "slem": lambda w, c, k, chance: ref.slem(w.pair, w.q_after(c), k),
    "union": lambda w, c, k, chance: ref.union(w.pair, w.q_after(c), k, chance),
    "tli": lambda w, c, k, chance: ref.tli(w.pair, w.q_after(c), k, chance),
    "push_forward": lambda w, c, k, chance: ref.push_forward(w.pair, w.q_after(c), k, chance),
    "push_forward of 2": likeliest(2),
    "slrs": slrs,
    "slrs-2": chained(2),
    "slrs-2 of 5": chained(2, 5),
    "parallel union": parallel(ref.union),
    "parallel tli": parallel(ref.tli),
    "parallel push_forward": parallel(ref.push_forward),
}
RULES = {"token": ref.token_rule, "block": ref.block_rule}


def deviation(world: World, draft: Draft, rule: Callable, k: int, *, length: int = 4) -> float:
    """Return the total variation between speculation and the target, the largest of 3 prompts."""
    worst = 0.0
    for prompt in ((), (3,), (2,)):
        found = world.law_of(
            lambda c, chance: rule(world.p, c, draft(world, c, k, chance), chance),
            length=length,
            prompt=prompt,
        )
        expected = world.target_law(length=length, prompt=prompt)
        worst = max(worst, total_variation(found, expected))
    return worst


def accepted(world: World, draft: Draft, rule: Callable, k: int) -> float:
    """Return the expected number of accepted tokens of one step: emitted tokens minus one."""
    outcomes = law(lambda chance: len(rule(world.p, (), draft(world, (), k, chance), chance)) - 1)
    return sum(count * probability for count, probability in outcomes.items())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", DRAFTS)
@pytest.mark.parametrize("k", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_lossless(method: str, rule: str, k: int) -> None:
    for world in worlds(2 if k == 3 else 4):
        assert deviation(world, DRAFTS[method], RULES[rule], k, length=3) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_chains_of_bytes_are_lossless(n: int, m: int, rule: str) -> None:
    """Target tokens consist of up to four tokens of a drafter of single bytes."""
    world = worlds(n, target=WORDS, drafter=LETTERS)[-1]
    for k in {n, 4}:
        assert deviation(world, chained(n, m), RULES[rule], k, length=3) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_chains_of_pieces_are_lossless(rule: str) -> None:
    """A proposal may end inside a drafter token; the rest of that token is then revealed."""
    for world in worlds(2, target=WORDS, drafter=(b"a", b"b", b"ba")):
        for m in (1, 3):
            assert deviation(world, chained(3, m), RULES[rule], 3, length=3) < EXACT


def test_longer_chains_accept_more_from_a_drafter_of_bytes() -> None:
    """The drafter has the target's own distribution, so only the merge span limits acceptance."""
    pair = worlds(1, target=WORDS, drafter=LETTERS)[0].pair
    every = [FaithfulWorld(pair, seed) for seed in range(6)]
    push, *chains = (
        np.mean([accepted(world, draft, ref.token_rule, 4) for world in every])
        for draft in (DRAFTS["push_forward"], *map(chained, (1, 2, 3, 4)))
    )
    assert chains[0] == pytest.approx(push)
    assert chains[0] < chains[1] < chains[2] < chains[3]
    assert chains[3] > 2 * push


def test_speculative_decoding_of_one_vocabulary() -> None:
    for world in worlds(4, drafter=(b"a", b"b", b"ab", b"ba", b"aab")):
        draft: Draft = lambda w, c, k, chance: ref.sd(w.q_after(c), k, chance)  # noqa: E731
        for rule in RULES.values():
            assert deviation(world, draft, rule, 2, length=3) < EXACT


def test_one_hot_verification_is_exact_match() -> None:
    """Both rules have the same joint distribution of emitted and accepted tokens."""
    for world in worlds(8):
        stream = lambda: ref.slem(world.pair, world.q_after(()), 3)  # noqa: E731, B023
        by_rule = law(lambda chance: ref.token_rule(world.p, (), stream(), chance))  # noqa: B023
        by_match = law(lambda chance: ref.exact_match(world.p, (), stream(), chance))  # noqa: B023
        assert total_variation(by_rule, by_match) < EXACT


def test_order_of_acceptance() -> None:
    """On the first token union accepts least. The block rule accepts no less than token."""
    for world in worlds(3):
        one = {name: accepted(world, draft, ref.token_rule, 1) for name, draft in DRAFTS.items()}
        assert one["union"] <= one["tli"] + EXACT
        assert one["union"] <= one["push_forward"] + EXACT
        for name in ("tli", "push_forward", "slrs-2"):
            token = accepted(world, DRAFTS[name], ref.token_rule, 3)
            assert token <= accepted(world, DRAFTS[name], ref.block_rule, 3) + EXACT


def test_merges_are_proposed() -> None:
    """SLRS-2 proposes target tokens of two draft tokens; push-forward cannot."""
    world = worlds(1, drafter=(b"a", b"b"))[0]

    def proposed(method: str) -> set[int | None]:
        first = law(lambda chance: next(DRAFTS[method](world, (), 2, chance)).token)
        return {token for token, probability in first.items() if probability}

    assert proposed("push_forward") == {0, 1}
    assert proposed("slrs-2 of 5") == {0, 1, 2, 3}


def test_rows_are_the_laws_of_the_proposals() -> None:
    for world in worlds(6):
        for name, draft in {**DRAFTS, "slrs-3": chained(3)}.items():
            found = law(lambda chance: next(draft(world, (), 3, chance)).token)  # noqa: B023
            row = law(lambda chance: tuple(next(draft(world, (), 3, chance)).row))  # noqa: B023
            assert len(row) == 1, name
            for token, probability in enumerate(next(iter(row))):
                assert found.get(token, 0.0) == pytest.approx(probability, abs=EXACT), name


# --------------------------------------------------------------------- rules that must be caught


def fresh_rest(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
    """The second token has the row of a fresh draft, though the first draft fixes it. Biased."""
    stream = slrs(w, c, k, chance)
    first = next(stream)
    yield first
    assert first.token is not None
    for second in stream:
        yield Proposal(second.token, first_token_law(w, (*c, first.token), k))
        return


def exact_decompositions(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
    """psi counts only the drafts that spell exactly t. Biased."""
    q = w.q_after(c)
    psi = np.zeros(len(w.pair.target))

    def spell(path: tuple[int, ...], probability: float) -> None:
        text = w.pair.spell(path)
        if path and w.pair.tau(text) == (w.pair.tau(text)[0],):
            psi[w.pair.tau(text)[0]] += probability
        if len(path) < k:
            for d, share in enumerate(q(path)):
                spell((*path, d), probability * share)

    spell((), 1.0)
    drawn = next(slrs(w, c, k, chance))
    yield Proposal(drawn.token, psi)


def kept_behind(n: int, m: int = 1) -> Draft:
    """SLRS-n that keeps the token sampled after K and proposes it with the plain row. Biased."""

    def draft(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
        recorded = Recorded(chance)
        first = next(ref.slrs_n(w.pair, w.q_after(c), k, n, recorded, m))
        yield first
        assert first.token is not None
        drawn, text = recorded.drawn, b""
        while len(text) < len(w.pair.target[first.token]):
            text += w.pair.drafter[drawn.pop(0)[0]]
        if drawn:
            d, row = drawn[0]
            plain = np.zeros(len(w.pair.target))
            for x, probability in enumerate(row):
                plain[w.pair.kappa(x)[0]] += probability
            yield Proposal(w.pair.kappa(d)[0], plain)

    return draft


class Recorded:
    """A `Chance` that records each sampled index with its weights."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.drawn: list[tuple[int, ArrayLike]] = []

    def draw(self, weights: ArrayLike) -> int:
        self.drawn.append((self._chance.draw(weights), weights))
        return self.drawn[-1][0]

    def flip(self, probability: float) -> bool:
        return self._chance.flip(probability)


def null_then_target(p: Callable, c: tuple[int, ...], stream: Stream, chance: Chance) -> tuple:
    """If nothing is proposed, sample the token from p instead of the residual. Biased."""

    def ended() -> Iterator[Proposal]:
        for proposal in stream:
            if proposal.token is None:
                return
            yield proposal

    return ref.token_rule(p, c, ended(), chance)


def truncated(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
    """A sampled draft shortened before a token that a grammar forbids. Biased."""
    for proposal in ref.push_forward(w.pair, w.q_after(c), k, chance):
        if proposal.token == 2:
            return
        yield proposal


def low_confidence_dropped(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
    """A sampled token is dropped because its probability is low. Biased."""
    for proposal in ref.push_forward(w.pair, w.q_after(c), k, chance):
        if proposal.token is None or proposal.row[proposal.token] < 0.3:
            return
        yield proposal


def another_place(w: World, c: tuple[int, ...], k: int, chance: Chance) -> Stream:
    """A parallel drafter's token comes with the row of the next place. Biased."""
    q = at_once(w, c)
    drawn = 0
    for proposal in ref.push_forward(w.pair, q, k, chance):
        if proposal.row.max() == 1.0:  # certain
            yield proposal
            continue
        drawn += 1
        following = ref.push_forward(w.pair, lambda _: q((0,) * drawn), 1, chance)  # noqa: B023
        yield Proposal(proposal.token, next(following).row)


@pytest.mark.parametrize(
    ("draft", "rule", "k"),
    [
        (another_place, ref.token_rule, 2),
        (another_place, ref.block_rule, 2),
        (fresh_rest, ref.token_rule, 2),
        (exact_decompositions, ref.token_rule, 2),
        (DRAFTS["union"], null_then_target, 2),
        (truncated, ref.token_rule, 2),
        (low_confidence_dropped, ref.token_rule, 2),
        (likeliest(2, told=False), ref.token_rule, 2),
        (likeliest(2, told=False), ref.block_rule, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_biased_rules_are_caught(draft: Draft, rule: Callable, k: int) -> None:
    worst = max(deviation(world, draft, rule, k, length=3) for world in worlds(6))
    assert worst > WRONG


@pytest.mark.parametrize(
    ("draft", "k", "pairs"),
    [
        (kept_behind(2, 5), 3, worlds(8, drafter=(b"a", b"b"))),
        (kept_behind(4), 4, worlds(6, target=WORDS, drafter=LETTERS)),
    ],
    ids=["slrs-2 of 5", "slrs-4"],
)
def test_the_plain_row_after_a_proposal_is_caught(draft: Draft, k: int, pairs: list[World]) -> None:
    worst = max(deviation(world, draft, ref.token_rule, k, length=3) for world in pairs)
    assert worst > WRONG


def test_shared_noise_with_the_ratio_test_is_caught() -> None:
    """Sampling K and the correction from the same clocks is biased with the ratio test.

    It is correct for a race. Here token 0 has 3/4 of the residual. If 2 or 3 was drafted, the
    clocks of 0 and 1 are known to be late, that of 1 twice as late. So 0 wins 5 times in 6.
    """
    generator = np.random.default_rng(0)
    p, q = np.array([0.4, 0.3, 0.1, 0.2]), np.array([0.1, 0.2, 0.4, 0.3])
    clocks = generator.exponential(size=(50_000, 4))
    drafts = np.argmin(clocks / q, axis=1)
    passed = generator.random(len(clocks)) < (p / q)[drafts]
    with np.errstate(divide="ignore"):
        shared = np.argmin(clocks / np.maximum(p - q, 0.0), axis=1)
        apart = np.argmin(generator.exponential(size=clocks.shape) / np.maximum(p - q, 0), axis=1)

    def emitted(corrected: np.ndarray) -> Counter:
        return Counter(np.where(passed, drafts, corrected).tolist())

    expected = dict(enumerate(p))
    wrong = dict(enumerate(np.minimum(p, q) + 0.4 * np.array([5 / 6, 1 / 6, 0, 0])))
    assert missed(expected, wrong, len(clocks)) < MISSED
    assert follows(emitted(shared), wrong)
    assert not follows(emitted(shared), expected)
    assert follows(emitted(apart), expected)


# --------------------------------------------------------------------- the other verifiers


def test_race_acceptance() -> None:
    generator = np.random.default_rng(1)
    for _ in range(4):
        p, psi = generator.dirichlet(np.full(8, 0.5), size=2)
        clocks = generator.exponential(size=(50_000, 8))
        same = np.argmin(clocks / p, axis=1) == np.argmin(clocks / psi, axis=1)
        share, overlap = ref.race_acceptance(p, psi), np.minimum(p, psi).sum()
        expected = {True: share, False: 1 - share}
        assert follows(Counter(same.tolist()), expected)
        assert missed(expected, {True: overlap, False: 1 - overlap}, len(same)) < MISSED
        assert ref.race(p, clocks[0]) == np.argmin(clocks[0] / p)


@given(weights=st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=2))
def test_race_bounds(weights: list[tuple[float, float]]) -> None:
    p, psi = (np.array(side) / sum(side) for side in zip(*weights, strict=True))
    variation = 0.5 * np.abs(p - psi).sum()
    share = ref.race_acceptance(p, psi)
    assert share <= 1 - variation + 1e-9
    assert share >= (1 - variation) / (1 + variation) - 1e-9
    assert share >= (p * psi / (p + psi)).sum() - 1e-9


def _fuzzy(theta: float) -> Callable:
    return lambda p, c, stream, chance: ref.fuzzy_rule(p, c, stream, theta, chance)


def test_fuzzy() -> None:
    """Fuzzy verification is lossless at threshold 0; at 1 it is biased and accepts more."""
    world = worlds(1)[0]
    assert deviation(world, DRAFTS["push_forward"], _fuzzy(0.0), 2, length=3) < EXACT
    assert deviation(world, DRAFTS["push_forward"], _fuzzy(1.0), 2, length=3) > WRONG
    strict = accepted(world, DRAFTS["push_forward"], ref.token_rule, 2)
    assert accepted(world, DRAFTS["push_forward"], _fuzzy(1.0), 2) > strict


def test_fuzzy_is_strict_for_one_hot_rows() -> None:
    for world in worlds(4):
        assert deviation(world, DRAFTS["slem"], _fuzzy(1.0), 2, length=3) < EXACT


def test_maps_of_a_pair() -> None:
    pair = Pair((b"a", b"b", b"ab"), (b"a", b"b", b"aa"), longest_match((b"a", b"b", b"ab")))
    assert pair.kappa(2) == (0, 0)
    assert pair.twin(2) is None
    assert pair.spell((0, 2)) == b"aaa"
