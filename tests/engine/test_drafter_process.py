# SPDX-License-Identifier: Apache-2.0
"""Engines with a drafter process: the output is the target's, also if that process fails."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import CORE, drafted_ahead, engine, metrics_of, patient, process, proposer_of, warnings
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.ahead import supervisor

pytestmark = pytest.mark.engine

PATIENCE = 120.0  # seconds; timeout that is long enough for a busy machine


@pytest.fixture(scope="module")
def llm(demo_pair: Path, alone: Outputs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("of_the_process")))
        with engine(demo_pair / "target", process(demo_pair / "drafter")) as llm:
            yield llm


def child_of(llm: Any) -> psutil.Process:
    kept = proposer_of(llm).drafting.source._process._process
    return psutil.Process(kept._child.pid)


def wait_until_up(llm: Any) -> None:
    """Wait until the drafter process is up. Reading `up` begins a restart that is due."""
    source = proposer_of(llm).drafting.source
    deadline = time.monotonic() + PATIENCE
    while not source._process.up:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_texts_are_the_targets_own(
    llm: Any, texts: list, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(llm, monkeypatch)
    assert generate(llm, texts, greedy()) == alone
    stats = drafted_ahead(llm)
    assert stats["drafter_tokens"] > stats["draft_tokens"]
    assert stats["catch_up_tokens"] > 20 * len(texts)


@pytest.mark.full
def test_a_salt_of_any_length_costs_no_draft(llm: Any, texts: list, alone: Outputs) -> None:
    """The salt itself is not sent to the process, because such a message would be too long."""
    before = read_stats(llm)
    salted: Any = {"prompt": texts[0], "cache_salt": "s" * (1 << 20)}
    assert generate(llm, [salted], greedy())["0"] == alone["0"]
    after = read_stats(llm)
    assert after["restarts"] == before["restarts"]
    assert "drafter_error" not in after["skipped"]
    assert after["drafter_tokens"] > before["drafter_tokens"]


@pytest.mark.full
def test_a_thousand_requests_that_are_aborted_leave_nothing(
    llm: Any, texts: list, alone: Outputs
) -> None:
    """Nothing is left in the engine or in the drafter process."""
    engine, before = llm.llm_engine, read_stats(llm)
    for number in range(1000 + 4):
        if number < 1000:
            engine.add_request(str(number), texts[number % 8][:40], greedy())
        if number >= 4:
            engine.abort_request([str(number - 4)])
        engine.step()
    assert not engine.has_unfinished_requests()
    for index in (3, 0, 3):
        assert generate(llm, [texts[index]], greedy())["0"] == alone[str(index)]
    stats, drafting = read_stats(llm), proposer_of(llm).drafting
    assert stats["forwards"] > before["forwards"]
    assert "drafter_error" not in stats["skipped"]
    assert len(drafting.requests) <= 1
    assert len(drafting.source.pool._free) >= drafting.source.pool._num_slots - 1


@pytest.mark.full
def test_a_process_at_a_tenth_of_its_speed_costs_no_request(
    llm: Any, texts: list, alone: Outputs
) -> None:
    child, before, over = child_of(llm), read_stats(llm), threading.Event()

    def slow() -> None:
        while not over.is_set():
            child.suspend()
            over.wait(0.018)
            child.resume()
            over.wait(0.002)

    with ThreadPoolExecutor(1) as pool:
        slowed = pool.submit(slow)
        try:
            for _ in range(3):
                assert generate(llm, texts, greedy()) == alone
        finally:
            over.set()
        slowed.result()
    stats = read_stats(llm)
    assert stats["restarts"] == before["restarts"]
    assert set(stats["skipped"]) <= {"not_guessed", "not_ready", "catching_up"}


@pytest.mark.full
def test_its_forwards_are_timed_as_they_are(llm: Any, texts: list, alone: Outputs) -> None:
    """Each timing runs new forwards. More tokens than a forward may have are read in two."""
    source = proposer_of(llm).drafting.source

    def done() -> tuple[int, int, int]:
        counts = source._process.counts
        return counts.forwards, counts.tokens, counts.read

    def settled() -> tuple[int, int, int]:
        """Return the counters after all pending drafts are complete."""
        last, now = None, done()
        while now != last:
            time.sleep(0.5)
            last, now = now, done()
        return now

    def grown(before: tuple[int, int, int], wanted: tuple[int, int, int]) -> bool:
        deadline = time.monotonic() + PATIENCE
        while True:
            grew = tuple(b - a for a, b in zip(before, done(), strict=True))
            if grew >= wanted or time.monotonic() > deadline:
                return grew == wanted
            time.sleep(0.001)

    for step, size, wanted in (
        (source.step, 4, (1, 4, 4)),
        (source.read, 64, (1, 1, 64)),
        (source.read, 64, (1, 1, 64)),
        (source.read, 600, (2, 1, 600)),
    ):
        before = settled()
        step(size)
        assert grown(before, wanted)
    assert generate(llm, texts, greedy()) == alone


@pytest.mark.full
def test_the_process_listens_to_nobody_and_has_its_cores(llm: Any) -> None:
    child = child_of(llm)
    listening = [c for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
    assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in listening)
    assert child.cpu_affinity() == [CORE]


@pytest.mark.full
def test_the_process_has_a_name_and_no_folder(
    llm: Any, texts: list, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name differs from a rank's in `ps`. Without a folder nothing is left after a kill."""
    wait_until_up(llm)
    patient(llm, monkeypatch)
    assert generate(llm, texts[:1], greedy())["0"] == alone["0"]
    child = child_of(llm)
    assert child.cmdline()[0].strip() == "VLLM::HeteroDrafter"
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


