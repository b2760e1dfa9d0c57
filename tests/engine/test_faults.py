# SPDX-License-Identifier: Apache-2.0
"""Faults of the drafter: each request ends with the target's text, and each fault is counted."""

import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem, warnings
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec import read_stats

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm(demo_pair: Path, alone: Outputs) -> Iterator[Any]:
    """An engine for all tests. `alone` comes first, because two engines cannot run together."""
    with engine(demo_pair / "target", slem(demo_pair / "drafter")) as llm:
        yield llm


@pytest.fixture(autouse=True)
def fresh_counters(request: pytest.FixtureRequest) -> None:
    """Faults of one test must not suppress the warnings of the next test."""
    if "llm" in request.fixturenames:
        proposer = proposer_of(request.getfixturevalue("llm"))
        proposer.stats.skipped.clear()
        proposer.reset()
        proposer.drafting._rest = proposer.drafting._failures = 0


def _skipped(llm: Any) -> dict[str, int]:
    return read_stats(llm)["skipped"]


def test_drafter_that_raises(llm: Any, texts: list, alone: Outputs, caplog, monkeypatch) -> None:
    calls = 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(proposer_of(llm).drafting.source.drafter.model, "forward", broken)
        assert generate(llm, texts, greedy()) == alone
    skipped = _skipped(llm)
    assert skipped["drafter_error"] >= 8
    assert len(warnings(caplog, "drafter_error")) == 1
    assert "out of order" in warnings(caplog, "drafter_error")[0]
    # The pause doubles with each fault, so 24 steps have at most 6 attempts.
    assert skipped["backing_off"] > 0
    assert calls <= 6


def test_drafter_recovers(llm: Any, texts: list, alone: Outputs, monkeypatch) -> None:
    model = proposer_of(llm).drafting.source.drafter.model
    real = model.forward
    calls = 0

    def once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("a hiccup")
        return real(*args)

    monkeypatch.setattr(model, "forward", once)
    before = metrics_of(llm)["num_accepted_tokens"]
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["drafter_error"] == 8
    assert metrics_of(llm)["num_accepted_tokens"] > before


def test_nan_logits(llm: Any, texts: list, alone: Outputs, caplog, monkeypatch) -> None:
    model = proposer_of(llm).drafting.source.drafter.model
    real = model.forward

    def first_request_is_nan(*args: Any) -> torch.Tensor:
        logits = real(*args)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", first_request_is_nan)
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["nan_logits"] > 0
    assert len(warnings(caplog, "nan_logits")) == 1


def test_what_one_text_has_spoilt_is_cleaned(llm: Any, texts: list, alone: Outputs) -> None:
    """Attention on a CPU multiplies the values behind a text by 0, and 0 * NaN is NaN."""
    source = proposer_of(llm).drafting.source
    source.pool._suspect.clear()  # left by another test
    for kv in source.drafter.model._kv_caches.values():
        kv[1:] = float("nan")
    assert generate(llm, texts, greedy()) == alone
    spoilt, before = _skipped(llm)["nan_logits"], metrics_of(llm)["num_accepted_tokens"]
    assert spoilt > 0
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["nan_logits"] == spoilt
    assert metrics_of(llm)["num_accepted_tokens"] > before


def test_text_that_cannot_be_translated(
    llm: Any, texts: list, alone: Outputs, caplog, monkeypatch
) -> None:
    proposer = proposer_of(llm)
    bridge = proposer.drafting.bridge
    real = bridge.open
    opened = 0

    def breaks_every_other(*args: Any) -> Any:
        nonlocal opened
        opened += 1
        context = real(*args)
        context.broken = opened % 2 == 0
        return context

    monkeypatch.setattr(bridge, "open", breaks_every_other)
    before = metrics_of(llm)["num_accepted_tokens"]
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["untranslatable"] > 0
    assert len(warnings(caplog, "untranslatable")) == 1
    assert metrics_of(llm)["num_accepted_tokens"] > before


def test_tokenizer_that_raises(llm: Any, texts: list, alone: Outputs, monkeypatch) -> None:
    bridge = proposer_of(llm).drafting.bridge

    def fails(*args: Any) -> Any:
        raise ValueError("cannot encode")

    monkeypatch.setattr(bridge._drafter, "encode_batch", fails)
    monkeypatch.setattr(bridge._drafter, "encode", fails)
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["untranslatable"] > 0


def test_abort_during_drafting(llm: Any, texts: list, alone: Outputs, monkeypatch) -> None:
    proposer = proposer_of(llm)
    real = proposer.propose_batch
    core = llm.llm_engine

    def aborts_first(*args: Any) -> Any:
        drafts = real(*args)
        if "0" in proposer.drafting.requests._states:
            core.abort_request(["0"])
        return drafts

    with monkeypatch.context() as patch:
        patch.setattr(proposer, "propose_batch", aborts_first)
        for index, text in enumerate(texts):
            core.add_request(str(index), text, greedy())
        found = {}
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
    assert {k: v for k, v in found.items() if k != "0"} == {
        k: v for k, v in alone.items() if k != "0"
    }
    assert generate(llm, texts, greedy()) == alone


@pytest.mark.full
def test_soak_leaks_neither_memory_nor_blocks(llm: Any, texts: list) -> None:
    """After 2,000 short requests the pool is almost empty, and memory has hardly grown.

    oneDNN keeps a compiled kernel for each new batch shape, up to its own bound. So 1,000 requests
    run before the first measurement, and the process may grow by 128 MiB.
    """

    def serve(count: int) -> tuple[int, int]:
        """Serve requests without common prefixes. Return Python's memory blocks and RSS, bytes."""
        for start in range(0, count, 250):
            served.append(start)
            batch = [f"{len(served)} {i} {texts[i % 8][: 40 + i % 60]}" for i in range(250)]
            generate(llm, batch, greedy(max_tokens=4))
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return sys.getallocatedblocks(), pages * resource.getpagesize()

    served: list[int] = []
    proposer = proposer_of(llm)
    settled_blocks, settled_rss = serve(1000)
    blocks, rss = serve(2000)
    # A request state that is not released takes hundreds of Python blocks, here 2,000 times.
    assert blocks - settled_blocks < 40_000
    assert rss - settled_rss < 128 << 20, f"{(rss - settled_rss) >> 20} MiB"
    generate(llm, texts[:1], greedy(max_tokens=4))
    assert len(proposer.drafting.requests) <= 1
    assert proposer.drafting.source.pool.held <= -(
        -1024 // proposer.drafting.source.pool.block_size
    )
    assert read_stats(llm)["kv_blocks"] == proposer.drafting.source.pool.capacity
