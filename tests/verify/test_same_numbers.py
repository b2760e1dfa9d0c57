# SPDX-License-Identifier: Apache-2.0
"""With given random numbers, the batched rules decide like the reference rules, token by token."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import reference as ref
import torch
from numpy.typing import ArrayLike
from reference import Proposal, Stream

from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch
from vllm_hetero_spec.verify.fuzzy import fuzzy_rule
from vllm_hetero_spec.verify.rules import block_rule, token_rule

SIZE, LONGEST, REQUESTS = 5, 4, 4000
THETA = 0.1
CLOSE = 1e-4  # a random number this near to a threshold may be rounded across it
DOUBT = 0.02  # largest share of requests with such a number
Readable = Callable[..., tuple[int, ...]]


def fuzzy(theta: float) -> Readable:
    return lambda p, c, stream, chance: ref.fuzzy_rule(p, c, stream, theta, chance)


RULES: dict[str, tuple[Callable, Readable]] = {
    "token": (token_rule, ref.token_rule),
    "block": (block_rule, ref.block_rule),
    "fuzzy": (
        lambda *args: fuzzy_rule(*args, divergence="js", threshold=THETA).verdict,
        fuzzy(THETA),
    ),
}


class Given:
    """A `Chance` with given random numbers: a flip for each proposal, and the only draw."""

    def __init__(self, flips: Sequence[float], drawn: float) -> None:
        self._flips, self._drawn = flips, drawn
        self._at = -1  # index of the proposal that the next flip decides
        self.doubtful = False  # True if a number was closer to a threshold than CLOSE

    def seen(self, proposals: Sequence[Proposal]) -> Stream:
        """Yield the proposals one by one. The first flip is for the last proposal yielded."""
        for number, proposal in enumerate(proposals):
            if proposal.token is not None:
                self._at = number
            yield proposal
            if proposal.token is None:
                return

    def flip(self, probability: float) -> bool:
        number = self._flips[self._at]
        self._at -= 1
        self.doubtful |= bool(abs(number - probability) < CLOSE)
        return bool(number < probability)

    def draw(self, weights: ArrayLike) -> int:
        sums = np.cumsum(np.asarray(weights, float))
        if sums[-1] < CLOSE:  # rounding errors only
            self.doubtful = True
            return 0
        edges = sums / sums[-1]
        self.doubtful |= bool((np.abs(edges[:-1] - self._drawn) < CLOSE).any())
        return int(np.searchsorted(edges, self._drawn, side="right"))


def random_row(generator: np.random.Generator) -> np.ndarray:
    """Return float32 [SIZE]; some values are often 0."""
    row = generator.dirichlet(np.full(SIZE, generator.choice([0.3, 1.0, 5.0])))
    row[generator.random(SIZE) < 0.2] = 0.0
    row = row / row.sum() if row.sum() > 0.01 else np.full(SIZE, 1 / SIZE)
    return row.astype(np.float32)


class Requests:
    """Random drafts of all kinds in one batch: sampled, certain and null proposals."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.lengths = generator.integers(0, LONGEST + 1, REQUESTS).tolist()
        self.target: list[list[np.ndarray]] = []  # the last row of each draft is its bonus token
        self.proposals: list[list[Proposal]] = []
        self.row_of: list[int] = []
        rows: list[np.ndarray] = []
        for length in self.lengths:
            own = [random_row(generator) for _ in range(length)]
            self.target.append([*own, ref.one_hot(int(generator.integers(SIZE)), SIZE)])
            self.proposals.append([])
            for p in own:
                if generator.random() < 0.25:
                    token = int(generator.integers(SIZE))
                    self.proposals[-1].append(Proposal(token, ref.one_hot(token, SIZE)))
                    self.row_of.append(-1)
                    continue
                share = np.float32(generator.random())
                row = share * p + (1 - share) * random_row(generator)  # often near the target's
                while np.count_nonzero(row) < 2:  # else the reference treats it as certain
                    row = random_row(generator)
                if generator.random() < 0.25:
                    row *= np.float32(0.7)  # the rest of the probability is a null proposal
                of = [*row.astype(float), max(0.0, 1 - float(row.sum()))]
                token = int(generator.choice(SIZE + 1, p=np.array(of) / sum(of)))
                proposed = None if token == SIZE else token
                self.proposals[-1].append(Proposal(proposed, row.astype(float)))
                self.row_of.append(len(rows))
                rows.append(row)
        self.rows = torch.from_numpy(np.array(rows))
        flat = [proposal.token for draft in self.proposals for proposal in draft]
        self.tokens = torch.tensor([FILLER if token is None else token for token in flat])

    def batch(self, told: torch.Tensor | None = None) -> DraftBatch:
        """Return the batch, with the rows `told` instead of its own if given."""
        own, rows = (range(REQUESTS), [7] * REQUESTS), self.rows if told is None else told
        return DraftBatch.of(self.tokens, self.lengths, *own, [rows], self.row_of)

    def batched(self, rule: Callable, told: torch.Tensor | None = None) -> list[tuple[int, ...]]:
        """Return the tokens that a batched rule emits."""
        p = torch.from_numpy(np.array([row for own in self.target for row in own[:-1]]))
        bonus = torch.tensor([int(own[-1].argmax()) for own in self.target])
        verdict = rule(self.batch(told), p, bonus)
        return [tuple(t for t in line if t != FILLER) for line in verdict.tokens.tolist()]

    def readable(self, rule: Readable, *, mixed_up: bool = False) -> list[tuple[int, ...] | None]:
        """Return what a reference rule emits with the batch's numbers; None for a close choice.

        `mixed_up` gives each proposal the number of another one.
        """
        drafts = self.batch()
        accept = drafts.padded(drafts.accept_noise(), 0.0).tolist()
        correct = dict(zip(drafts.drafted.tolist(), drafts.correct_noise().tolist(), strict=True))
        found: list[tuple[int, ...] | None] = []
        for i, (own, target) in enumerate(zip(self.proposals, self.target, strict=True)):
            flips = accept[i][: len(own)]
            chance = Given(flips[::-1] if mixed_up else flips, correct.get(i, 0.5))
            p = lambda c, target=target: target[len(c)].astype(float)  # noqa: E731
            emitted = rule(p, (), chance.seen(own), chance)
            found.append(None if chance.doubtful else emitted)
        return found


