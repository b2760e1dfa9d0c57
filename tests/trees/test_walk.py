# SPDX-License-Identifier: Apache-2.0
"""A walk over any tree keeps the target's distribution, or its exact output."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import reference as ref
import torch
from chance import Chance
from goodness import follows
from hypothesis import given
from hypothesis import strategies as st
from reference import Proposal, Row
from toy_worlds import World, total_variation, worlds

from vllm_hetero_spec.trees.walk import NO_NODE, ROOT, TreeBatch, greedy_walk
from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch
from vllm_hetero_spec.verify.race import race
from vllm_hetero_spec.verify.rules import greedy_rule, race_rule

EXACT = 1e-10
WRONG = 0.05  # total variation that a known-wrong rule must exceed
Path = tuple[int, ...]
Step = Callable[[World, Path, Chance], Path]


def grown(generator: np.random.Generator, tokens: int, nodes: int) -> list[Path]:
    """Return the paths of a random tree, parents first."""
    tree: list[Path] = []
    while len(tree) < nodes:
        head = [(), *tree][generator.integers(len(tree) + 1)]
        path = (*head, int(generator.integers(tokens)))
        if path not in tree:
            tree.append(path)
    return tree


def deviation(step: Step) -> float:
    """Return the largest total variation between a step and the target alone over three tokens."""
    return max(
        total_variation(
            world.law_of(lambda c, chance: step(world, c, chance), length=3),  # noqa: B023
            world.target_law(length=3),
        )
        for world in worlds(6)
    )


# ------------------------------------------------------------------------------- laws


def drawn_walk(world: World, c: Path, chance: Chance) -> Path:
    tree = grown(np.random.default_rng(world.seed), len(world.pair.target), 8)
    return ref.walk(lambda u: chance.draw(world.p(c + u)), tree)


def looked_up(
    children: Callable[[Row, Chance], tuple[Proposal | None, Collection[int]]],
    rule: Callable = ref.tree_rule,
) -> Step:
    """A step with a tree of depth two; its children come from a row that is not the target's."""

    def step(world: World, c: Path, chance: Chance) -> Path:
        rows = World(world.pair, world.seed + 100)

        def behind(u: Path) -> tuple[Proposal | None, Collection[int]]:
            return children(rows.p(c + u), chance) if len(u) < 2 else (None, ())

        return rule(world.p, c, behind, chance)

    return step


def one_drawn(row: Row, chance: Chance) -> tuple[Proposal, Collection[int]]:
    """A sampled child, and the likeliest of the others as a certain one."""
    token = chance.draw(row)
    return Proposal(token, row), [next(t for t in np.argsort(-row).tolist() if t != token)]


def kept_out(row: Row, chance: Chance) -> tuple[Proposal, Collection[int]]:
    """The likeliest child as a certain one, and one sampled from the distribution of the others."""
    best, others = int(np.argmax(row)), row.copy()
    others[best] = 0.0
    others /= others.sum()
    return Proposal(chance.draw(others), others), [best]


def test_lossless() -> None:
    assert deviation(drawn_walk) < EXACT
    assert deviation(looked_up(one_drawn)) < EXACT
    assert deviation(looked_up(kept_out)) < EXACT


def law_not_told(row: Row, chance: Chance) -> tuple[Proposal, Collection[int]]:
    """A child sampled among the others, but with the row of all children. Biased."""
    proposal, certain = kept_out(row, chance)
    return replace(proposal, row=row), certain


def unlikely_dropped(row: Row, chance: Chance) -> tuple[Proposal | None, Collection[int]]:
    """A sampled child is left out of the tree if it is unlikely. Biased."""
    proposal, certain = one_drawn(row, chance)
    assert proposal.token is not None
    return (proposal if row[proposal.token] >= 0.3 else None), certain


def correction_from_p(p: Callable, c: Path, children: Callable, chance: Chance) -> Path:
    """If the sampled child is rejected, the token comes from p instead of the residual. Biased."""

    def all_of_p(u: Path) -> tuple[Proposal | None, Collection[int]]:
        drawn, certain = children(u)
        if drawn is None or chance.flip(p(c + u)[drawn.token] / drawn.row[drawn.token]):
            return drawn and Proposal(drawn.token, p(c + u)), certain
        return None, certain

    return ref.tree_rule(p, c, all_of_p, chance)


@pytest.mark.parametrize(
    "step",
    [looked_up(law_not_told), looked_up(unlikely_dropped), looked_up(one_drawn, correction_from_p)],
    ids=["law_not_told", "unlikely_dropped", "correction_from_p"],
)
def test_biased_relatives_are_caught(step: Step) -> None:
    assert deviation(step) > WRONG


