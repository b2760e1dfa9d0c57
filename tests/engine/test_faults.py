# SPDX-License-Identifier: Apache-2.0
"""Whatever the drafter does, every request ends with the target's text; the fault is counted."""

import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec.engine.stats import read_stats

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def texts(prompts: list[str]) -> list[str]:
    return prompts[:8]


@pytest.fixture(scope="module")
def alone(demo_pair: Path, texts: list[str]) -> Outputs:
    with engine(demo_pair / "target") as llm:
        return generate(llm, texts, greedy())


@pytest.fixture(scope="module")
def llm(demo_pair: Path) -> Iterator[Any]:
    with engine(demo_pair / "target", slem(demo_pair / "drafter")) as llm:
        yield llm


@pytest.fixture(autouse=True)
def fresh_counters(request: pytest.FixtureRequest) -> None:
    """Faults of one test must not quieten the warnings of the next."""
    if "llm" in request.fixturenames:
        proposer = proposer_of(request.getfixturevalue("llm"))
        proposer.stats.skipped.clear()
        proposer.reset()
        proposer._rest = proposer._failures = 0


def _skipped(llm: Any) -> dict[str, int]:
    return read_stats(llm)["skipped"]


def _warnings(caplog: pytest.LogCaptureFixture, reason: str) -> list[str]:
    return [m for m in caplog.messages if f"({reason})" in m]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Captures the drafter's logger, which vLLM keeps from propagating."""
    logger = logging.getLogger("vllm.hetero_spec")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_drafter_that_raises(llm: Any, texts: list, alone: Outputs, log, monkeypatch) -> None:
    calls = 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(proposer_of(llm)._drafter.model, "forward", broken)
        assert generate(llm, texts, greedy()) == alone
    skipped = _skipped(llm)
    assert skipped["drafter_error"] >= 8
    assert len(_warnings(log, "drafter_error")) == 1
    assert "out of order" in _warnings(log, "drafter_error")[0]
    # It rests longer and longer: 24 steps, but only a handful of attempts.
    assert skipped["backing_off"] > 0
    assert calls <= 6


def test_drafter_recovers(llm: Any, texts: list, alone: Outputs, monkeypatch) -> None:
    model = proposer_of(llm)._drafter.model
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


def test_nan_logits(llm: Any, texts: list, alone: Outputs, log, monkeypatch) -> None:
    model = proposer_of(llm)._drafter.model
    real = model.forward

    def first_request_is_nan(*args: Any) -> torch.Tensor:
        logits = real(*args)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", first_request_is_nan)
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["nan_logits"] > 0
    assert len(_warnings(log, "nan_logits")) == 1


def test_text_that_cannot_be_translated(
    llm: Any, texts: list, alone: Outputs, log, monkeypatch
) -> None:
    proposer = proposer_of(llm)
    bridge = proposer._requests._bridge
    real = bridge.open
    opened = 0

    def breaks_every_other() -> Any:
        nonlocal opened
        opened += 1
        context = real()
        context.broken = opened % 2 == 0
        return context

    monkeypatch.setattr(bridge, "open", breaks_every_other)
    before = metrics_of(llm)["num_accepted_tokens"]
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["untranslatable"] > 0
    assert len(_warnings(log, "untranslatable")) == 1
    assert metrics_of(llm)["num_accepted_tokens"] > before


def test_tokenizer_that_raises(llm: Any, texts: list, alone: Outputs, monkeypatch) -> None:
    bridge = proposer_of(llm)._requests._bridge

    def fails(*args: Any) -> Any:
        raise ValueError("cannot encode")

    monkeypatch.setattr(bridge._drafter, "encode_batch", fails)
    monkeypatch.setattr(bridge._drafter, "encode", fails)
    assert generate(llm, texts, greedy()) == alone
    assert _skipped(llm)["untranslatable"] > 0


def test_abort_during_drafting(llm: Any, texts: list, alone: Outputs, monkeypatch) -> None:
    """A request is gone by the time its draft arrives."""
    proposer = proposer_of(llm)
    real = proposer.propose_batch
    core = llm.llm_engine

    def aborts_first(*args: Any) -> Any:
        drafts = real(*args)
        if "0" in proposer._requests._states:
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


def test_pool_too_small(demo_pair: Path, texts: list, alone: Outputs, log) -> None:
    """Room for one short sequence: most requests go undrafted, all end right."""
    spec = slem(demo_pair / "drafter", kv_cache_memory_bytes=1)
    with (
        pytest.raises(Exception, match="less than two KV blocks"),
        engine(demo_pair / "target", spec),
    ):
        pass
    block = _block_bytes(demo_pair)
    spec["kv_cache_memory_bytes"] = 6 * block
    with engine(demo_pair / "target", spec) as llm:
        assert read_stats(llm)["kv_blocks"] == 5
        assert generate(llm, texts, greedy()) == alone
        assert _skipped(llm)["no_blocks"] > 0
        assert metrics_of(llm)["num_accepted_tokens"] > 0
    assert len(_warnings(log, "no_blocks")) == 1
    assert "kv_cache_memory_bytes" in _warnings(log, "no_blocks")[0]


def _block_bytes(demo_pair: Path) -> int:
    config = json.loads((demo_pair / "drafter" / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4 * 128


def test_short_drafter_context(demo_pair: Path, texts: list, alone: Outputs, log) -> None:
    """Beyond the drafter's length a request is no longer drafted; before it, it is."""
    spec = slem(demo_pair / "drafter", max_model_len=150)
    with engine(demo_pair / "target", spec) as llm:
        assert generate(llm, texts, greedy()) == alone
        assert _skipped(llm)["drafter_length"] > 0
        assert metrics_of(llm)["num_drafts"] > 0
    assert len(_warnings(log, "drafter_length")) == 1


def test_soak_leaks_neither_memory_nor_blocks(llm: Any, texts: list) -> None:
    """2,000 short requests: the pool ends empty, and the process stops growing."""

    def burst(count: int, salt: int) -> int:
        batch = [f"{texts[i % 8][: 40 + i % 60]} {salt} {i}" for i in range(count)]
        generate(llm, batch, greedy(max_tokens=4))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    proposer = proposer_of(llm)
    burst(500, 0)
    settled = burst(500, 1)
    grown = burst(1000, 2) - settled
    assert grown < 16 << 10, f"{grown} KiB"
    generate(llm, texts[:1], greedy(max_tokens=4))
    assert len(proposer._requests._states) <= 1
    assert proposer._pool.held <= -(-1024 // proposer._pool.block_size)
    assert read_stats(llm)["kv_blocks"] == proposer._pool.capacity
