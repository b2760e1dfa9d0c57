# SPDX-License-Identifier: Apache-2.0
"""`bench_bridge.py`: rows of the table, and steps that extend every request."""

import sys
from itertools import cycle

import bench_bridge
import pytest

from vllm_hetero_spec.text.tokenizer import TextTokenizer


def test_the_table_has_a_row_for_each_pair_and_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--steps", "4", "--batches", "1", "2"])
    monkeypatch.setenv("COLUMNS", "200")
    assert bench_bridge.main() == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in cells[:3]] for cells in lines if cells]
    kinds = "byte_bpe", "sentencepiece"
    expected = [[*pair, batch] for pair in (kinds, kinds[::-1]) for batch in ("1", "2")]
    assert [row for row in rows if row[0] in kinds] == expected


def test_a_step_extends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_bridge, "CONTEXTS", (4, 8))
    text = "def f(x):\n    return x + 1\n" * 40
    known: dict[str, TextTokenizer] = bench_bridge.load(None, text)
    target, drafter = known.values()
    ids = [target.encode(text), target.encode(text[10:])]
    ticks = cycle(range(4))  # a step reads the clock four times
    run = bench_bridge.Decoding(target, drafter, ids, 4, lambda: float(next(ticks)))
    run.step([1, 3])
    run.step([2, 1])
    assert run.seconds == [2.0, 2.0]  # one tick for each direction
    for request, given, taken in zip(run._requests, ids, (3, 4), strict=True):
        read = target.decode_bytes(given[4 : 8 + taken])
        assert drafter.decode_bytes(request.ids).strip() + request.held == read.strip()