def test_a_race_gives_the_same_with_any_tree() -> None:
    """The reference walk and the batched walk agree; the output has the target's distribution."""
    world, seeds = worlds(1)[0], 3000
    size = len(world.pair.target)
    texts = [text for n in range(4) for text in product(range(size), repeat=n)]
    rows = {text: torch.tensor(world.p(text)).float() for text in texts}
    generator = np.random.default_rng(5)
    found: Counter[Path] = Counter()
    for seed in range(seeds):

        def winner(c: Path) -> int:
            return int(race(rows[c][None], torch.tensor([seed]), torch.tensor([len(c)])))  # noqa: B023

        alone: Path = ()
        while len(alone) < 3:
            alone += (winner(alone),)
        found[alone] += 1
        tree = [path for path in grown(generator, size, 5) if len(path) < 3]
        out: Path = ()
        while len(out) < 3:
            out += ref.walk(lambda u: winner((out + u)[:3]), tree)  # noqa: B023
        assert out[:3] == alone
        won = torch.tensor([winner(path) for path in [(), *tree]])
        verdict = greedy_walk(batch_of([tree]), won)
        emitted = int(verdict.accepted[0]) + 1
        assert verdict.tokens[0, :emitted].tolist() == list(alone[:emitted])
    assert follows(found, world.target_law(length=3))


# ------------------------------------------------------------------------------- on tensors


def batch_of(trees: list[list[Path]]) -> TreeBatch:
    """Return the trees as rows of a batch; the token of a root has no effect."""
    tokens = [path[-1] if path else 0 for tree in trees for path in [(), *tree]]
    parents = [[[(), *tree].index(path[:-1]) - 1 for path in tree] for tree in trees]
    return TreeBatch.of(torch.tensor(tokens), parents)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 30),
    again=st.floats(0, 1),
)
def test_the_walk_on_tensors(sizes: list[int], seed: int, again: float) -> None:
    """The batched walk equals the reference walk for each request. Some rows are no nodes."""
    generator = np.random.default_rng(seed)
    rows: list[list[Path]] = []
    tokens: list[int] = []
    parents: list[list[int]] = []
    first: list[int] = []
    for size in sizes:
        own: list[Path] = [()]
        parents.append([])
        first.append(len(tokens))
        for path in grown(generator, 3, size):
            while generator.random() < again / 2:  # a node that is fed again, or no token
                own.append(own[generator.integers(len(own))])
                parents[-1].append(NO_NODE)
            parents[-1].append(own.index(path[:-1]) - 1)
            own.append(path)
        rows.append(own)
        tokens += [path[-1] if path else 2 for path in own]
    batch = TreeBatch.of(torch.tensor(tokens), parents)
    chosen = generator.integers(3, size=len(tokens))
    verdict = greedy_walk(batch, torch.from_numpy(chosen))
    width = max(map(len, parents)) + 1
    assert verdict.tokens.shape == verdict.rows.shape == (len(sizes), width)
    for i, (own, start) in enumerate(zip(rows, first, strict=True)):
        at = {path: start + own.index(path) for path in own}
        expected = ref.walk(lambda u: int(chosen[at[u]]), at)  # noqa: B023
        count = len(expected)
        behind = [FILLER] * (width - count)
        assert verdict.accepted[i] == count - 1
        assert verdict.tokens[i].tolist() == [*expected, *behind]
        assert verdict.rows[i].tolist() == [*(at[expected[:j]] for j in range(count)), *behind]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 1 << 30))
def test_a_chain_is_a_tree(lengths: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    size, rows = len(lengths), sum(lengths) + len(lengths)
    ends = np.cumsum(np.array(lengths) + 1) - 1
    drafted = np.ones(rows, bool)
    drafted[ends - lengths] = False
    before = torch.from_numpy(np.delete(np.arange(rows), ends))
    seeds, places = generator.integers(1 << 40, size=size), generator.integers(50, size=size)
    probs = torch.from_numpy(generator.dirichlet(np.full(4, 0.3), rows)).float()
    at = np.concatenate([place + np.arange(n + 1) for place, n in zip(places, lengths)])  # noqa: B905
    owners = np.arange(size).repeat(np.array(lengths) + 1)
    won = race(probs, torch.from_numpy(seeds[owners]), torch.from_numpy(at))
    for rule, chosen, target in (
        (greedy_rule, probs.argmax(-1), probs.argmax(-1)),
        (race_rule, won, probs),
    ):
        right = torch.from_numpy(generator.random(rows) < 0.7)
        other = torch.from_numpy(generator.integers(-1, 4, rows))
        tokens = torch.where(right, torch.cat([other[:1], chosen[:-1]]), other)
        chain = DraftBatch.of(tokens[torch.from_numpy(drafted)], lengths, seeds, places)
        parents = [range(ROOT, length - 1) for length in lengths]
        found = greedy_walk(TreeBatch.of(tokens, parents), chosen)
        expected = rule(chain, target[before], chosen[ends])
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.accepted, expected.accepted)