@pytest.fixture(scope="module")
def requests() -> Requests:
    return Requests(seed=11)


def differ(batched: Sequence[tuple[int, ...]], readable: Sequence[tuple[int, ...] | None]) -> int:
    sure = [(a, b) for a, b in zip(batched, readable, strict=True) if b is not None]
    assert len(sure) > (1 - DOUBT) * REQUESTS
    return sum(a != b for a, b in sure)


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_decides_as_the_reference(rule: str, requests: Requests) -> None:
    batched, readable = RULES[rule]
    words = requests.readable(readable)
    assert differ(requests.batched(batched), words) == 0
    emitted = [len(line) for line in words if line is not None]
    assert all(emitted.count(length) > REQUESTS // 100 for length in range(1, LONGEST + 2))


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("token", fuzzy(THETA / 5)),
        ("token", ref.block_rule),
        ("block", ref.token_rule),
        ("fuzzy", fuzzy(THETA / 2)),
        ("fuzzy", ref.token_rule),
    ],
)
def test_another_rule_is_caught(rule: str, wrong: Readable, requests: Requests) -> None:
    words = requests.readable(wrong)
    assert differ(requests.batched(RULES[rule][0]), words) > REQUESTS // 200


@pytest.mark.parametrize("rule", RULES)
def test_wrong_numbers_and_rows_are_caught(rule: str, requests: Requests) -> None:
    """The wrong rows are mixed with 10 % of a uniform row."""
    batched, readable = RULES[rule]
    words = requests.readable(readable, mixed_up=True)
    assert differ(requests.batched(batched), words) > REQUESTS // 200
    even = requests.rows.sum(-1, keepdim=True) / SIZE
    told = requests.batched(batched, 0.9 * requests.rows + 0.1 * even)
    assert differ(told, requests.readable(readable)) > REQUESTS // 200
