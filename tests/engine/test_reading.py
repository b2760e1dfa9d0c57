# SPDX-License-Identifier: Apache-2.0
"""Division of texts that are too long for a graph. `test_decode_loop.py` reads some."""

import random
from collections.abc import Sequence

from vllm_hetero_spec.engine.drafter.steps import parts

# As on a device: the wider a graph is, the fewer texts it has.
MOST = {1: 16, 4: 16, 8: 16, 32: 16, 128: 4}


def widths(count: int) -> Sequence[int]:
    return [width for width, most in MOST.items() if count <= most]


def nothing(count: int) -> Sequence[int]:
    return ()


def test_each_part_fits_a_graph_and_leaves_what_another_takes() -> None:
    chance, some = random.Random(1), 0
    for _ in range(2000):
        contexts = [chance.choice((3, 40, 300)) + chance.randrange(300) for _ in range(8)]
        contexts = contexts[: chance.randint(1, 8)]
        pending = [min(length, chance.choice((1, 9, 40, 300, 900))) for length in contexts]
        left = pending.copy()
        found = parts(pending, contexts, widths, widths)
        some += bool(found)
        assert len(found) <= 4
        for width, texts in found:
            assert width in widths(len(texts))
            for index in texts:
                assert left[index] > width  # so the part is within the text
                left[index] -= width
        if found:
            last = [width for width in widths(len(left)) if width <= min(contexts)][-1]
            assert 1 <= max(left) <= last
    assert some > 500


def test_texts_that_fit_or_are_too_long_are_left_alone() -> None:
    assert parts([20, 1], [40, 90], widths, widths) == []
    assert parts([90], [90], nothing, nothing) == []
    assert parts([90], [90], widths, widths) == [(32, [0]), (32, [0])]
    assert parts([300, 1], [300, 900], widths, widths) == [(128, [0]), (128, [0])]
    few = parts([90], [90], widths, lambda _: (2, 4, 8, 16))  # a parallel drafter's graphs
    assert few == [(32, [0]), (32, [0]), (8, [0]), (8, [0])]
    assert parts([900], [900], widths, widths) == []
    assert parts([900], [5000], widths, widths) == []
    assert parts([100] * 17, [100] * 17, widths, widths) == []
