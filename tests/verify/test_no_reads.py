# SPDX-License-Identifier: Apache-2.0
"""No rule reads a number from the device.

The tests run on fake tensors. These have no values and raise an exception when one is read.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from vllm_hetero_spec.trees.walk import TreeBatch, greedy_walk
from vllm_hetero_spec.verify import noise
from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.fuzzy import fuzzy_rule
from vllm_hetero_spec.verify.noise import choose
from vllm_hetero_spec.verify.race import first_arrivals
from vllm_hetero_spec.verify.rules import block_rule, greedy_rule, race_rule, token_rule

CPU = torch.device("cpu")
LENGTHS, WIDTH = [3, 0, 4, 1], 6000  # wide enough that `choose` divides a row into blocks
SAMPLED = {"token": token_rule, "block": block_rule, "race": race_rule}


def sent(*arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays on their way to the device: shapes and dtypes without values."""
    return [torch.empty(array.shape, dtype=torch.from_numpy(array).dtype) for array in arrays]


def batch(certain: bool) -> DraftBatch:
    count, own = sum(LENGTHS), ([7] * len(LENGTHS), [0] * len(LENGTHS))
    tokens = torch.empty(count, dtype=torch.int64)
    if certain:
        return DraftBatch.of(tokens, LENGTHS, *own, send=sent)
    row_of = np.arange(count) - 1
    tables = [torch.rand(5, WIDTH), torch.rand(count - 5, WIDTH)]
    return DraftBatch.of(tokens, LENGTHS, *own, tables, row_of, send=sent)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("cells", [noise._CELLS_ON_CPU, WIDTH])
@pytest.mark.parametrize("name", [*SAMPLED, "greedy", "js", "tv", "kl"])
def test_a_rule_reads_nothing(
    name: str, certain: bool, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for the whole batch and for parts of one row."""
    monkeypatch.setattr(noise, "_CELLS_ON_CPU", cells)
    with FakeTensorMode():
        drafts, p = batch(certain), torch.rand(sum(LENGTHS), WIDTH)
        bonus = torch.empty(len(LENGTHS), dtype=torch.int64)
        if name == "greedy":
            verdict = greedy_rule(drafts, p.argmax(-1), bonus)
        elif name in SAMPLED:
            verdict = SAMPLED[name](drafts, p, bonus)
        else:
            verdict = fuzzy_rule(drafts, p, bonus, name, 0.1).verdict
    assert verdict.tokens.shape == (len(LENGTHS), max(LENGTHS) + 1)
    assert verdict.accepted.shape == (len(LENGTHS),)


def test_a_walk_reads_nothing() -> None:
    parents: list[list[int]] = [[-1, 0, -1, -2, 2], [], [-1, -1]]
    with FakeTensorMode():
        tokens = torch.empty(10, dtype=torch.int64)
        verdict = greedy_walk(TreeBatch.of(tokens, parents, send=sent), tokens)
    assert verdict.tokens.shape == verdict.rows.shape == (3, 6)
    assert verdict.accepted.shape == (3,)


def test_a_rule_that_reads_is_caught() -> None:
    """A rule that reads a number must raise, or the tests above prove nothing."""

    def reads(drafts: DraftBatch) -> Verdict:
        short = (drafts.counts > 1).nonzero()[:, 0]
        return Verdict(drafts.tokens[short], short)

    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        reads(batch(True))


def test_first_arrivals_read_nothing() -> None:
    with FakeTensorMode():
        numbers = torch.empty(7, dtype=torch.int64)
        ids, speeds = first_arrivals(torch.rand(7, WIDTH), numbers, numbers, 4)
    assert ids.shape == speeds.shape == (7, 4)


@pytest.mark.parametrize("width", [5, WIDTH])
def test_a_draw_reads_nothing(width: int) -> None:
    with FakeTensorMode():
        chosen = choose(torch.rand(7, width), torch.rand(7, dtype=torch.float64))
    assert chosen.shape == (7,)


def test_one_packet_contains_all_arrays_of_the_host() -> None:
    """The arrays in the packet follow from the lengths."""
    packets = []

    def counted(*arrays: np.ndarray) -> list[torch.Tensor]:
        packets.append(len(arrays))
        return [torch.from_numpy(array) for array in arrays]

    make = partial(DraftBatch.of, torch.zeros(8, dtype=torch.int64), LENGTHS, send=counted)
    rows = {"draft_probs": [torch.zeros(1, 3)], "row_of": [0, -1] * 4}
    drafts = make([5, 6, 7, 8], [4, 3, 2, 1], **rows)
    assert len(packets) == 1
    assert drafts.counts.tolist() == LENGTHS
    assert drafts.drafted.tolist() == [0, 2, 3]
    assert drafts.request_of.tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert drafts.place_of.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert drafts.later.tolist() == [1, 2, 4, 5, 6]
    assert drafts.row_of is not None
    assert drafts.row_of.tolist() == [0, -1] * 4
    assert (drafts.seeds.tolist(), drafts.places.tolist()) == ([5, 6, 7, 8], [4, 3, 2, 1])
    assert drafts.weights.T.tolist() == [[1, 0], [0, -2]] * 4
    assert (drafts.heads.tolist(), drafts.tails.tolist()) == ([0, 3, 7], [2, 6, 7])
    assert drafts.sizes.tolist() == [3, 4, 1]
    assert drafts.grid.tolist()[2:] == [[3, 4, 5, 6, 7], [7, 7, 7, 7, 7]]
    placed = make(None, None, first_rows=np.array([0, 5, 6, 12]), room=6)
    assert (placed.seeds, placed.places, placed.noise) == (None,) * 3
    assert placed.rows.tolist() == [0, 1, 2, 6, 7, 8, 9, 12]
    assert placed.ends.tolist() == [3, 5, 10, 13]
    assert placed.columns.tolist() == list(range(7))


def test_noise_of_the_host_is_that_of_the_device() -> None:
    """Races draw on the device, and other rules on the host."""
    given = np.random.default_rng(1).integers(-(1 << 63), 1 << 63, (3, 1000))
    seeds, places, index = given[0], given[1] & 0xFFFFF, given[2] & 0xFF
    for purpose in (noise.RACE, noise.ACCEPT, noise.CORRECT):
        here = noise.uniform(noise.keys_of(seeds, purpose), places, index)
        seeds_there, *there = map(torch.from_numpy, (seeds, places, index))
        assert here.tolist() == noise.uniform(noise.keys_of(seeds_there, purpose), *there).tolist()
