# SPDX-License-Identifier: Apache-2.0
"""Rounds with graphs in a real engine. On a CPU, `TapeGraphs` replaces CUDA graphs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from apart_buffer import ApartBuffer
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy
from tape_graphs import TapeGraphs
from vllm import SamplingParams

from vllm_hetero_spec import read_stats, staging
from vllm_hetero_spec.engine.drafter import steps, token_healing
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.text.context import Context
from vllm_hetero_spec.text.drafts import FirstToken

pytestmark = [pytest.mark.full, pytest.mark.engine]
SIZES, WIDTHS = (1, 2, 4, 8), (1, 4, 8)
WIDE = (1, 8, 32, 128)  # texts are read in parts


@pytest.fixture(scope="module")
def llm(demo_pair: Path, alone: Outputs) -> Iterator[Any]:
    spec = slem(demo_pair / "drafter", method="slrs")
    with engine(demo_pair / "target", spec, max_num_seqs=8) as llm:
        yield llm


def record(llm: Any, widths: Sequence[int] = WIDTHS) -> TapeGraphs:
    """Record graphs. The CPU's attention can build its metadata only on the host."""
    graphs = TapeGraphs()
    drafter = proposer_of(llm).drafting.source.drafter
    shapes = [(size, width) for size in SIZES for width in widths]
    drafter.record(graphs.capture, shapes, GraphSupport(in_graph=False, several_tokens=True))
    return graphs


def copied_to_a_device(buffer: Any, size: int) -> None:
    """Replace `send`: copy the buffer to memory of its own, as to a device."""
    if buffer._there is buffer._host:
        buffer._there = torch.empty_like(buffer._host)
        buffer._typed.clear()
    buffer._there[:size].copy_(buffer._host[:size])


def drafted(llm: Any) -> dict[str, int]:
    stats = read_stats(llm)
    return {name: stats[name] for name in ("drafts", "draft_tokens", "drafter_tokens")}


def test_the_same_drafts_and_texts(
    llm: Any, texts: list[str], alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ApartBuffer` is separate memory, so a graph reads only inputs that were sent."""
    mixed = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=5, max_tokens=24, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.3),
    ]
    params = [mixed[index % 3] for index in range(len(texts))]
    runs = []
    for recorded in (False, True):
        graphs = None
        if recorded:
            monkeypatch.setattr(staging, "_Buffer", ApartBuffer)
            graphs = record(llm)
        proposer_of(llm).reset()  # the second run does not find KV of the first
        before, outputs = drafted(llm), []
        assert generate(llm, texts, greedy()) == alone
        for output in llm.generate(texts, params, use_tqdm=False):
            outputs.append(output.outputs[0].token_ids)
        runs.append((outputs, {name: n - before[name] for name, n in drafted(llm).items()}))
    assert runs[0] == runs[1]
    assert metrics_of(llm)["num_accepted_tokens"] > 0
    assert graphs is not None
    assert graphs.captured == len(SIZES) * (len(WIDTHS) + 1)
    assert read_stats(llm)["graph_forwards"] == graphs.replays > 50


def test_as_on_a_device(llm: Any, texts: list[str], alone: Outputs, monkeypatch: Any) -> None:
    """Drafting finishes in a later call. If the first token differs, the steps start again."""
    monkeypatch.setattr(staging._Buffer, "send", copied_to_a_device)
    monkeypatch.setattr(staging, "_Buffer", ApartBuffer)
    proposer, graphs = proposer_of(llm), record(llm, WIDE)
    drafter = proposer.drafting.source.drafter
    order, divided = [], []
    parts = steps.parts
    monkeypatch.setattr(steps, "parts", lambda *of: divided.extend(found := parts(*of)) or found)
    proposer.reset()
    for name in ("begin", "finish"):
        real = getattr(drafter, name)

        def noted(*args: Any, _name: str = name, _real: Any = real) -> Any:
            order.append(_name)
            return _real(*args)

        monkeypatch.setattr(drafter, name, noted)
    after_step = proposer.after_step

    def empty_at_first(*args: Any) -> Any:
        drafts = after_step(*args)
        order.append("returned")
        assert not any(drafts)
        return drafts

    monkeypatch.setattr(proposer, "after_step", empty_at_first)
    choose = proposer.drafting.bridge.first_choice

    def another(context: Context, candidates: Sequence[int], last: Sequence[int]) -> FirstToken:
        """For every third length of a context, choose another first token than the drafter."""
        told = len(context.ids) % 3 == 0
        return FirstToken(candidates[1]) if told else choose(context, candidates, last)

    monkeypatch.setattr(proposer.drafting.bridge, "first_choice", another)
    monkeypatch.setattr(drafter, "waits", True)
    monkeypatch.setattr(token_healing, "_OFTEN", 2.0)
    drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=4, repetition_penalty=1.3)
    llm.generate(texts, drawn, use_tqdm=False)
    accepted = metrics_of(llm)["num_accepted_tokens"]
    assert generate(llm, texts, greedy()) == alone
    assert metrics_of(llm)["num_accepted_tokens"] > accepted
    rounds = "".join(word[0] for word in order).split("r")
    assert set(rounds) <= {"b", "fb", "f", ""}  # in a step, each runs at most once, in this order
    assert "fb" in rounds
    assert drafter.restarted_rounds > 0
    assert "drafter_error" not in read_stats(llm)["skipped"]
    assert graphs.replays > 0
    assert divided