def test_a_process_that_is_killed_is_started_again(
    llm: Any, texts: list, alone: Outputs, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    wait_until_up(llm)
    assert generate(llm, texts, greedy()) == alone
    child, before = child_of(llm), read_stats(llm)
    child.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []
    assert generate(llm, texts, greedy()) == alone
    stats = read_stats(llm)
    assert stats["skipped"]["drafter_down"] > before["skipped"].get("drafter_down", 0)
    assert len(warnings(caplog, "drafter_down")) == 1
    assert stats["forwards"] >= before["forwards"] > 0
    wait_until_up(llm)
    patient(llm, monkeypatch)
    assert generate(llm, texts, greedy()) == alone
    after = read_stats(llm)
    assert after["restarts"] == 1
    assert after["drafts_ahead"] > stats["drafts_ahead"]
    for counter in ("forwards", "drafter_tokens", "forward_seconds"):
        assert after[counter] > stats[counter]


@pytest.mark.full
def test_a_process_that_is_stopped_holds_nobody_up(
    llm: Any, texts: list, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_up(llm)
    child = child_of(llm)
    child.send_signal(signal.SIGSTOP)
    before = read_stats(llm)["skipped"].get("drafter_down", 0)
    assert generate(llm, texts, greedy()) == alone
    assert read_stats(llm)["skipped"].get("drafter_down", 0) == before  # shorter than SILENCE
    monkeypatch.setattr(supervisor, "SILENCE", 0.0)
    assert generate(llm, texts, greedy()) == alone
    assert read_stats(llm)["skipped"]["drafter_down"] > before
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []


@pytest.mark.full
def test_the_process_ends_where_its_engine_does(llm: Any, texts: list, alone: Outputs) -> None:
    """It ends without a signal when the engine's end of the socket is closed."""
    wait_until_up(llm)
    child = child_of(llm)
    proposer_of(llm).drafting.source._process._process._socket.shutdown(socket.SHUT_RDWR)
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []
    assert generate(llm, texts[:1], greedy())["0"] == alone["0"]


@pytest.mark.full
def test_the_process_sleeps_with_its_engine(
    llm: Any, texts: list, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At level 1 the process stays and holds no KV blocks. At level 2 it ends and is restarted."""
    wait_until_up(llm)
    child, source = child_of(llm), proposer_of(llm).drafting.source
    assert generate(llm, texts, greedy()) == alone
    llm.sleep(level=1)
    deadline = time.monotonic() + PATIENCE
    while source._process.counts.blocks:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert child.is_running()
    llm.wake_up()
    assert generate(llm, texts, greedy()) == alone
    llm.sleep(level=2)
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []
    assert not source._process.up
    llm.wake_up()
    before = read_stats(llm)
    assert generate(llm, texts, greedy()) == alone
    wait_until_up(llm)
    patient(llm, monkeypatch)
    assert generate(llm, texts, greedy()) == alone
    assert read_stats(llm)["drafts_ahead"] > before["drafts_ahead"]


@pytest.mark.full
def test_a_drafter_that_is_the_target_is_always_right(
    demo_pair: Path,
    texts: list,
    alone: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with engine(demo_pair / "target", process(demo_pair / "target")) as llm:
        patient(llm, monkeypatch)
        assert generate(llm, texts, greedy()) == alone
        metrics, stats = metrics_of(llm), read_stats(llm)
        assert metrics["num_accepted_tokens"] == metrics["num_draft_tokens"] > 100
        assert "not_guessed" not in stats["skipped"]
        child = child_of(llm)
        monkeypatch.undo()
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []
    assert "could not be repaired" not in capfd.readouterr().err  # log of the process
