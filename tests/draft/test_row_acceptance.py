# SPDX-License-Identifier: Apache-2.0
"""Single-token acceptance from rows is what the readable algorithms reach, law by law."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
import torch
from calibrate_acceptance import RowAcceptance, race_acceptance
from hypothesis import given, settings
from hypothesis import strategies as st
from test_slrs import ToyMerging
from toy_worlds import LETTERS, WORDS, World, worlds

from vllm_hetero_spec.draft.slrs import MergeSpan
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.verify import reference as ref
from vllm_hetero_spec.verify.chance import Chance, law

CONTEXTS = ((), (0,), (3, 1))
Streamed = Callable[[World, Callable, Chance], ref.Stream]
# Beside the toy pair, one of which the drafter has twice a token, and one that shares nothing.
PAIRS = {
    "toy": worlds(4),
    "letters": worlds(4, target=WORDS, drafter=LETTERS),
    "duplicates": worlds(4, drafter=(b"a", b"b", b"ab", b"ab", b"bab")),
    "longer": worlds(4, drafter=(b"aa", b"bb", b"abb", b"bba")),
}

STREAMS: dict[str, Streamed] = {
    "union": lambda world, q, chance: ref.union(world.pair, q, 1, chance),
    "tli": lambda world, q, chance: ref.tli(world.pair, q, 1, chance),
    "push_forward": lambda world, q, chance: ref.push_forward(world.pair, q, 1, chance),
    "slrs_2": lambda world, q, chance: ref.slrs_n(world.pair, q, 2, 2, chance),
    "slrs_2_of_3": lambda world, q, chance: ref.slrs_n(world.pair, q, 2, 2, chance, 3),
    "slrs_3": lambda world, q, chance: ref.slrs_n(world.pair, q, 3, 3, chance),
}


def acceptance(world: World) -> RowAcceptance:
    pair = world.pair
    every = range(len(pair.drafter))
    twins = [-1 if (twin := pair.twin(d)) is None else twin for d in every]
    firsts = [pair.kappa(d)[0] for d in every]
    width = len(pair.target)
    maps = (TokenMap(torch.tensor(first), width) for first in (twins, firsts))
    return RowAcceptance(
        *maps, ToyMerging(world), spans=(MergeSpan(3), MergeSpan(2), MergeSpan(2, 3))
    )


def greedy_of(world: World, context: tuple[int, ...]) -> int:
    return next(ref.slem(world.pair, world.q_after(context), 2)).token


def tensor(rows: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.tensor(np.array(rows), dtype=torch.float32)


def measured(world: World, shift: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """All methods in all contexts; `shift` is put before what the drafter is asked to go on."""
    q = [world.q_after(context) for context in CONTEXTS]

    def follow(places: Sequence[int], paths: Sequence[Sequence[int]]) -> torch.Tensor:
        return tensor([q[i]((*shift, *path)) for i, path in zip(places, paths, strict=True)])

    return acceptance(world).measure(
        tensor([world.p(context) for context in CONTEXTS]),
        tensor([row(()) for row in q]),
        [greedy_of(world, context) for context in CONTEXTS],
        follow,
    )


def accepted(rule: Callable, world: World, context: tuple[int, ...], stream: Callable) -> float:
    """Probability that the first proposal is accepted, by going through all choices."""

    def one(chance: Chance) -> int:
        first: Iterator[ref.Proposal] = islice(stream(world, world.q_after(context), chance), 1)
        return len(rule(world.p, context, first, chance))

    return law(one).get(2, 0.0)  # accepted tokens are followed by another


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("method", STREAMS)
def test_acceptance_is_that_of_the_reference(name: str, method: str) -> None:
    for world in PAIRS[name]:
        found = measured(world)[method]
        for place, context in enumerate(CONTEXTS):
            expected = accepted(ref.token_rule, world, context, STREAMS[method])
            assert found[place].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_string_matching_is_that_of_the_reference(name: str) -> None:
    for world in PAIRS[name]:
        found = measured(world)
        for place, context in enumerate(CONTEXTS):
            expected = accepted(
                ref.exact_match,
                world,
                context,
                lambda world, q, chance: ref.slem(world.pair, q, 2),
            )
            assert found["slem"][place].item() == pytest.approx(expected, abs=1e-6)


def first_law(world: World, context: tuple[int, ...], method: str) -> np.ndarray:
    """The row beside the first proposal, which is the same whatever is drawn."""

    def one(chance: Chance) -> tuple[tuple[float, ...], ...]:
        stream = STREAMS[method](world, world.q_after(context), chance)
        return tuple(tuple(proposal.row) for proposal in islice(stream, 1))

    (rows,) = law(one)
    return np.array(rows[0]) if rows else np.zeros(len(world.pair.target))


@pytest.mark.parametrize("name", PAIRS)
def test_races_are_those_of_the_reference(name: str) -> None:
    for world in PAIRS[name]:
        found = measured(world)["race_tli"]
        for place, context in enumerate(CONTEXTS):
            row = first_law(world, context, "tli")
            expected = ref.race_acceptance(world.p(context), row)
            assert found[place].item() == pytest.approx(expected, abs=1e-6)


def test_shared_masses() -> None:
    world = PAIRS["toy"][0]
    found = measured(world)
    twins = {d: world.pair.twin(d) for d in range(len(world.pair.drafter))}
    for place, context in enumerate(CONTEXTS):
        q, p = world.q_after(context)(()), world.p(context)
        shared = sum(q[d] for d, twin in twins.items() if twin is not None)
        assert found["drafter_shared"][place].item() == pytest.approx(shared)
        target = sum(p[t] for t in {twin for twin in twins.values() if twin is not None})
        assert found["target_shared"][place].item() == pytest.approx(target)


@pytest.mark.parametrize("name", PAIRS)
def test_order_of_the_methods(name: str) -> None:
    """What the theory orders: union is never above TLI or push-forward, races below rejection."""
    for world in PAIRS[name]:
        found = measured(world)
        slack = 1e-9
        assert (found["union"] <= found["tli"] + slack).all()
        assert (found["union"] <= found["push_forward"] + slack).all()
        assert (found["tli"] <= found["target_shared"] + slack).all()
        assert (found["race_tli"] <= found["tli"] + slack).all()


def test_a_row_behind_the_wrong_text_is_noticed() -> None:
    """The tests above can fail: SLRS-n whose second row is of another context is another law."""
    wrong = 0.0
    for world in PAIRS["toy"]:
        found = measured(world, shift=(1,))["slrs_2"]
        for place, context in enumerate(CONTEXTS):
            right = accepted(ref.token_rule, world, context, STREAMS["slrs_2"])
            wrong = max(wrong, abs(found[place].item() - right))
    assert wrong > 0.01


def test_no_draft_is_never_accepted() -> None:
    world = PAIRS["toy"][0]
    p, q = tensor([world.p(()), world.p((0,))]), tensor([world.q_after(())(())] * 2)
    found = acceptance(world).measure(p, q, [-1, 2], lambda places, _: q[list(places)])
    assert found["slem"].tolist() == [0.0, pytest.approx(world.p((0,))[2])]


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 40),
    peak=st.sampled_from([0.05, 0.5, 2.0]),
    holes=st.floats(0, 0.8),
    same=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_races_of_any_rows(width: int, peak: float, holes: float, same: bool, seed: int) -> None:
    """Sums over a sorted row are the sum over all pairs, ties and zeros included."""
    generator = np.random.default_rng(seed)
    p, psi = generator.dirichlet(np.full(width, peak), (2, 3))
    psi[:, 1:][generator.random((3, width - 1)) < holes] = 0.0
    p[:, :-1][generator.random((3, width - 1)) < holes] = 0.0
    psi[:, ::3] = p[:, ::3]
    psi[0] = 0.0  # nothing is proposed
    if same:
        psi = p.copy()
    found = race_acceptance(torch.tensor(p), torch.tensor(psi))
    expected = [ref.race_acceptance(*rows) for rows in zip(p, psi, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    if same:
        assert found.tolist() == pytest.approx([float(row.sum() > 0) for row in p])
